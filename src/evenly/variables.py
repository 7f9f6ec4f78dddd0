"""What the launcher says about this process: its rank, the size of the world, where to meet.

torchrun's variables (ours are the same) win over Slurm's, and those over Open MPI's, because
`srun torchrun` is common. Slurm's count only inside an srun step: a plain sbatch shell has
SLURM_PROCID=0 too and is one process. No family present means a world of one.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from evenly.errors import VariablesError

LOOPBACK = "127.0.0.1"


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's place among the others, before any contact with them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    address: str = LOOPBACK
    """Where the store is."""
    port: int = 0
    agent_store: bool = False
    """A launcher holds the store; otherwise rank 0 does."""
    attempt: str = "0"
    """Differs between restarts, so that a new attempt never reads an old one's keys."""
    launcher: str = "none"

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def read_place(environ: Mapping[str, str]) -> Place:
    """The place that the environment describes. Raises VariablesError if it contradicts itself."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _slurm(environ)
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _open_mpi(environ)
    return Place()


def _torchrun(environ: Mapping[str, str]) -> Place:
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    _within(environ, "RANK", "WORLD_SIZE")
    address = environ.get("MASTER_ADDR", LOOPBACK)
    alone = size > 1 and address not in (LOOPBACK, "localhost", "::1")
    # Without LOCAL_RANK: loopback means all ranks are on this machine; otherwise one per machine,
    # which is what Kubernetes jobs that set RANK by hand look like.
    local_rank = _integer(environ, "LOCAL_RANK", 0 if alone else rank)
    local_size = _integer(environ, "LOCAL_WORLD_SIZE", 1 if alone else size)
    if local_size > size:
        raise _contradiction(environ, "LOCAL_WORLD_SIZE", "WORLD_SIZE", "is larger than")
    if local_rank >= local_size:
        raise _contradiction(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "is not below")
    if size > 1 and not 0 < _integer(environ, "MASTER_PORT", 0) < 65536:
        raise VariablesError(
            f"WORLD_SIZE={size}, but MASTER_PORT={environ.get('MASTER_PORT', 'nothing')} is no "
            "port where the ranks could meet. Start the program with `evenly run` or `torchrun`, "
            "or set MASTER_ADDR and MASTER_PORT to the same free port on every rank."
        )
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=_integer(environ, "GROUP_RANK", 0 if local_size == size else rank // local_size),
        address=address,
        port=_integer(environ, "MASTER_PORT", 0),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("EVENLY_ATTEMPT", environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        launcher="evenly" if "EVENLY_ATTEMPT" in environ else "torchrun",
    )


def _slurm(environ: Mapping[str, str]) -> Place:
    # `srun --pty bash` in an allocation of 4 tasks is a step of one: the step's own count wins.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _integer(environ, "SLURM_PROCID"), _integer(environ, name)
    _within(environ, "SLURM_PROCID", name)
    node = _integer(environ, "SLURM_NODEID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(size)))
    per_node = _tasks_per_node(tasks)
    local_size = per_node[node] if node < len(per_node) else size
    local_rank = _integer(environ, "SLURM_LOCALID", rank)
    if local_rank >= local_size:
        raise VariablesError(
            f"SLURM_LOCALID={local_rank} is not below the {local_size} tasks that "
            f"SLURM_TASKS_PER_NODE={tasks!r} gives node {node}. Start each process by srun itself."
        )
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ['SLURM_STEP_ID']}"
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        address=environ.get("MASTER_ADDR", LOOPBACK if local_size == size else _first_host(nodes)),
        port=_integer(environ, "MASTER_PORT", _port_of(job)),
        attempt=environ.get("SLURM_RESTART_COUNT", "0"),
        launcher="slurm",
    )


def _open_mpi(environ: Mapping[str, str]) -> Place:
    prefix = "OMPI_COMM_WORLD_"
    rank, size = _integer(environ, prefix + "RANK"), _integer(environ, prefix + "SIZE")
    _within(environ, prefix + "RANK", prefix + "SIZE")
    local_rank = _integer(environ, prefix + "LOCAL_RANK", rank)
    local_size = _integer(environ, prefix + "LOCAL_SIZE", size)
    if local_rank >= local_size:
        raise _contradiction(environ, prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE", "is not below")
    if local_size < size and "MASTER_ADDR" not in environ:
        raise VariablesError(
            f"mpirun started {size} processes, {local_size} of them on this machine, and does not "
            "say where rank 0 is. Pass its address: `mpirun -x MASTER_ADDR=<host of rank 0> ...`."
        )
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", "0"))
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=rank // local_size,
        address=environ.get("MASTER_ADDR", LOOPBACK),
        port=_integer(environ, "MASTER_PORT", _port_of(job)),
        launcher="mpirun",
    )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise VariablesError(
                f"{name} is not set although its sister variables are "
                f"({', '.join(_sisters(environ, name))}). Start the program with `evenly run`, "
                "`torchrun`, `srun` or `mpirun`, or unset them all to run one process."
            )
        return default
    if not re.fullmatch(r"\d+", text.strip()):
        raise VariablesError(f"{name}={text!r} is not a whole number of zero or more.")
    return int(text)


def _sisters(environ: Mapping[str, str], name: str) -> list[str]:
    family = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    start = name.split("_", 1)[0] + "_"
    names = [n for n in environ if (n in family if name in family else n.startswith(start))]
    return [f"{n}={environ[n]}" for n in sorted(names)]


def _within(environ: Mapping[str, str], rank: str, size: str) -> None:
    if int(environ[rank]) >= int(environ[size]):
        raise _contradiction(environ, rank, size, "is not below")


def _contradiction(environ: Mapping[str, str], one: str, other: str, how: str) -> VariablesError:
    return VariablesError(
        f"{one}={environ.get(one)} {how} {other}={environ.get(other)}. These variables come from "
        "the launcher; a leftover from another job is the usual cause. Unset them and start again."
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, such as "4(x2),3": tasks on each node."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if match is None:
            raise VariablesError(f"SLURM_TASKS_PER_NODE={text!r} cannot be read.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """The first name of Slurm's short form, such as "gpu[07-09,12],cpu3"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise VariablesError(
            f"SLURM_STEP_NODELIST={nodes!r} names no node, so rank 0 cannot be found. "
            "Set MASTER_ADDR to its host name."
        )
    return match[1] + (match[2] or "")


def _port_of(job: str) -> int:
    """A port that all processes of a job derive alike; below the range of outgoing connections."""
    return 20_000 + zlib.crc32(job.encode()) % 12_000
