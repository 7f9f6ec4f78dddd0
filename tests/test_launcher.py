"""`evenly run`: how a program is started, what it sees, and that failed attempts are repeated."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner

from evenly.cli import main
from evenly.errors import SettingError
from evenly.launcher import Settings, parse_nodes, parse_processes
from evenly.launcher.settings import _cores

# As the installed command `evenly`, which does not put the current folder on its path.
EVENLY_RUN = (sys.executable, "-P", "-m", "evenly", "run")


class Launched:
    """A running `evenly run`; its whole process tree is gone when the test is over."""

    def __init__(self, *words: str, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*EVENLY_RUN, *words],
            cwd=folder,
            env=environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._known: set[psutil.Process] = set()
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until that many lines of standard output contain ``text``."""
        deadline = time.monotonic() + 60
        while sum(text in line for line in self.lines) < times:
            assert time.monotonic() < deadline, self.lines
            assert self.process.poll() is None, (self.lines, self.errors())
            time.sleep(0.02)
        self.tree()

    def tree(self) -> list[psutil.Process]:
        """The processes that live now, the launcher first; they are remembered."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            found = [launcher, *launcher.children(recursive=True)]
            self._known.update(found)
            return found
        return []

    def signal(self, number: signal.Signals) -> float:
        """Send a signal to the launcher and return the time."""
        self.tree()
        self.process.send_signal(number)
        return time.monotonic()

    def end(self, timeout: float = 60) -> int:
        """Wait for the launcher's end; its exit code."""
        code = self.process.wait(timeout)
        self._reader.join()
        return code

    def alive(self) -> bool:
        return self.process.poll() is None

    def orphans(self, patience: float = 1.0) -> list[psutil.Process]:
        """Processes of the tree that are alive although the launcher ended."""
        _, alive = psutil.wait_procs([p for p in self._known if p.is_running()], patience)
        return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        for process in [*self.tree(), *self._known]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start `evenly run` with these words in the folder of the test."""
    launched = []

    def begin(*words: str, env: Mapping[str, str] | None = None) -> Launched:
        launched.append(Launched(*words, folder=tmp_path, env=env))
        return launched[-1]

    yield begin
    for each in launched:
        each.close()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what would change a run, and with ``extra``."""
    unwanted = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    return kept | dict(extra or {})


def evenly_run(
    *words: str, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `evenly run` to its end."""
    return subprocess.run(
        [*EVENLY_RUN, *words],
        cwd=folder,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(file: Path, program: str) -> str:
    """Write a program for a test; its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(program))
    return file.name


SHOW = """
    import json, os, sys
    import neighbour
    seen = {"file": __file__, "name": __name__, "argv": sys.argv, "path": sys.path[0],
            "neighbour": neighbour.__file__, "package": __package__}
    print(json.dumps(seen))
    names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    print("variables", *[os.environ.get(name) for name in names])
    """


def test_a_script_sees_what_plain_python_gives_it(tmp_path: Path) -> None:
    write(tmp_path / "dir" / "show.py", SHOW)
    write(tmp_path / "dir" / "neighbour.py", "")
    write(tmp_path / "json.py", "raise ImportError('the current folder is not on the path')")
    words = ["dir/show.py", "a b", "--flag", "-n", "7", "$$x", "${local_rank}"]
    plain = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]

    ours = evenly_run("-n", "2", *words, folder=tmp_path)

    assert ours.stderr == ""
    variables = f"variables {max(1, _cores() // 2)} lo lo"
    assert sorted(ours.stdout.splitlines()) == sorted(
        f"[{rank}] {line}" for rank in (0, 1) for line in (plain, variables)
    )
    assert ours.returncode == 0


def test_a_module_sees_what_python_m_gives_it_and_one_process_has_no_prefix(
    tmp_path: Path,
) -> None:
    write(tmp_path / "package" / "__init__.py", "")
    write(
        tmp_path / "package" / "show.py",
        SHOW.replace("import neighbour", "import package.neighbour as neighbour"),
    )
    write(tmp_path / "package" / "neighbour.py", "")
    words = ["-m", "package.show", "--flag", "-m", "x"]
    plain = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]

    ours = evenly_run("-n", "1", *words, folder=tmp_path)

    assert ours.stderr == ""
    assert ours.stdout.splitlines() == [plain, f"variables {_cores()} lo lo"]


