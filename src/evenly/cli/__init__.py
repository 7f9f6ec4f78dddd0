"""The command line: one thin file per command, loaded when it is called."""

from importlib import import_module

import click

from evenly import __version__

# Name -> the line that `evenly --help` shows. The command is the function of that name in the
# module of that name here; loading one may load torch, which help does without.
_COMMANDS = {
    "run": "Run a script or module on several processes.",
    "verify": "Compare a program's training on several process counts.",
    "export": "Write a run's weights to one file that plain torch reads.",
    "runs": "List and compare runs.",
    "report": "Write runs as one HTML page.",
    "watch": "Show a run on a live page while it trains.",
    "demo": "Train on 1, 2 and 4 processes and compare the numbers.",
}


class _Commands(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f"evenly.cli.{cmd_name}"), cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"evenly.cli.{cmd_name}.{cmd_name} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Train PyTorch models on any number of processes and get the same numbers."""
