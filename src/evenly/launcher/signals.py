"""What signals to the launcher do to a run.

=====================  ===========================================================================
Ctrl-C (SIGINT)        ends the run now: exit 130 (SIGHUP 129, SIGQUIT 131)
SIGTERM, SIGUSR1       a request to stop: workers that listen for it end when they are ready; if
                       none listens the run ends now: exit 128 + the signal's number
a second signal        ends the run now: exit 130
one more               kills what is left of it
=====================  ===========================================================================

The request is the key ``evenly/stop`` in the attempt's store, its value the signal's name. A worker
listens once it has added 1 to ``evenly/stop/listeners`` there.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from evenly.launcher.rendezvous import Meeting
from evenly.stopping import LISTENERS_KEY, STOP_KEY

_END = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_REQUEST = (signal.SIGTERM, signal.SIGUSR1)

# Everything is gone 5 seconds after Ctrl-C. Workers get some of them to end by themselves; if the
# launcher is still here after this many, it is stuck in a wait that nothing interrupts.
_PATIENCE = 4.0
_PATIENCE_WITHOUT_WORKERS = 0.5


class Signals:
    """While entered, takes the launcher's signals. The agent calls ``check`` at its own pace.

    A thread receives them, because Python runs no handler while the main thread waits in torch's
    compiled code (another machine, the exit barrier), and because asking the store may block.
    Outside the main thread no signal can be taken; then this does nothing.
    """

    def __init__(
        self, say: Callable[[str], None], *, at_forced_exit: Callable[[], None] = lambda: None
    ) -> None:
        self._say = say
        self._at_forced_exit = at_forced_exit
        self._previous: dict[signal.Signals, Any] = {}
        self._interruptible = False
        self._timer: threading.Timer | None = None
        self.meeting: Meeting | None = None
        """Where the current attempt's workers meet."""
        self.workers: tuple[int, ...] = ()
        """The process ids of the current attempt, each the leader of a group of its own."""
        self.requested: signal.Signals | None = None
        """The signal that asked the workers to stop."""
        self.ending: signal.Signals | None = None
        """The signal that ends the run."""
        self.exit_code = 0

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*_END, *_REQUEST):
            # `nohup` ignores SIGHUP on purpose.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._watch, name="evenly-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Raise torch's ``SignalException``, on which its agent stops the workers, if a signal
        ends the run.
        """
        if self.ending is not None:
            raise SignalException(f"ended by {self.ending.name}", self.ending)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this, a signal raises at once: nothing runs yet that could be left behind."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False

    def kill_workers(self) -> None:
        """Kill the groups of all workers, with the processes that the workers started."""
        kill_groups(self.workers)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible:
            self._interruptible = False
            chosen = signal.Signals(number)
            self.exit_code = self.exit_code or 128 + chosen
            raise SignalException(f"ended by {chosen.name}", chosen)

    def _watch(self) -> None:
        while numbers := os.read(self._reader, 1):
            if numbers[0] in self._previous:
                self._take(signal.Signals(numbers[0]))

    def _take(self, number: signal.Signals) -> None:
        if self.ending is not None:
            self.kill_workers()
        elif number in _REQUEST and self.requested is None:
            self.requested = number
            if self._ask(number):
                self._say(f"{number.name}: asked the run to stop; a second signal ends it now.")
            else:
                self._end(number, 128 + number)
        elif self.requested is None:
            self._end(number, 128 + number)
        else:
            self._end(number, 128 + signal.SIGINT)

    def _ask(self, number: signal.Signals) -> bool:
        """Publish the request to stop; whether somebody listens."""
        if self.meeting is None:
            return False
        try:
            store = self.meeting.connect()
            store.set(STOP_KEY, number.name)
            return bool(store.add(LISTENERS_KEY, 0) > 0)
        except RuntimeError:
            return False

    def _end(self, number: signal.Signals, exit_code: int) -> None:
        self.exit_code = exit_code
        self.ending = number
        patience = _PATIENCE if self.workers else _PATIENCE_WITHOUT_WORKERS
        self._timer = threading.Timer(patience, self._force)
        self._timer.daemon = True
        self._timer.start()

    def _force(self) -> None:
        try:
            self.kill_workers()
            self._say(f"ended by {self.ending.name if self.ending else 'a signal'}.")
            self._at_forced_exit()
        finally:
            os._exit(self.exit_code)


def kill_groups(leaders: Iterable[int]) -> None:
    """Kill the process groups that ``leaders`` lead, where they still exist."""
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
