"""What a worker process is given: variables, streams, and a file to write its error to."""

import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from evenly.launcher.output import Output
from evenly.launcher.rendezvous import Rendezvous
from evenly.launcher.settings import Settings
from evenly.store import loopback_interface
from evenly.watchdog.files import FILES_VARIABLE
from evenly.watchdog.limits import REPORT_VARIABLE, TIMEOUT_VARIABLE
from evenly.watchdog.watching import WATCHER_VARIABLE

# torch's agent takes these signals unless this variable says otherwise. Ours takes them itself.
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_SIGNALS_OF_TORCH = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Surroundings(LogsSpecs):
    """Completes the environment that torch's agent makes for each worker, without touching the
    launcher's own, and says where the worker's streams go.
    """

    def __init__(
        self,
        settings: Settings,
        processes: int,
        rendezvous: Rendezvous,
        output: Output,
        folder: Path,
    ) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._output = output
        self._folder = folder
        self.error_files: dict[int, Path] = {}
        """Where each rank of the current attempt writes the exception that ended it."""
        self.watch_files: dict[int, Path] = {}
        """Where each of them leaves its stack and its black box, without their endings."""
        self._variables = {
            "OMP_NUM_THREADS": settings.thread_count(processes),
            "EVENLY_LAUNCHER": str(os.getpid()),
            # What the launcher sets for its own use is not for a worker that launches something.
            SIGNALS_VARIABLE: os.environ.get(SIGNALS_VARIABLE, _SIGNALS_OF_TORCH),
        }
        if settings.device is not None:
            self._variables["EVENLY_DEVICE"] = settings.device
        for name, value in (
            (REPORT_VARIABLE, settings.hang_report),
            (TIMEOUT_VARIABLE, settings.hang_timeout),
        ):
            if value is not None:
                self._variables[name] = str(value)
        interface = loopback_interface()
        if not settings.several_machines and interface:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                self._variables[name] = os.environ.get(name, interface)

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch's agent before each attempt; ``envs`` is what it gives each worker."""
        meeting = self._rendezvous.meeting
        if meeting is None:
            raise RuntimeError("workers start before the machines have met")
        self.error_files, self.watch_files = {}, {}
        streams: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            error_file = self._folder / f"{meeting.token}-{rank}.json"
            self.error_files[rank] = error_file
            self.watch_files[rank] = error_file.with_suffix("")
            env.update(
                self._variables,
                EVENLY_ATTEMPT=meeting.token,
                TORCHELASTIC_ERROR_FILE=str(error_file),
                **{
                    WATCHER_VARIABLE: meeting.token,
                    FILES_VARIABLE: str(self.watch_files[rank]),
                },
            )
            alone = env["WORLD_SIZE"] == "1"
            for name, paths in streams.items():
                paths[local_rank] = self._output.path(rank, name, alone=alone)
            # Lines arrive when they are printed, and none is lost in a crash. On a terminal Python
            # sees to that by itself, with one write a line: other ranks' lines cannot come into it.
            if streams["stdout"][local_rank] or not sys.stdout.isatty():
                env["PYTHONUNBUFFERED"] = "1"
            elif not alone:
                env["PYTHONUNBUFFERED"] = ""
        return LogsDest(
            stdouts=streams["stdout"],
            stderrs=streams["stderr"],
            # torch fails on an error file that is cut short, so only we read them.
            error_files=dict.fromkeys(envs, os.devnull),
        )
