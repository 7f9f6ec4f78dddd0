"""The world: which process this is, how many there are, and how they meet.

A world of one has no process group, no store and no threads: everything that talks to other
ranks is the identity there, so the same program runs alone at no cost.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from evenly import devices
from evenly.blame import blame, lost_contact, raised_by_torch
from evenly.board import Board
from evenly.errors import (
    DeviceError,
    LateError,
    LostError,
    NoWorldError,
    RankFailedError,
    SettingError,
    WorldError,
)
from evenly.lines import Lines
from evenly.store import connect, loopback_interface
from evenly.variables import Place, read_place
from evenly.watchdog.activity import EVERYBODY, activity
from evenly.watchdog.watching import Watching, watching
from evenly.wording import ranks as named

_current: World | None = None
_opens: Counter[str] = Counter()
"""How many worlds this process has opened, by attempt: each has keys of its own in the store."""

_TIMED_OUT = ("timed out", "timeout")


class World:
    """The processes that train together, seen from one of them. Made by `open_world`."""

    def __init__(self, place: Place, *, device: torch.device, timeout: float) -> None:
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.node = place.node
        self.launcher = place.launcher
        self.device = device
        self.timeout = timeout
        self.backend = "none"
        self.group: dist.ProcessGroup | None = None
        self.store: dist.Store | None = None
        self.board: Board | None = None
        self.turns = 0
        """How many one-rank sections have been entered; equal on all ranks."""
        self.in_turn = 0
        """How deep in such sections this rank is: collectives are refused there."""
        self.ambient = False
        """Whether no block holds it open: it ends with the process, or when training fails."""
        self.absent = ""
        """Why some ranks cannot come to a meeting now, if so; it is refused then."""
        self.apart = ""
        """Why ranks may not meet at all now, if so; a meeting is refused in a world of one too."""
        self.replicas: list[Any] = []
        """Weak references to replicated models: micro-batches hold back their gradient exchange,
        and closing makes them let go of the process group."""
        self._depth = 0
        self._closed = False
        self._roll_calls = 0
        self._owns_group = False
        self._lines = Lines()
        self._watching: Watching | None = None
        self._agent_store = place.agent_store
        self._restore: dict[str, str | None] = {}

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, size={self.size}, device={self.device}, "
            f"backend={self.backend!r}, launcher={self.launcher!r})"
        )

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leaving = error is None or (isinstance(error, SystemExit) and not error.code)
        try:
            # Further out it may yet be caught, so only the outermost block tells the others.
            if error is not None and not leaving and self._depth == 1:
                self.fail(error)
        finally:
            self.close(failed=not leaving)

    @property
    def collectives(self) -> int:
        """How many collectives this rank has taken part in, by whoever called them."""
        group: Any = self.group
        return 0 if group is None else int(group._get_sequence_number_for_group())

    def watch(self, place: Place, store: dist.Store | None = None) -> None:
        """Let this rank give signs of life from now on, where somebody can look at them; the
        first one at once, if there is a ``store`` for it.
        """
        if self._watching is None:
            self._watching = watching(
                place,
                world=_opens[place.attempt],
                timeout=self.timeout,
                store=store,
                facts=lambda: (self.collectives, self._gpu_memory()),
            )

    def _gpu_memory(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.memory_allocated(self.device))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks about an error that leaves this world, and raise what the user
        should read instead of it, if that is another rank's error. Talks to the store only.
        """
        if self.board is None or blame(error, self.rank) == "other":
            return
        explained = self.explain(error) if raised_by_torch(error) else error
        if not isinstance(explained, RankFailedError):
            self.board.post(explained)
        if explained is not error:
            raise explained from None

    def explain(self, error: BaseException, what: str = "a collective") -> BaseException:
        """What a failed collective means: the error of the rank that caused it, or who is late.
        What torch said is kept as a note.
        """
        explained = self._explain(error, what)
        if explained is not error and not isinstance(explained, RankFailedError):
            explained.add_note(f"torch said: {str(error).splitlines()[0][:200]}")
        return explained

    def _explain(self, error: BaseException, what: str) -> BaseException:
        if self.board is None or not isinstance(error, RuntimeError):
            return error
        text = str(error).lower()
        timed_out = any(words in text for words in _TIMED_OUT)
        if not (timed_out or lost_contact(error)):
            return error
        failure = self.board.failure(wait=2.0)
        if failure is not None:
            return failure
        if timed_out:
            return self._roll_call(what)
        left = self._left()
        if left:
            return LostError(
                f"{named(left)} left the world while rank {self.rank} was in {what}. Is something "
                "that all ranks must do inside an `if`, or did some ranks skip or end a step early?"
            )
        return LostError(
            f"rank {self.rank} lost contact with another rank during {what}, and no rank reported "
            "an error: one was killed (out of memory?), its machine went away, or the ranks gave "
            "different shapes or types."
        )

    def _left(self) -> list[int]:
        """The ranks that closed this world in good order."""
        if self.store is None:
            return []
        with contextlib.suppress(RuntimeError):
            return [r for r in range(self.size) if self.store.check([f"left/{r}"])]
        return []

    def _roll_call(self, what: str) -> WorldError:
        """Who else has given up waiting? Those who have not are the ones all waited for."""
        assert self.store is not None
        self._roll_calls += 1
        key = f"waiting/{self._roll_calls}/{what}"
        self.store.set(f"{key}/{self.rank}", "")
        time.sleep(2.0)  # the others' limits run out at nearly the same time
        missing = [r for r in range(self.size) if not self.store.check([f"{key}/{r}"])]
        return LateError(
            f"{named(missing) or 'some ranks'} did not reach {what} within {self.timeout:g} s "
            f"(rank {self.rank} waited). Look at what they were doing; if they only needed longer, "
            "pass a larger timeout to open_world().",
            missing,
        )

    def abandon(self) -> None:
        """Leave at once, however deeply it is nested: other ranks wait for this one, which has
        failed and will not come.
        """
        self._depth = 1
        self.close(failed=True)

    def close(self, *, failed: bool = False) -> None:
        """Leave the world; the outermost close takes the process group and threads down."""
        global _current
        if self._closed:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._closed = True
        if _current is self:
            _current = None
        if self._watching is not None:  # before the group goes, which its thread looks at
            self._watching.stop(leaves=not failed)
            self._watching = None
        if self.store is not None and self._owns_group and not failed:
            self._say_goodbye()
        if self.board is not None:
            self.board.close()
        for replica in filter(None, (reference() for reference in self.replicas)):
            replica.leave()
        if self._owns_group and dist.is_initialized():
            if failed:
                self._abort()
                self._lines.cut()  # the group itself may live on in the frames of a traceback
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        for name, value in self._restore.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.group = self.board = self.store = None

    def _say_goodbye(self) -> None:
        """Leave word for those who still wait. Where rank 0 serves the store, it stays until the
        others have read what they need.
        """
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "")
            if self._agent_store:
                return
            if self.store.add("gone", 1) == self.size:
                self.store.set("all gone", "")
            elif self.rank == 0:
                self.store.wait(["all gone"], timedelta(seconds=min(30.0, self.timeout)))

    def _abort(self) -> None:
        """End nccl's waits for other ranks: some rank has failed, and this group is over."""
        if self.group is not None and "nccl" in self.backend:
            with contextlib.suppress(RuntimeError):
                self.group._get_backend(torch.device("cuda")).abort()

    def _open_group(self, place: Place, backend: str | None) -> None:
        limit = timedelta(seconds=self.timeout)
        prefix = f"evenly/{place.attempt}/{_opens[place.attempt]}"
        store = connect(place, limit)
        self.store = dist.PrefixStore(prefix, store)
        self.watch(place, store)
        self.backend = self._arrive(backend)
        ears = dist.PrefixStore(prefix, connect(place, limit))
        if place.one_machine:
            self._use_loopback()
        self.board = Board(self.store, ears, rank=self.rank, size=self.size, wake=self._abort)
        with self._lines:
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
                device_id=self.device if "nccl" in self.backend else None,
            )
        self._owns_group = True
        self.group = dist.group.WORLD
        self._wait_until_all_are_connected()

    def _wait_until_all_are_connected(self) -> None:
        """A rank that left or failed now would leave the others connecting to it for ever."""
        if self.store is None or self.board is None:
            return
        self.store.set(f"connected/{self.rank}", "")
        if self.store.add("connected", 1) == self.size:
            self.store.set("all connected", "")
        self.board.wait(
            "all connected", limit=self.timeout, late=lambda _: self._absent("connected", "connect")
        )

    def _absent(self, key: str, what: str) -> LateError:
        """The error that names the ranks which have not set their ``key``."""
        missing = [
            r for r in range(self.size) if self.store and not self.store.check([f"{key}/{r}"])
        ]
        return LateError(
            f"{named(missing)} of {self.size} did not {what} within {self.timeout:g} s. Did they "
            "fail before open_world(), or does only part of the program call it?",
            missing,
        )

    def _arrive(self, wanted: str | None) -> str:
        """Meet in the store: the last to arrive picks the backend for all (see devices.py)."""
        assert self.store is not None
        self.store.set(f"here/{self.rank}", json.dumps(devices.offer(self.device)))
        if self.store.add("arrived", 1) == self.size:
            names = [f"here/{rank}" for rank in range(self.size)]
            offers = [json.loads(entry) for entry in self.store.multi_get(names)]
            try:
                answer = {"backend": devices.choose_backend(offers, wanted)}
            except DeviceError as error:
                answer = {"refused": str(error)}
            self.store.set("decision", json.dumps(answer))
        try:
            self.store.wait(["decision"], timedelta(seconds=self.timeout))
        except dist.DistStoreError:
            raise self._absent("here", "open the world") from None
        answer = json.loads(self.store.get("decision"))
        if "refused" in answer:
            raise DeviceError(answer["refused"])
        return str(answer["backend"])

    def _use_loopback(self) -> None:
        """Keep gloo's and nccl's connections on this machine while the world is open."""
        loopback = loopback_interface()
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if loopback is not None and name not in os.environ:
                self._restore[name] = None
                os.environ[name] = loopback

    def _adopt_group(self, place: Place) -> None:
        """Use a process group that the user made; it stays when the world closes."""
        self.group = dist.group.WORLD
        self.backend = str(dist.get_backend_config(self.group))
        prefix = f"evenly/{place.attempt}/{_opens[place.attempt]}"
        self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.board = Board(self.store, None, rank=self.rank, size=self.size)


