"""The inventory: which metrics there are, what is refused, whether all ranks have the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import BootStrapper, MetricTracker, Running

from evenly.errors import DisagreementError, SettingError
from evenly.metrics.states import (
    CollectionHolder,
    Holder,
    MetricHolder,
    ObjectHolder,
    Report,
    base_attributes,
    kind_of,
)
from evenly.tree import leaves


def find_holders(metrics: Any, *, several: bool) -> list[Holder]:
    """Every object with states in ``metrics``, each once. With ``several`` ranks, what cannot be
    merged is refused.
    """
    seen: set[int] = set()
    return [
        holder
        for path, leaf in _named(metrics, "")
        for holder in _holders(path or "the metric", leaf, seen, several)
    ]


def compare(reports: Sequence[Sequence[Report]]) -> None:
    """Raise unless all ranks hold the same metrics with the same states and settings.

    A rank that has seen no sample may lack what others learned from their first batch.
    """
    for rank, own in enumerate(reports):
        for mine, first in zip(own, reports[0], strict=False):
            if (mine.path, mine.kind) != (first.path, first.kind):
                raise DisagreementError(
                    f"rank {rank} has other metrics than rank 0: {mine.path} ({mine.kind}) there, "
                    f"{first.path} ({first.kind}) on rank 0. Give every rank the same metrics in "
                    "the same order."
                )
        if len(own) != len(reports[0]):
            longer, where = (own, rank) if len(own) > len(reports[0]) else (reports[0], 0)
            extra = longer[min(len(own), len(reports[0]))]
            raise DisagreementError(
                f"rank {rank} has {len(own)} metrics and rank 0 has {len(reports[0])}: "
                f"{extra.path} ({extra.kind}) is on rank {where} only. Give every rank the same."
            )
    for place in range(len(reports[0])):
        told = [own[place] for own in reports]
        model = next((rank for rank, report in enumerate(told) if report.touched), 0)
        for rank, report in enumerate(told):
            _compare_one(rank, report, model, told[model])


def _compare_one(rank: int, report: Report, model: int, first: Report) -> None:
    who = f"{report.path} ({report.kind})"
    if report.touched:
        same = report.rules == first.rules
    else:
        known = {name: rule for name, (rule, _) in first.rules.items()}
        same = all(known.get(name) == rule for name, (rule, _) in report.rules.items())
    if not same:
        raise DisagreementError(
            f"{who} has the states {_listed(report.rules)} on rank {rank} and "
            f"{_listed(first.rules)} on rank {model}. Make it with the same arguments everywhere."
        )
    for name in {**report.settings, **first.settings}:
        here, there = report.settings.get(name), first.settings.get(name)
        unknown = not report.touched and here is None
        tensors = isinstance(here, Tensor) or isinstance(there, Tensor)
        if name.startswith("_") or unknown or tensors or _same(here, there):
            continue
        if name == "compute_groups":
            raise DisagreementError(
                f"the first batches of rank {rank} and rank {model} made {who} share states "
                f"between other metrics ({here} and {there}): two of its metrics had equal states "
                "by chance. Give it compute_groups=False, or the groups."
            )
        raise DisagreementError(
            f"{who} has {name}={here!r} on rank {rank} and {name}={there!r} on rank {model}. If it "
            "is a setting, make it the same; if it counts something, declare it as a state."
        )


def _holders(path: str, leaf: Any, seen: set[int], several: bool) -> Iterator[Holder]:
    if isinstance(leaf, Metric | MetricCollection | MetricTracker):
        for name, module in _modules(path, leaf, seen):
            if isinstance(module, Metric):
                _refuse(name, module, several)
                yield MetricHolder(name, module)
            else:
                yield CollectionHolder(name, module)
        return
    for method in ("update", "compute", "reset"):
        if not callable(getattr(leaf, method, None)):
            raise SettingError(
                f"{path} is a {type(leaf).__name__} without {method}(), so it is no metric. Give a "
                "torchmetrics object, or one of your own with update, compute and reset."
            )
    if isinstance(getattr(leaf, "synced", None), Mapping):
        if id(leaf) not in seen:
            seen.add(id(leaf))
            yield ObjectHolder(path, leaf)
    elif several:
        raise SettingError(
            f"{path} ({kind_of(leaf)}) does not say how its values on several ranks make one, so "
            "each rank would show its own. Give it a sync rule, such as synced = {'wrong': 'sum', "
            "'seen': 'sum'} for its attributes `wrong` and `seen`, or run on one process."
        )


def _modules(
    path: str, module: nn.Module, seen: set[int]
) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """The metrics in a module, itself included: as modules, and in its plain lists and dicts."""
    if id(module) in seen:
        return
    seen.add(id(module))
    children: dict[str, Any] = dict(module._modules)
    if isinstance(module, MetricTracker):
        children = {str(len(module) - 1): module[-1]} if len(module) else {}
    elif isinstance(module, Metric):
        children |= {
            f"{name}.{number}": leaf
            for name, value in vars(module).items()
            if name not in base_attributes() and name not in module._defaults
            if isinstance(value, list | tuple | dict)
            for number, leaf in enumerate(leaves(value))
            if isinstance(leaf, Metric | MetricCollection)
        }
    if isinstance(module, Metric | MetricCollection):
        yield path, module
    for name, child in children.items():
        if isinstance(child, nn.Module):
            yield from _modules(f"{path}.{name}", child, seen)


def _refuse(path: str, metric: Metric, several: bool) -> None:
    who = f"{path} ({kind_of(metric)})"
    if metric._is_synced:
        raise SettingError(
            f"{who} holds synced states: its sync() was called, and not its unsync(). compute() "
            "would count every rank's samples once per rank. Call unsync() first; compute() syncs."
        )
    if not several:
        return
    if isinstance(metric, Running):
        raise SettingError(
            f"{who} is over the last {metric.window} updates of its own rank, and the last updates "
            "of the whole run are spread over the ranks. Use the metric without the window, reset "
            "as often as you need it, or run on one process."
        )
    if isinstance(metric, BootStrapper):
        raise SettingError(
            f"{who} draws its samples anew on each rank, so its value would depend on the number "
            "of processes. Gather predictions and targets, and bootstrap them on one rank."
        )
    if metric.process_group is not None or metric.dist_sync_fn is not None:
        raise SettingError(
            f"{who} has a process_group or a dist_sync_fn of its own, which compute() would not "
            "use. Leave it out, and give compute() the group."
        )
    own = type(metric)._sync_dist is not Metric._sync_dist
    if own and not type(metric)._sync_dist.__module__.startswith("torchmetrics."):
        raise SettingError(
            f"{who} has a _sync_dist of its own, which compute() would not use. Declare what it "
            "holds with add_state() and a dist_reduce_fx, and leave _sync_dist out."
        )


def _named(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _named(value, f"{path}[{place}]")
    else:
        yield path, tree


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)


def _listed(rules: Mapping[str, tuple[str, str]]) -> str:
    listed = ", ".join(f"{name} ({rule}, {form})" for name, (rule, form) in rules.items())
    return listed or "none"
