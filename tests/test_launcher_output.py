"""`evenly run`: the lines that ranks print."""

import contextlib
import os
import pty
import subprocess
from pathlib import Path

from test_launcher import EVENLY_RUN, environment, write


def run_bytes(*words: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*EVENLY_RUN, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_lines_of_all_ranks_arrive_whole_and_with_their_rank(tmp_path: Path) -> None:
    write(
        tmp_path / "talk.py",
        r"""
        import os, sys
        rank = os.environ["RANK"]
        for number in range(300):
            for stream in (sys.stdout, sys.stderr):
                for _ in range(4):  # a line in four writes
                    stream.write(f"{rank}:{number:03d}:" + rank * 500)
                stream.write("\n")
        sys.stdout.buffer.write(b"\xff\xfe not text\n\nno end")
        """,
    )

    done = run_bytes("-n", "3", "talk.py", folder=tmp_path)

    assert done.returncode == 0
    expected = {
        rank: [f"[{rank}] " + f"{rank}:{number:03d}:{str(rank) * 500}" * 4 for number in range(300)]
        for rank in range(3)
    }
    out, err = done.stdout.split(b"\n"), done.stderr.split(b"\n")
    assert out.pop() == err.pop() == b""
    assert len(out) == 3 * 303
    assert len(err) == 3 * 300
    for rank in range(3):
        mine = f"[{rank}] ".encode()
        lines = [line.encode() for line in expected[rank]]
        assert [line for line in err if line.startswith(mine)] == lines
        extra = [mine + b"\xff\xfe not text", mine, mine + b"no end"]
        assert [line for line in out if line.startswith(mine)] == lines + extra


def test_on_a_terminal_rank_0_keeps_it(tmp_path: Path) -> None:
    write(
        tmp_path / "terminal.py",
        """
        import os, sys
        for _ in range(100):
            print("terminal", sys.stdout.isatty(), sys.stderr.isatty(), os.environ["RANK"])
        """,
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*EVENLY_RUN, "-n", "2", "terminal.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that all have closed it
        while data := os.read(ours, 10_000):
            shown += data
    os.close(ours)
    _, errors = process.communicate(timeout=60)

    expected = ["[1] terminal False False 1"] * 100 + ["terminal True False 0"] * 100
    assert sorted(shown.decode().splitlines()) == expected
    assert errors == b""


def test_a_run_ends_when_nobody_reads_its_output(tmp_path: Path) -> None:
    write(
        tmp_path / "endless.py",
        """
        import time
        while True:
            print("a line")
            time.sleep(0.01)
        """,
    )
    process = subprocess.Popen(
        [*EVENLY_RUN, "-n", "2", "endless.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline().endswith(b"] a line\n")
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=20)
    assert b"BrokenPipeError" in errors
    assert process.returncode == 1