def open_world(
    *, device: str | None = None, backend: str | None = None, timeout: float = 600.0
) -> World:
    """Open the world that the launcher's variables describe, or one process without them.

    Use it as ``with evenly.open_world() as world:``. A nested open returns the same world; a
    process group that the program made itself is used and left open. ``device`` is "auto", "cpu",
    "cuda" or one device (not given: what EVENLY_DEVICE says, else "auto"); ``backend`` is chosen
    when not given; ``timeout`` (seconds) limits every wait for other ranks. All ranks must call it.
    """
    global _current
    if _current is None:
        if timeout <= 0:
            raise SettingError(f"timeout={timeout} leaves no time to meet; give seconds above 0.")
        place = read_place(os.environ)
        adopted = dist.is_available() and dist.is_initialized()
        if adopted:
            place = Place(**{**vars(place), "rank": dist.get_rank(), "size": dist.get_world_size()})
        wanted = device or os.environ.get("EVENLY_DEVICE", "auto")
        picked = devices.pick_device(wanted, place.local_rank)
        world = World(place, device=picked, timeout=timeout)
        if not _opens:
            atexit.register(_close_at_exit)
            os.register_at_fork(after_in_child=_forget)
        _opens[place.attempt] += 1
        if picked.type == "cuda":
            torch.cuda.set_device(picked)
        if adopted:
            world._adopt_group(place)
            if place.agent_store:
                world.watch(place)
        elif world.size > 1:
            try:
                with activity.within("start-up", "open_world", EVERYBODY):
                    world._open_group(place, backend)
            except BaseException as error:
                explained = world.explain(error, "opening the world")
                world.close(failed=True)
                # torch counts a group that failed to open, and would look for the next one under
                # another name than the ranks where it opened.
                dist.distributed_c10d._world.group_count = 0
                if explained is not error:
                    raise explained from None
                raise
        _current = world
        if world.size == 1:
            world.watch(place)
        activity.enter("program")
    _current._depth += 1
    return _current


