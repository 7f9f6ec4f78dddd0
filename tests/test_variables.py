"""The same program finds its place under torchrun, Slurm, mpirun, or alone."""

import pytest

from evenly.errors import VariablesError
from evenly.variables import read_place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-1@1",
}


def test_without_a_launcher_the_world_has_one_process() -> None:
    place = read_place({"PATH": "/bin", "LOCAL_RANK": "0"})
    assert (place.rank, place.size, place.launcher) == (0, 1, "none")


def test_torchrun_is_understood() -> None:
    place = read_place(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.node, place.address, place.port) == (1, "node0", 29500)
    assert not place.one_machine


def test_torchrun_wins_over_slurm_and_mpi() -> None:
    assert read_place({**TORCHRUN, **SRUN, **MPIRUN}).launcher == "torchrun"


def test_an_srun_step_is_understood() -> None:
    place = read_place(SRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 7, 1, 3)
    assert (place.node, place.address, place.launcher) == (1, "gpu07", "slurm")
    others = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert read_place(others).port == place.port, "ranks must derive the same port"
    assert read_place(others).local_size == 4


def test_a_plain_sbatch_shell_is_one_process() -> None:
    batch = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert read_place(batch).size == 1


def test_an_interactive_step_counts_its_own_tasks_not_the_allocation() -> None:
    shell = {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert read_place({**shell, "SLURM_STEP_NUM_TASKS": "1"}).size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu3", "gpu07"), ("n-[3,5]", "n-3")],
)
def test_the_first_slurm_host_serves_the_store(nodes: str, first: str) -> None:
    assert read_place({**SRUN, "SLURM_STEP_NODELIST": nodes}).address == first


def test_mpirun_is_understood() -> None:
    place = read_place(MPIRUN)
    assert (place.rank, place.size, place.local_rank, place.launcher) == (2, 3, 2, "mpirun")
    assert place.address == "127.0.0.1"


def test_mpirun_over_machines_needs_an_address() -> None:
    with pytest.raises(VariablesError, match="-x MASTER_ADDR"):
        read_place({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is larger than WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT=nothing is no port"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({**SRUN, "SLURM_PROCID": "7"}, "SLURM_PROCID=7 is not below SLURM_STEP_NUM_TASKS=7"),
        ({**SRUN, "SLURM_LOCALID": "3"}, "SLURM_LOCALID=3"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "x"}, "cannot be read"),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK=3 is not below"),
    ],
)
def test_variables_that_contradict_each_other_are_refused_by_name(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(VariablesError, match=words.replace("(", r"\(")):
        read_place(environ)
