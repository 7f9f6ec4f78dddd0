"""What to run and on how many processes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evenly.errors import SettingError
from evenly.watchdog.limits import checked, from_environment


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``evenly run`` was asked to do. Checked when made: raises ``SettingError``."""

    target: str
    """Path of a script, or name of a module if ``module`` is true."""

    arguments: tuple[str, ...] = ()
    """The script's own arguments."""

    module: bool = False
    """Run ``target`` as ``python -m target`` would."""

    processes: int | Literal["auto"] = 1
    """Processes on this machine; "auto" is one per visible GPU, or per core without any."""

    nodes: tuple[int, int] = (1, 1)
    """The fewest and the most machines that the run may have."""

    rendezvous: str | None = None
    """HOST:PORT where several machines meet; HOST is one of them."""

    address: str | None = None
    """This machine's address as the others see it (default: its full host name)."""

    job: str | None = None
    """The run's name, the same on all its machines."""

    wait: int = 30
    """Seconds for which more machines are waited for once the fewest are there."""

    restarts: int = 0
    """How often the processes are started again after a failure."""

    threads: int | None = None
    """``OMP_NUM_THREADS`` of each process. Default: the user's own value of that variable, else
    cores // processes, also for one process, so that one and many compute alike."""

    device: str | None = None
    """``EVENLY_DEVICE`` of each process: what `open_world` uses if the program does not say."""

    hang_report: float | None = None
    """``EVENLY_HANG_REPORT`` of each process: seconds after which a rank that does not move is
    reported; 0 is never. Default: the user's own value of that variable, else 60."""

    hang_timeout: float | None = None
    """``EVENLY_HANG_TIMEOUT``: seconds after which the run is ended if others wait for such a
    rank; 0 is never. Default: the user's own, else as long as ranks wait for each other."""

    def __post_init__(self) -> None:
        if not self.module and not Path(self.target).exists():
            raise SettingError(
                f"there is no script {self.target!r} (seen from {Path.cwd()}). "
                "To run a module by its name, put -m before it."
            )
        if (
            not self.module
            and Path(self.target).is_dir()
            and not Path(self.target, "__main__.py").is_file()
        ):
            raise SettingError(
                f"the folder {self.target!r} has no __main__.py; name a script in it."
            )
        if self.processes != "auto" and self.processes < 1:
            raise SettingError(f"{self.processes} processes cannot run anything; give 1 or more.")
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise SettingError(
                f"nodes {fewest}:{most} is no range; give MIN:MAX with 1 <= MIN <= MAX."
            )
        if most > 1 and self.rendezvous is None:
            raise SettingError(
                f"up to {most} nodes need a place to meet: give --rendezvous HOST:PORT, the same "
                "on every node, where HOST is one of the nodes and PORT is free on it."
            )
        if self.rendezvous is not None:
            host, _, port = self.rendezvous.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise SettingError(f"rendezvous {self.rendezvous!r} is not of the form HOST:PORT.")
        if self.wait < 1:
            raise SettingError(f"machines need 1 second at least to meet; {self.wait} was given.")
        if self.restarts < 0:
            raise SettingError(f"restarts cannot be negative; {self.restarts} was given.")
        if self.threads is not None and self.threads < 1:
            raise SettingError(f"a process needs at least 1 thread; {self.threads} was given.")
        checked("hang_report", self.hang_report)
        checked("hang_timeout", self.hang_timeout)
        from_environment(os.environ)  # else every rank would fail of a wrong variable

    @property
    def several_machines(self) -> bool:
        """Whether the run may have more than this machine."""
        return self.nodes[1] > 1

    def process_count(self) -> int:
        """Processes on this machine, with "auto" resolved (which loads torch)."""
        if self.processes != "auto":
            return self.processes
        import torch

        return torch.cuda.device_count() or _cores()

    def thread_count(self, processes: int) -> str:
        """The value of ``OMP_NUM_THREADS`` for each of ``processes`` on this machine."""
        if self.threads is not None:
            return str(self.threads)
        return os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // processes))


def parse_processes(text: str) -> int | Literal["auto"]:
    """The number of processes in ``"4"`` or ``"auto"``."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise SettingError(f"{text!r} processes: give a number or 'auto'.") from None


def parse_nodes(text: str) -> tuple[int, int]:
    """The fewest and the most nodes in ``"2"`` or ``"1:4"``."""
    fewest, colon, most = text.partition(":")
    try:
        return int(fewest), int(most if colon else fewest)
    except ValueError:
        raise SettingError(
            f"nodes {text!r} is no range; give one number, or MIN:MAX such as 1:4."
        ) from None


def _cores() -> int:
    # Only the cores this process may use: a container or `taskset` may leave it fewer.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
