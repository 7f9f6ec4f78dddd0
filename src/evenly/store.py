"""The key-value store through which ranks meet before, beside and after their collectives."""

import socket
import uuid
from datetime import timedelta

import torch.distributed as dist

from evenly.errors import LateError, WorldError
from evenly.variables import LOOPBACK, Place

_PIECE = 1 << 20

# A store that rank 0 serves must outlive every world opened in this process: other ranks may
# still be closing one, or opening the next, when rank 0 is done with its own.
_served: dict[tuple[str, int], dist.TCPStore] = {}


def serve(host: str = LOOPBACK, *, listen: str | None = LOOPBACK, port: int = 0) -> dist.TCPStore:
    """Serve a store that others find at ``host``, listening on the address ``listen`` only.

    ``listen=None`` is everywhere; port 0 finds a free one. torch's TCPStore listens on all
    interfaces even when given a loopback address, and anyone who reaches it can read and delete
    its keys; a socket bound beforehand does not.
    """
    both = listen is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (listen or "") else socket.AF_INET
    try:
        listener = socket.create_server(
            (listen or "", port), family=family, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        raise WorldError(
            f"port {port} on {listen or host} cannot be used ({error.strerror}). Another job may "
            "hold it: set MASTER_PORT to a free port, or use `evenly run`, which finds one."
        ) from error
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(place: Place, timeout: timedelta) -> dist.TCPStore:
    """A client of the store at ``place``, of its own: a waiting client blocks every other call
    made through it, so each thread has one. Where no launcher serves the store, rank 0 does.
    """
    where = (place.address, place.port)
    if not place.agent_store and place.rank == 0 and where not in _served:
        if place.address in (LOOPBACK, "localhost"):
            _served[where] = serve(port=place.port)
        else:
            _served[where] = serve(place.address, listen=None, port=place.port)
    try:
        return dist.TCPStore(*where, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise LateError(
            f"rank {place.rank} found no store at {place.address}:{place.port} within "
            f"{timeout.total_seconds():g} s. Rank 0 or the launcher serves it: is it running, and "
            "can this machine reach that address?",
            [0],
        ) from error


def put(store: dist.Store, key: str, value: bytes) -> bool:
    """Set a key to a value of any size, unless it is set; whether it was not.

    A store drops a client that sends more than 8 MiB at once, so the value goes in pieces under
    keys of its own, before the key that says how many there are.
    """
    mark = uuid.uuid4().hex
    for start in range(0, len(value), _PIECE):
        store.set(f"{key}/{mark}/{start}", value[start : start + _PIECE])  # type: ignore[arg-type]
    entry = f"{mark} {len(value)}"
    return bool(store.compare_set(key, "", entry) == entry.encode())


def take(store: dist.Store, key: str) -> bytes:
    """The value that `put` left under a key."""
    mark, size = store.get(key).decode().split()
    names = [f"{key}/{mark}/{start}" for start in range(0, int(size), _PIECE)]
    return b"".join(store.get(name) for name in names)


def discard(store: dist.Store, key: str) -> None:
    """Take out what `put` left under a key."""
    mark, size = store.get(key).decode().split()
    for start in range(0, int(size), _PIECE):
        store.delete_key(f"{key}/{mark}/{start}")
    store.delete_key(key)


def loopback_interface() -> str | None:
    """The name of the loopback interface ("lo" on Linux), if it can be told."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), None)
