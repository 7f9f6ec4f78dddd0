"""How the machines of a run meet, and the store that the workers of each attempt share.

Every attempt gets a store of its own. torch keeps one for all attempts, so the workers of a new
one read the addresses that the dead ones left there: with gloo 13 of 14 restarts failed.
"""

import ipaddress
import json
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from evenly.launcher.settings import Settings
from evenly.store import serve
from evenly.variables import LOOPBACK, variable_set


@dataclass(frozen=True)
class Meeting:
    """The place where the workers of one attempt find each other."""

    host: str
    port: int
    token: str
    """Unique to the attempt, the same on all its machines."""

    def connect(self) -> TCPStore:
        """A client of the attempt's store, of its own: one that waits blocks its other users.
        Raises ``RuntimeError`` if the store does not answer soon.
        """
        timeout = timedelta(seconds=2)
        return TCPStore(self.host, self.port, timeout=timeout, wait_for_workers=False)


class Rendezvous(RendezvousHandler):
    """A torch rendezvous whose workers use a store that the agents serve, new each round."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._server: TCPStore | None = None
        self.meeting: Meeting | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "evenly"

    def get_run_id(self) -> str:
        return self._job

    def _serve(self, host: str, listen: str | None) -> tuple[TCPStore, Meeting]:
        """Serve a fresh store at ``host``, listening on the address ``listen`` only (everywhere
        if None); the last attempt's store ends.
        """
        server = serve(host, listen=listen)
        self._server = server
        return server, Meeting(host, server.port, uuid.uuid4().hex)


class OneMachine(Rendezvous):
    """All processes are on this machine: nobody to wait for, nothing beyond loopback."""

    def next_rendezvous(self) -> RendezvousInfo:
        server, self.meeting = self._serve(LOOPBACK, LOOPBACK)
        return RendezvousInfo(
            PrefixStore("evenly/agents", server),
            0,
            1,
            RendezvousStoreInfo(self.meeting.host, self.meeting.port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._server = None
        return True


class SeveralMachines(Rendezvous):
    """torch's own rendezvous brings the machines together; the first of them serves the store."""

    def __init__(self, settings: Settings, job: str) -> None:
        super().__init__(job)
        parameters = RendezvousParameters(
            "c10d",
            settings.rendezvous or "",
            job,
            *settings.nodes,
            local_addr=settings.address,
            last_call_timeout=settings.wait,
        )
        self._torch = get_rendezvous_handler(parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        # Else torch would serve a store for the workers, one for all attempts.
        with variable_set("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
            found = self._torch.next_rendezvous()
        # found.store is new in every round, so nothing stale can be read under this name.
        if found.rank == 0:
            host = _address(found)
            _, meeting = self._serve(host, _listening_address(host))
            found.store.set("evenly/meeting", json.dumps(vars(meeting)))
        else:
            self._server = None
        self.meeting = Meeting(**json.loads(found.store.get("evenly/meeting")))
        return RendezvousInfo(
            found.store,
            found.rank,
            found.world_size,
            RendezvousStoreInfo(self.meeting.host, self.meeting.port),
        )

    def is_closed(self) -> bool:
        return self._torch.is_closed()

    def set_closed(self) -> None:
        self._torch.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._torch.num_nodes_waiting()

    def shutdown(self) -> bool:
        self._server = None
        return self._torch.shutdown()


def make(settings: Settings) -> Rendezvous:
    """The rendezvous that ``settings`` ask for. On several machines this connects them."""
    if settings.several_machines:
        return SeveralMachines(settings, settings.job or "evenly")
    return OneMachine(settings.job or uuid.uuid4().hex)


def _address(found: RendezvousInfo) -> str:
    """The address of the round's first machine, as torch passed it around."""
    if found.bootstrap_store_info is None:  # torch's type allows it; its c10d handler does not
        return socket.getfqdn()
    return found.bootstrap_store_info.master_addr


def _listening_address(host: str) -> str | None:
    """Where to listen so that ``host`` is reachable: just there if it is an address of this
    machine; everywhere (None) if it is a name, which others may resolve to another address, or an
    address that a gateway stands for.
    """
    try:
        version = ipaddress.ip_address(host).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return None
    return host
