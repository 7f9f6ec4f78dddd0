"""`evenly run`: what signals to the launcher do, and that nothing is left behind."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from test_launcher import Launched, start, write

__all__ = ["start"]  # the fixture

STUBBORN = """
    import os, signal, subprocess, sys, time
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if "torch" in sys.argv:
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
    if "helper" in sys.argv and os.environ["RANK"] == "0":
        ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", ignoring])
    print("ready")
    time.sleep(60)
    """

LISTENING = """
    import os, sys, time
    from torch.distributed import TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.add("evenly/stop/listeners", 1)
    print("ready")
    while not store.check(["evenly/stop"]):
        time.sleep(0.02)
    print("asked by", store.get("evenly/stop").decode())
    if "never" in sys.argv:
        time.sleep(60)
    time.sleep(0.5)
    print("saved")
    """


def test_ctrl_c_ends_stubborn_workers_and_only_loopback_listened(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    write(tmp_path / "stubborn.py", STUBBORN)
    run = start("-n", "2", "stubborn.py", "torch", "helper")
    run.wait_for("ready", times=2)
    time.sleep(0.3)  # the helper starts
    tree = run.tree()
    assert len(tree) == 4
    listening = [
        connection.laddr.ip
        for process in tree
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3  # the store, and gloo in each rank
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

    sent = run.signal(signal.SIGINT)

    assert run.end() == 130
    assert time.monotonic() - sent < 5
    assert run.orphans(patience=0.2) == []
    assert run.errors() == "evenly: ended by SIGINT.\n"


def test_workers_die_with_a_killed_launcher(start: Callable[..., Launched], tmp_path: Path) -> None:
    write(tmp_path / "stubborn.py", STUBBORN)
    run = start("-n", "2", "stubborn.py")
    run.wait_for("ready", times=2)
    assert len(run.tree()) == 3

    run.signal(signal.SIGKILL)

    assert run.end() == -signal.SIGKILL
    assert run.orphans() == []


def test_sigterm_without_listener_ends_the_run(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    write(tmp_path / "busy.py", "import time; print('ready'); time.sleep(60)")
    run = start("-n", "2", "--restarts", "3", "busy.py")
    run.wait_for("ready", times=2)

    sent = run.signal(signal.SIGTERM)

    assert run.end() == 128 + signal.SIGTERM
    assert time.monotonic() - sent < 2
    assert run.orphans() == []
    assert run.errors() == "evenly: ended by SIGTERM.\n"


def test_a_run_that_listens_ends_when_it_is_ready(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    write(tmp_path / "listening.py", LISTENING)
    run = start("-n", "1", "listening.py")
    run.wait_for("ready")

    run.signal(signal.SIGUSR1)

    assert run.end() == 0
    assert run.lines == ["ready\n", "asked by SIGUSR1\n", "saved\n"]
    assert run.errors() == (
        "evenly: SIGUSR1: asked the run to stop; a second signal ends it now.\n"
    )


def test_a_second_signal_ends_a_run_that_does_not_stop(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    write(tmp_path / "listening.py", LISTENING)
    run = start("-n", "1", "listening.py", "never")
    run.wait_for("ready")
    run.signal(signal.SIGTERM)
    run.wait_for("asked by SIGTERM")

    sent = run.signal(signal.SIGTERM)

    assert run.end() == 130
    assert time.monotonic() - sent < 5
    assert run.orphans() == []
