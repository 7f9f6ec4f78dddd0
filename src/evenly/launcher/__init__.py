"""Start the processes of a run on torch's elastic agent, watch them, and say what became of them.

::

    settings     what to run, on how many processes, and the checks of it
    rendezvous   how the machines meet, and the store that each attempt gets afresh
    surroundings what a worker process is given: variables, streams, a file for its error
    output       the lines of all ranks, whole and with their rank in front
    failures     which rank's failure came first, and the words for it
    signals      what Ctrl-C, SIGTERM and SIGUSR1 do to a run
    agent        torch's agent, taught the above

A worker process runs :mod:`evenly.worker`, which runs the user's script.
"""

import os

from evenly.launcher.settings import Settings, parse_nodes, parse_processes
from evenly.variables import variable_set

__all__ = ["Settings", "parse_nodes", "parse_processes", "run"]


def run(settings: Settings) -> int:
    """Run ``settings.target`` on its processes and return the exit code of the whole run: 0, or
    the failing rank's (128 + s when signal s ended it).

    This is meant to be the whole job of its process: it takes over the signals while it runs and,
    if torch cannot be interrupted in any other way, ends the process 4 seconds after Ctrl-C.
    """
    # Else torch's compiled code prints a stack of 20 frames each time a machine that it connects
    # to is not there yet. Workers are not affected.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    with variable_set("TORCH_CPP_LOG_LEVEL", level):
        # torch takes seconds to load; wrong settings are reported without it.
        from evenly.launcher.agent import launch

    return launch(settings)
