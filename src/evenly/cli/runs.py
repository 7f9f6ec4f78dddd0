"""``evenly runs``: the runs in folders, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

# What a terminal has room for is shown; the others are there with --metric or --json.
_FIXED, _EACH, _MOST = 75, 16, 4


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("-m", "--metric", "metrics", multiple=True, help="Show this number; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def runs(folders: tuple[Path, ...], metrics: tuple[str, ...], as_json: bool) -> None:
    """List and compare the runs in and below FOLDERS, the oldest first.

    Without FOLDERS these are "runs", if there is such a folder, or else the current one. Each
    number is the last one, with the best in parentheses where that is another.
    """
    from rich.console import Console

    from evenly.record.summary import find_runs, labels, summary

    where = folders or ((Path("runs"),) if Path("runs").is_dir() else (Path(),))
    found, problems = find_runs(where)
    for problem in problems:
        click.echo(f"evenly: {problem}", err=True)
    rows = [summary(run) for run in found]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        places = ", ".join(map(str, where))
        raise click.ClickException(
            f"there is no run record below {places}. A Trainer with folder= writes one."
        )
    known = list(dict.fromkeys(name for row in rows for name in row["values"]))
    missing = [name for name in metrics if name not in known]
    if missing:
        raise click.UsageError(f"no run has {missing[0]!r}; there is {', '.join(known) or 'none'}.")
    room = max(1, (Console().width - _FIXED) // _EACH)
    _print(rows, labels(found), list(metrics) or known[: min(room, _MOST)], len(known))


def _print(rows: list[dict[str, Any]], names: list[str], shown: list[str], known: int) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.table import Table

    from evenly.report.tables import duration

    colours = {"finished": "green", "running": "cyan", "failed": "red", "killed": "red"}
    table = Table()
    table.add_column("run", overflow="fold")
    for name in ("began", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "epochs", "steps", "took", *shown):
        table.add_column(name, justify="right", overflow="fold")
    for row, name in zip(rows, names, strict=True):
        table.add_row(
            name,
            datetime.fromtimestamp(row["started"]).strftime("%m-%d %H:%M"),
            f"[{colours.get(row['state'], 'yellow')}]{row['state']}[/]",
            "→".join(map(str, row["processes"])),
            f"{row['epochs']:,}",
            f"{row['steps']:,}",
            duration(row["seconds"]),
            *(_cell(row["values"].get(metric)) for metric in shown),
        )
    console = Console()
    console.print(table)
    more = known - len(shown)
    if more > 0:
        console.print(f"{more} more number{'s' * (more > 1)}: --metric NAME, or --json.")


def _cell(value: dict[str, Any] | None) -> str:
    if value is None or value["last"] is None:
        return "-"
    last, best = f"{value['last']:.5g}", value["best"]
    return last if best is None or f"{best:.5g}" == last else f"{last} ({best:.5g})"
