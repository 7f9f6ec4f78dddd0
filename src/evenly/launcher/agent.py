"""torch's elastic agent, taught to report one failure, to stop quickly and to leave nothing behind.

torch starts, watches, restarts and stops the workers; this adds how the first failure is found
and told, a short time for workers to end, and the signals.
"""

import logging
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousError

from evenly.errors import LaunchError
from evenly.launcher import failures, rendezvous
from evenly.launcher.failures import Ending
from evenly.launcher.output import Output
from evenly.launcher.rendezvous import Meeting, Rendezvous
from evenly.launcher.settings import Settings
from evenly.launcher.signals import Signals, kill_groups
from evenly.launcher.surroundings import SIGNALS_VARIABLE, Surroundings
from evenly.launcher.watching import Watch
from evenly.stopping import EXIT_CODE, STOPPED_KEY
from evenly.variables import variable_set
from evenly.watchdog import words
from evenly.watchdog.judge import Finding
from evenly.watchdog.peers import EXIT_CODE as HUNG

# How long a worker may take to end after a signal before it is killed.
_GRACE = 2
# Seconds that ranks which were asked to stop, and have saved, may take to end.
_LAST_WAIT = 30.0
# How long to wait for the cause when the first ranks to fail only noticed another's failure: it
# may still be closing files and connections before it can say what happened to it.
_CAUSE = 3.0
# How long the other machines may take to hear that a hang is ended, before this one leaves.
_HEARD = 1.5


