"""``evenly run``: a script or module on several processes."""

import sys

import click

from evenly.errors import LaunchError, SettingError
from evenly.launcher import Settings, parse_nodes, parse_processes
from evenly.launcher import run as run_processes


# Options after the script are the script's.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--processes",
    default="1",
    metavar="N|auto",
    show_default=True,
    help=("Processes on this machine; auto: one per visible GPU, or per core without any."),
)
@click.option("-m", "--module", is_flag=True, help="TARGET is a module's name, as for python -m.")
@click.option(
    "--restarts",
    type=int,
    default=0,
    metavar="K",
    show_default=True,
    help=("Start all processes again after a failure, up to K times."),
)
@click.option(
    "--threads",
    type=int,
    metavar="T",
    help=(
        "OMP_NUM_THREADS of each process. Default: your own setting of it, else cores // processes."
    ),
)
@click.option(
    "--device",
    metavar="DEVICE",
    help='What open_world() uses if the program does not say: "cpu", "cuda". Default: auto.',
)
@click.option(
    "--hang-report",
    type=float,
    metavar="SECONDS",
    help="Report a rank that has not moved for so long; 0: never. Default: 60.",
)
@click.option(
    "--hang-timeout",
    type=float,
    metavar="SECONDS",
    help=(
        "End the run if others wait for such a rank for so long; 0: never. Default: as long as "
        "ranks wait for each other (600)."
    ),
)
@click.option(
    "--nodes",
    default="1",
    metavar="N|MIN:MAX",
    show_default=True,
    help=("Machines in the run; run the same command on each."),
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help=("Where several machines meet; HOST is one of them, PORT is free on it."),
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help=("This machine's address as the others see it. Default: its full host name."),
)
@click.option(
    "--wait",
    type=int,
    default=30,
    metavar="SECONDS",
    show_default=True,
    help=("With --nodes MIN:MAX: how long to wait for more machines once MIN are there."),
)
@click.option("--job", metavar="NAME", help="The run's name, the same on all its machines.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    processes: str,
    module: bool,
    restarts: int,
    threads: int | None,
    device: str | None,
    hang_report: float | None,
    hang_timeout: float | None,
    nodes: str,
    rendezvous: str | None,
    address: str | None,
    wait: int,
    job: str | None,
    target: str,
    arguments: tuple[str, ...],
) -> None:
    """Run TARGET, a script or (with -m) a module, with its ARGUMENTS on several processes.

    Each line of output starts with the rank it comes from. When a rank fails, its traceback is
    shown, the others are stopped, and its exit code is returned.
    """
    try:
        settings = Settings(
            target=target,
            arguments=arguments,
            module=module,
            processes=parse_processes(processes),
            nodes=parse_nodes(nodes),
            rendezvous=rendezvous,
            address=address,
            wait=wait,
            job=job,
            restarts=restarts,
            threads=threads,
            device=device,
            hang_report=hang_report,
            hang_timeout=hang_timeout,
        )
    except SettingError as error:
        raise click.UsageError(str(error)) from error
    if arguments and arguments[0] in ("-n", "--processes"):
        click.echo(
            f"evenly: {arguments[0]} after the program is the program's own; to start several "
            "processes put it before.",
            err=True,
        )
    try:
        code = run_processes(settings)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # before the processes were started; click would exit with 1
        code = 130
    sys.exit(code)
