"""``evenly export``: a run's weights as one file that plain torch reads."""

from pathlib import Path
from typing import Literal

import click

from evenly.errors import EvenlyError


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file: .safetensors, or .pt/.pth for torch.load.",
)
@click.option(
    "--step", type=int, metavar="N", help="The checkpoint of step N. Default: the newest."
)
@click.option("--best", metavar="NAME", help='The best by a number, such as "validation/loss".')
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    help="Whether lower or higher is better, for --best. Of a loss: min.",
)
@click.option("--average", is_flag=True, help="The averaged weights of callbacks.EMA.")
@click.option("--replace", is_flag=True, help="Write over a file that exists.")
def export(
    source: Path,
    out: Path,
    step: int | None,
    best: str | None,
    mode: Literal["min", "max"] | None,
    average: bool,
    replace: bool,
) -> None:
    """Write the model's weights of SOURCE (a run's folder, a checkpoint, or a file of another
    tool) to one file, under the model's own names.
    """
    from evenly.checkpoint.sources import open_weights
    from evenly.checkpoint.weights import export as write

    try:
        weights = open_weights(source, step=step, best=best, mode=mode, average=average)
        size = write(weights, out, replace=replace)
    except EvenlyError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{len(weights.read)} tensors of {weights.where} are in {out} ({size:,} bytes).")