def join_world(
    *, device: str | None = None, backend: str | None = None, timeout: float = 600.0
) -> World:
    """The open world, or else one that is opened now and stays until the process ends."""
    if _current is not None:
        here = str(_current.device)
        if device not in (None, "auto", here, here.partition(":")[0]):
            raise SettingError(
                f"device={device!r}, but the open world computes on {here}. Give it to "
                "open_world()."
            )
        _current._depth += _current.ambient
        return _current
    world = open_world(device=device, backend=backend, timeout=timeout)
    world.ambient = True
    return world


def current_world() -> World:
    """The open world. Raises NoWorldError when there is none."""
    if _current is None:
        raise NoWorldError(
            "no world is open, so it is not known which processes take part. Put this inside "
            "`with evenly.open_world():`, or make an evenly.Trainer first."
        )
    return _current


def report(error: BaseException) -> None:
    """Post an error that ends this process on the board of the open world, if there is one."""
    if _current is not None and _current.board is not None:
        with contextlib.suppress(WorldError):
            _current.fail(error)


def _close_at_exit() -> None:
    """A process that exits with an open process group aborts now and then; so close it."""
    if _current is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        report(error)
    close_all(failed=error is not None)


def _forget() -> None:
    """In a forked child, which is no rank: it must not speak or close for its parent."""
    global _current
    if _current is not None:
        _current.group = _current.store = _current.board = None
        _current.replicas = []
        _current._owns_group = False
        _current = None


def close_all(*, failed: bool = False) -> None:
    """Close the open world, if there is one, however deeply it is nested."""
    if _current is not None:
        _current._depth = 1
        _current.close(failed=failed)
