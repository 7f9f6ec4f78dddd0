"""What each process of ``evenly run`` executes before and after the user's program.

The program sees what it would see under plain Python: ``sys.path``, ``sys.argv``, ``__main__``,
exit codes. Around it: the process dies with its launcher, and an exception goes to a file, so that
the launcher can show the one that caused the others. This file runs by its path and loads no torch.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Python put this file's folder first. Its modules are not for the user's program to import,
    # nor to come before those of the standard library.
    del sys.path[0]

import atexit
import contextlib
import faulthandler
import gc
import importlib.machinery
import io
import json
import os
import runpy
import signal
import threading
import time
import traceback
import types
from pathlib import Path

from evenly.blame import blame, summary_of
from evenly.lifeline import die_with_parent
from evenly.watchdog.activity import activity
from evenly.watchdog.files import FILES_VARIABLE, box_file, stack_file
from evenly.watchdog.stacks import prepare

# How long, in seconds, threads of a program that failed may go on.
_THREADS_END = 5.0

_failed = False
_end_well = False


def main(kind: str, target: str, arguments: list[str]) -> int:
    """Run the program; its exit code, unless it exits by itself."""
    global _end_well
    launcher = os.environ.get("EVENLY_LAUNCHER")
    if launcher is not None:
        die_with_parent(int(launcher))
    faulthandler.enable()
    if FILES_VARIABLE in os.environ:
        prepare(str(stack_file(os.environ[FILES_VARIABLE])))
        activity.record(str(box_file(os.environ[FILES_VARIABLE])))
    atexit.register(_leave, os.getpid())  # first in, so after the program's own
    sys.excepthook = _record
    try:
        if kind == "module":
            _run_module(target, arguments)
        else:
            _run_script(target, arguments)
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        _end_well = error.code in (None, 0)
        if not _end_well:
            _write_error(error, "", error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException as error:
        trace = _program_part(error.__traceback__)
        error.__traceback__ = trace
        _tell_other_ranks(error)
        hook = sys.excepthook
        try:
            # A hook of the program's own is for failures of its own.
            if hook is not _record and _blame(error) == "own":
                hook(type(error), error, trace)
        finally:
            _record(type(error), error, trace)
        # The interpreter waits for the program's threads, and nobody would read of the failure.
        end = threading.Timer(_THREADS_END, os._exit, [1])
        end.daemon = True
        end.start()
        return 1
    _end_well = True
    return 0


def _run_script(path: str, arguments: list[str]) -> None:
    """As ``python path arguments``."""
    sys.argv = [path, *arguments]
    if not Path(path).is_file() or path.endswith((".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")  # a folder or archive with a __main__.py
        return
    # Not by runpy: it would take the module away when its last line has run, while threads and
    # exit handlers still need it, and leave __file__ relative.
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).resolve().parent))
    program = types.ModuleType("__main__")
    program.__file__ = str(Path(path).absolute())
    loader = importlib.machinery.SourceFileLoader("__main__", program.__file__)
    program.__loader__ = loader
    sys.modules["__main__"] = program
    exec(loader.source_to_code(loader.get_data(path), program.__file__), program.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    """As ``python -m name arguments``."""
    sys.argv = ["-m", *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _leave(process: int) -> None:
    """The last of the exit handlers; the program's threads and own handlers are done."""
    if os.getpid() != process:
        return
    _close_process_group()
    if _end_well and "torch" in sys.modules:
        # As multiprocessing ends its processes: a thread of gloo's that asks for Python's lock
        # while Python is taken down aborts the process (8 of 76 runs of a plain DDP program; 2 of
        # 44 under torchrun), and a good run would fail.
        _flush_files()
        os._exit(0)
    if _failed:
        # The others have stopped, and a restart waits for this: do without Python's last search
        # for garbage, which takes up to a second with torch and would flush files on the way.
        _flush_files()
        gc.freeze()


def _flush_files() -> None:
    writing = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for thing in gc.get_objects():
        if type(thing) in writing:
            with contextlib.suppress(OSError, ValueError):
                thing.flush()


def _close_process_group() -> None:
    """Close the process group that the program left open: with one, a process aborts now and then
    when it ends (3 of 12 with gloo), and a good run would fail.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if _failed:
        # Closing may wait for peers that will not come. The error is written: die of the alarm.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3)
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()
    if _failed:
        signal.alarm(0)


def _program_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames that are not the program's."""
    ours = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib.")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def _tell_other_ranks(error: BaseException) -> None:
    """Post the error on the board of the world that the program left open, if it did."""
    world = sys.modules.get("evenly.world")
    if world is not None:
        world.report(error)


def _blame(error: BaseException) -> str:
    return blame(error, int(os.environ.get("RANK", "0")))


def _record(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Write the error for the launcher to show; show it here if that cannot be done."""
    if not _write_error(error, "".join(traceback.format_exception(kind, error, trace)), 1):
        sys.__excepthook__(kind, error, trace)


def _write_error(error: BaseException, text: str, exit_code: int) -> bool:
    """Write torch's error file, with a block of ours; whether that worked."""
    global _failed
    _failed = True
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    now = time.time()
    record = {
        "message": {
            "message": summary_of(error),
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "evenly": {
            "rank": int(os.environ.get("RANK", "0")),
            "kind": _blame(error),
            "time": now,
            "exit_code": exit_code & 0xFF,
        },
    }
    try:
        # Whole or not at all: the launcher may kill this process at any moment.
        Path(f"{file}.new").write_text(json.dumps(record))
        Path(f"{file}.new").replace(file)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