def test_threads_are_cores_over_processes_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = Settings(target=__file__)
    assert settings.thread_count(1) == str(_cores())
    assert settings.thread_count(10_000) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert settings.thread_count(1) == "5"
    assert Settings(target=__file__, threads=3).thread_count(1) == "3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["-n", "0", __file__], "0 processes cannot run anything"),
        (["-n", "many", __file__], "'many' processes: give a number or 'auto'"),
        (["--nodes", "4:1", "--rendezvous", "a:1", __file__], "nodes 4:1 is no range"),
        (["--nodes", "x", __file__], "nodes 'x' is no range"),
        (["--nodes", "0", __file__], "nodes 0:0 is no range"),
        (["--nodes", "2", __file__], "up to 2 nodes need a place to meet: give --rendezvous"),
        (["--nodes", "2", "--rendezvous", "host", __file__], "is not of the form HOST:PORT"),
        (["--restarts", "-1", __file__], "restarts cannot be negative"),
        (["--threads", "0", __file__], "a process needs at least 1 thread"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["run", *words])
    assert result.exit_code == click.UsageError.exit_code
    assert message in result.output
    assert "Traceback" not in result.output


def test_numbers_of_processes_and_nodes_are_read_as_written() -> None:
    assert parse_processes("auto") == "auto"
    assert parse_processes("12") == 12
    assert parse_nodes("2") == (2, 2)
    assert parse_nodes("1:4") == (1, 4)
    with pytest.raises(SettingError):
        parse_nodes("1:2:3")


def test_help_and_wrong_options_do_not_wait_for_torch() -> None:
    program = """
        import sys
        from evenly.cli import main
        for words in (["--help"], ["run", "--help"], ["run", "nowhere.py"]):
            try:
                main(words)
            except SystemExit:
                pass
        assert "torch" not in sys.modules
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Run a script or module on several processes." in done.stdout


@pytest.mark.soak
def test_ten_of_ten_restarts_recover(tmp_path: Path) -> None:
    write(
        tmp_path / "flaky.py",
        """
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", attempt, "sum", total.item(), os.environ["EVENLY_ATTEMPT"])
        dist.barrier()  # so that both have printed
        if attempt < 10 and dist.get_rank() == attempt % 2:
            raise RuntimeError(f"attempt {attempt} fails on purpose")
        dist.barrier()  # where the other one waits when it fails
        dist.destroy_process_group()
        """,
    )

    done = evenly_run("-n", "2", "--restarts", "10", "flaky.py", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    sums = re.findall(r"attempt (\d+) sum 2\.0 (\w+)", done.stdout)
    assert [int(attempt) for attempt, _ in sums] == [a for a in range(11) for _ in range(2)]
    assert len({token for _, token in sums}) == 11
    for attempt in range(10):
        who, other = attempt % 2, 1 - attempt % 2
        assert (
            f"RuntimeError: attempt {attempt} fails on purpose\n"
            f"evenly: rank {who} failed (exit code 1); rank {other} was stopped; "
            f"restarting ({attempt + 1} of 10).\n"
        ) in done.stderr
    assert done.stderr.count("Traceback") == 10


def test_two_nodes_make_one_world_and_both_tell_what_failed(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    write(
        tmp_path / "sum.py",
        """
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if dist.get_rank() == 3:
                raise ValueError("bad data")
            dist.barrier()
        print("node", os.environ["GROUP_RANK"], "sum", total.item(), os.environ["EVENLY_ATTEMPT"])
        dist.destroy_process_group()
        """,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["-n", "2", "--nodes", "2", "--rendezvous", place, "--address", "127.0.0.1"]
    words += ["--job", "sums", "--restarts", "1", "sum.py"]

    nodes = [start(*words, env={"GLOO_SOCKET_IFNAME": "lo"}) for _ in range(2)]

    assert [node.end() for node in nodes] == [0, 0], [node.errors() for node in nodes]
    lines = [line for node in nodes for line in node.lines]
    found = [re.fullmatch(r"\[(\d)\] node (\d) sum 6.0 \w+\n", line) for line in lines]
    seen = sorted(match.groups() for match in found if match)
    assert seen == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    assert len({line.split()[-1] for line in lines}) == 1
    told = sorted(node.errors().split("ValueError: bad data\n")[1] for node in nodes)
    assert told == [
        "evenly: rank 3 failed (exit code 1) on another machine; ranks 0, 1 were stopped; "
        "restarting (1 of 1).\n",
        "evenly: rank 3 failed (exit code 1); rank 2 was stopped; restarting (1 of 1).\n",
    ]