class Agent(LocalElasticAgent):
    """Runs the workers of this machine. ``exit_code`` is the run's, once ``run`` returned."""

    def __init__(
        self, spec: WorkerSpec, surroundings: Surroundings, output: Output, signals: Signals
    ) -> None:
        super().__init__(spec, surroundings)
        self._surroundings = surroundings
        self._output = output
        self._signals = signals
        self._seen: dict[int, float] = {}
        self._watch: Watch | None = None
        self._stopping = 0.0  # when the first rank ended that was asked to stop
        self.exit_code = 0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._signals.interruptible():
            super()._rendezvous(worker_group)
        handler = worker_group.spec.rdzv_handler
        self._signals.meeting = handler.meeting if isinstance(handler, Rendezvous) else None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._seen = {}
        started: dict[int, int] = super()._start_workers(worker_group)
        self._signals.workers = tuple(started.values())
        self._output.start()
        if self._signals.meeting is not None:
            workers = worker_group.workers
            self._watch = Watch(
                self._signals.meeting,
                size=workers[0].world_size,
                workers={w.global_rank: started[w.local_rank] for w in workers},
                files=self._surroundings.watch_files,
                say=say,
            )
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.check()
        codes = self._exit_codes(worker_group)
        if self._stopped_as_asked(codes):
            self._stopping = self._stopping or time.monotonic()
            if None in codes.values() and time.monotonic() - self._stopping < _LAST_WAIT:
                return RunResult(state=WorkerState.HEALTHY)  # the others are about to end, too
            if None in codes.values():  # a thread or an exit handler of the program's holds them
                self._signals.kill_workers()
                while None in self._exit_codes(worker_group).values():
                    time.sleep(0.05)
            self._remaining_restarts = 0
            self.exit_code = EXIT_CODE
            say(f"the run has stopped as asked, and saved (exit code {EXIT_CODE}).")
            self._exit_barrier()  # other machines ask the store that may be here
        elif any(codes.values()):
            self._fail(worker_group)
        elif self._watch is not None and self._watch.hung is not None:
            self._end_hang(worker_group, self._watch.hung)
        elif self._watch is not None and self._watch.elsewhere is not None:
            time.sleep(2 * _HEARD)  # this one may serve the store, which the other still needs
            self._tell(self._watch.elsewhere, codes)
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        # All have ended, so torch only counts: its own way of ending workers takes 30 seconds.
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _stopped_as_asked(self, codes: dict[int, int | None]) -> bool:
        """Whether the ranks that have ended say that they saved because of a request to stop.
        They say so in the store: a program may exit with that code for reasons of its own.
        """
        if not {EXIT_CODE} <= set(codes.values()) <= {EXIT_CODE, None}:
            return False
        if self._signals.meeting is None:
            return False
        with suppress(RuntimeError):
            return bool(self._signals.meeting.connect().check([STOPPED_KEY]))
        return False

    def _exit_barrier(self) -> None:
        self._signals.workers = ()  # they have ended; only other machines are waited for
        super()._exit_barrier()

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            say("another machine joined or left; starting all processes again.")
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _GRACE) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        # SIGINT lets a script end as after Ctrl-C in plain Python; everything else means now.
        gentle = death_sig if death_sig == signal.SIGINT else signal.SIGTERM
        if self._pcontext is not None:
            # Here and not below: torch 2.11 has no other way to wait less than 30 seconds.
            self._pcontext.close(gentle, _GRACE)
        super()._shutdown(gentle)
        if any(self._exit_codes(self._worker_group).values()):
            kill_groups(self._signals.workers)  # processes that the workers left behind
        self._signals.workers = ()
        self._output.finish(1.0 if self._signals.ending else None)

    def _exit_codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        """The exit code of each rank of this machine, None while it runs."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        handlers = self._pcontext.subprocess_handlers
        return {
            worker.global_rank: handlers[worker.local_rank].proc.poll()
            for worker in worker_group.workers
            if worker.local_rank in handlers
        }

    def _endings(self, codes: dict[int, int | None], *, unfinished: bool) -> list[Ending]:
        """How the ranks that failed until now ended, as their files and exit codes tell; if
        ``unfinished``, also those that wrote down their error and still run.
        """
        now = time.time()
        endings = []
        for rank, code in codes.items():
            file = self._surroundings.error_files[rank]
            if code is None and unfinished and file.exists():
                code = 1  # the file knows better
            if code:
                seen = self._seen.setdefault(rank, now)
                endings.append(failures.read_ending(rank, code, file, seen))
        return endings

    def _fail(self, worker_group: WorkerGroup) -> None:
        """Find the cause of the failure, stop the other ranks, and tell."""
        codes = self._exit_codes(worker_group)
        self._tell(self._cause(worker_group, codes), codes)

    def _end_hang(self, worker_group: WorkerGroup, found: Finding) -> None:
        """A rank is stuck for longer than a hang may last: stop all, which counts as a failure."""
        cause = Ending(
            rank=found.stuck[0].rank,
            code=HUNG,
            kind="hang",
            time=time.time(),
            what=words.ending(found),
        )
        if (worker_group.group_world_size or 1) > 1 and self._signals.meeting is not None:
            failures.publish(cause, self._signals.meeting)
            time.sleep(_HEARD)
        self._tell(cause, self._exit_codes(worker_group))

    def _tell(self, cause: Ending, codes: dict[int, int | None]) -> None:
        places, watch = "", self._watch
        if cause.kind == "signal" and watch is not None:
            places = watch.last_places()
        self._shutdown()
        self.exit_code = cause.exit_code
        line = failures.describe(
            cause,
            stopped=[rank for rank, code in codes.items() if code != 0 and rank != cause.rank],
            finished=[rank for rank, code in codes.items() if code == 0],
        )
        line = f"{line}{self._restarting()}."
        if watch is not None:
            state = {"signal": "dead", "hang": "stuck"}.get(cause.kind, "failed")
            watch.failed(cause.rank, state, line)
        say(line, before=cause.traceback)
        if places:
            say(f"last heard of, up to a second before: {places}.")

    def _cause(self, worker_group: WorkerGroup, codes: dict[int, int | None]) -> Ending:
        """The failure that explains the others, here or on another machine. Updates ``codes``."""
        deadline = time.monotonic() + _CAUSE
        meeting = self._signals.meeting if (worker_group.group_world_size or 1) > 1 else None
        while True:
            late = time.monotonic() > deadline
            codes.update(self._exit_codes(worker_group))
            cause = failures.root_cause(self._endings(codes, unfinished=late))
            if failures.is_cause(cause):
                if meeting is not None:
                    failures.publish(cause, meeting)
                return cause
            told = _published(meeting) if meeting is not None else None
            if told is not None:
                return told
            others = meeting is not None or None in codes.values()
            if late or not others:
                return cause
            self._signals.check()
            time.sleep(0.02)

    def _restarting(self) -> str:
        if self._remaining_restarts == 0:
            return ""
        if self._signals.requested is not None:
            self._remaining_restarts = 0
            return "; not restarted, because a stop was asked for"
        total = self._worker_group.spec.max_restarts
        return f"; restarting ({total - self._remaining_restarts + 1} of {total})"


def launch(settings: Settings) -> int:
    """Run the workers that ``settings`` ask for; the exit code of the run."""
    processes = settings.process_count()
    output = Output()
    folder = tempfile.TemporaryDirectory(prefix="evenly-")
    with folder, Signals(say, at_forced_exit=folder.cleanup) as signals, _torch_quiet():
        try:
            if settings.several_machines:
                say(f"meeting the other machines at {settings.rendezvous}.")
            with signals.interruptible():
                meeting = rendezvous.make(settings)
            surroundings = Surroundings(settings, processes, meeting, output, Path(folder.name))
            spec = WorkerSpec(
                role="worker",
                local_world_size=processes,
                rdzv_handler=meeting,
                entrypoint=sys.executable,
                args=_command(settings),
                max_restarts=settings.restarts,
                local_addr=settings.address,
            )
            agent = Agent(spec, surroundings, output, signals)
            # No signal's name, so torch takes none: `signals` does.
            with variable_set(SIGNALS_VARIABLE, "none"):
                result = agent.run()
            meeting.shutdown()
            return agent.exit_code if result is None or result.is_failed() else 0
        except SignalException as error:
            say(f"ended by {error.sigval.name}.")
            return signals.exit_code or 128 + error.sigval
        except RendezvousError as error:
            raise LaunchError(
                f"the machines could not meet at {settings.rendezvous} as job "
                f"{settings.job or 'evenly'!r}: {_first_line(error.__cause__ or error)}"
            ) from error
        except OSError as error:
            raise LaunchError(f"the processes could not be started: {error}") from error


def say(line: str, *, before: str = "") -> None:
    """A line of the launcher's own for the user, and a traceback ``before`` it."""
    with suppress(OSError):  # nobody reads it any more
        sys.stderr.write(f"{before}evenly: {line}\n")
        sys.stderr.flush()


def _published(meeting: Meeting) -> Ending | None:
    with suppress(RuntimeError):
        return failures.published(meeting.connect())
    return None


def _first_line(error: BaseException) -> str:
    """torch's messages go on with a stack of compiled code."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _command(settings: Settings) -> tuple[str, ...]:
    """What the interpreter gets: our bootstrap, then the user's program.

    The bootstrap runs by its path: with ``-m`` the current folder could shadow what it imports.
    """
    bootstrap = Path(__file__).parent.parent / "worker.py"
    kind = "module" if settings.module else "script"
    words = (str(bootstrap), kind, settings.target, *settings.arguments)
    # torch's agent fills in templates in arguments; "$$" is how they write "$".
    return tuple(word.replace("$", "$$") for word in words)


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """Silence the agent's own log, which would say everything a second time."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
