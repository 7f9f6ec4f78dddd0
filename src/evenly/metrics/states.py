"""The states that a metric holds: told to other ranks, replaced for a while, put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities import data as reductions

from evenly.errors import DisagreementError, SettingError
from evenly.metrics.merging import RULES, Order, join, merge_tensors, merge_values
from evenly.objective import Total
from evenly.tree import leaves, map_leaves

_NAMES = {
    reductions.dim_zero_sum: "sum",
    reductions.dim_zero_mean: "mean",
    reductions.dim_zero_max: "max",
    reductions.dim_zero_min: "min",
    reductions.dim_zero_cat: "cat",
    None: "none",
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, Enum)
_LARGEST_SETTING = 2**20
"""Bytes of a tensor that is no state and is told all the same, for ranks that lack it."""
_MISSING = object()


class Report(NamedTuple):
    """What one rank tells the others about one metric."""

    path: str
    kind: str
    """The class."""
    rules: dict[str, tuple[str, str]]
    """Of each state: how ranks' values are merged, and its form."""
    settings: dict[str, Any]
    """Attributes that are not states: plain values and tensors."""
    values: dict[str, Any]
    updates: int
    touched: bool
    """Whether it has seen anything here."""


class Holder(ABC):
    """One object with states: it reports them, takes on merged ones and gets its own back."""

    def __init__(self, path: str, metric: Any) -> None:
        self.path = path
        self.metric = metric
        self._saved: dict[str, Any] = {}

    @abstractmethod
    def report(self, joined: dict[int, Any] | None) -> Report:
        """``joined`` remembers list states that several metrics share; None leaves lists as they
        are.
        """

    @abstractmethod
    def borrow(self, reports: Sequence[Report], order: Order | None) -> None:
        """Hold what all ranks' reports amount to, until `restore`."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """A copy of this rank's state, for a checkpoint."""

    @abstractmethod
    def load(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""

    def restore(self) -> None:
        for name, value in self._saved.items():
            if value is _MISSING:
                del vars(self.metric)[name]
            else:
                self._put(name, value)
        self._saved = {}

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute until `restore`."""
        if name not in self._saved:
            self._saved[name] = self._get(name)
        self._put(name, value)

    def _get(self, name: str) -> Any:
        return getattr(self.metric, name, _MISSING)

    def _put(self, name: str, value: Any) -> None:
        setattr(self.metric, name, value)


class MetricHolder(Holder):
    """A metric of torchmetrics."""

    metric: Metric
    _touched = False

    def report(self, joined: dict[int, Any] | None) -> Report:
        metric, own = self.metric, vars(self.metric)
        values = {name: _tensor(own[name]) for name in metric._defaults if name in own}
        rules = {name: self._rule(name) for name in values}
        self._touched = metric._update_count > 0 or not self._as_reset(values)
        if joined is not None:
            for name, value in values.items():
                if rules[name][0] == "cat" and isinstance(value, list):
                    if id(value) not in joined:
                        joined[id(value)] = join(value)
                    values[name] = joined[id(value)]
        settings = _settings(own, but=(base_attributes(), metric._defaults))
        told = values if self._touched else {}
        return Report(
            self.path, kind_of(metric), rules, settings, told, metric._update_count, self._touched
        )

    def borrow(self, reports: Sequence[Report], order: Order | None) -> None:
        metric, active = self.metric, [report for report in reports if report.touched]
        self._set("_computed", None)
        self._set("_to_sync", False)
        self._set("_is_synced", False)
        self._set("_update_count", sum(report.updates for report in reports))
        if len(reports) == 1 or not active:
            return
        first = active[0]
        if not self._touched:
            # Some metrics learn settings from the first batch, which this rank has not seen.
            for name, setting in first.settings.items():
                if not isinstance(setting, Tensor) or vars(metric).get(name) is None:
                    self._set(name, _moved(setting, metric.device))
        for name, (rule, _) in first.rules.items():
            self._set(name, self._merged(name, rule, reports, order))

    def snapshot(self) -> dict[str, Any]:
        # Tensors that are no states are kept, too: such as the extremes of a MinMaxMetric.
        own, states = vars(self.metric), self.metric._defaults
        kept = {name: v for name, v in own.items() if name in states or isinstance(v, Tensor)}
        copied = {name: map_leaves(_copied, value) for name, value in kept.items()}
        return {"updates": self.metric._update_count, "values": copied}

    def load(self, snapshot: Mapping[str, Any]) -> None:
        for name, value in snapshot["values"].items():
            device = self._device(name)
            vars(self.metric)[name] = map_leaves(partial(_moved, device=device), value)
        self.metric._update_count = snapshot["updates"]
        self.metric._computed = None

    def _merged(self, name: str, rule: str, reports: Sequence[Report], order: Order | None) -> Any:
        here = partial(_moved, device=self._device(name))
        lists = [map_leaves(here, _entries(report.values.get(name, []))) for report in reports]
        values = [value for own in lists for value in own]
        function = self.metric._reductions.get(name)
        active = [report for report in reports if report.touched]
        if any(isinstance(report.values[name], list) for report in active):
            entries = values if order is None else order.apply(rule, lists)
            custom = rule not in _NAMES.values() and len(active) > 1
            return function(entries) if custom and callable(function) else entries
        if len(values) == 1:
            return values[0]
        shapes = [list(value.shape[1:] if rule == "cat" else value.shape) for value in values]
        if any(shape != shapes[0] for shape in shapes):
            raise DisagreementError(
                f"the state {name!r} of {self.path} ({kind_of(self.metric)}) has other shapes on "
                f"other ranks ({shapes}), so it cannot be merged by {rule!r}. Give it a shape that "
                "does not depend on the batch, or make it a list with dist_reduce_fx='cat'."
            )
        return merge_tensors(
            rule,
            values,
            default=self.metric._defaults.get(name),
            weights=[report.updates for report in active],
            function=function if callable(function) else None,
        )

    def _rule(self, name: str) -> tuple[str, str]:
        reduction, default = self.metric._reductions[name], self.metric._defaults[name]
        rule = _NAMES.get(reduction) if reduction in _NAMES else _name_of(reduction)
        if isinstance(default, Tensor):
            return str(rule), f"{str(default.dtype).removeprefix('torch.')} {list(default.shape)}"
        return str(rule), "list"

    def _as_reset(self, values: Mapping[str, Any]) -> bool:
        for name, value in values.items():
            default = self.metric._defaults[name]
            if isinstance(value, Tensor) and isinstance(default, Tensor):
                same = value.shape == default.shape and value.to(default.device).eq(default).all()
            else:
                same = value == default == []
            if not same:
                return False
        return True

    def _device(self, name: str) -> torch.device:
        for leaf in leaves(vars(self.metric).get(name, [])):
            if isinstance(leaf, Tensor):
                return leaf.device
        is_list = isinstance(self.metric._defaults.get(name), list)
        return torch.device("cpu") if is_list and self.metric.compute_on_cpu else self.metric.device

    # Directly, because wrappers redirect attributes to what they wrap.
    def _get(self, name: str) -> Any:
        return vars(self.metric).get(name, _MISSING)

    def _put(self, name: str, value: Any) -> None:
        vars(self.metric)[name] = value


class CollectionHolder(Holder):
    """A MetricCollection: it decides by its first batch which of its metrics share states."""

    metric: MetricCollection

    def report(self, joined: dict[int, Any] | None) -> Report:
        formed = self.metric._groups_checked and bool(self.metric._enable_compute_groups)
        groups = sorted(sorted(map(str, group)) for group in self.metric._groups.values())
        settings = {"compute_groups": groups} if formed else {}
        return Report(self.path, kind_of(self.metric), {}, settings, {}, 0, formed)

    def borrow(self, reports: Sequence[Report], order: Order | None) -> None:
        self._set("_state_is_copy", self.metric._state_is_copy)

    def snapshot(self) -> dict[str, Any]:
        return {"updates": 0, "values": {}}  # its metrics have theirs

    def load(self, snapshot: Mapping[str, Any]) -> None:
        pass


class ObjectHolder(Holder):
    """An object with a sync rule of its own: ``synced``, from attribute to rule."""

    def report(self, joined: dict[int, Any] | None) -> Report:
        who, rules = f"{self.path} ({kind_of(self.metric)})", {}
        for name, rule in self.metric.synced.items():
            if isinstance(rule, str) and rule not in RULES:
                raise SettingError(
                    f"{who} has the sync rule {rule!r} for {name!r}; choose from "
                    f"{', '.join(RULES)}, or give a function of the ranks' values. For a mean, "
                    "sum an evenly.Total."
                )
            if not hasattr(self.metric, name):
                raise SettingError(
                    f"{who} has a sync rule for {name!r} and no such attribute. Set it in "
                    "reset(), to None or zero where there is nothing yet."
                )
            rules[name] = (rule if isinstance(rule, str) else _name_of(rule), "")
        values = {name: getattr(self.metric, name) for name in rules}
        settings = _settings(getattr(self.metric, "__dict__", {}), but=(rules, ("synced",)))
        return Report(self.path, kind_of(self.metric), rules, settings, values, 0, True)

    def borrow(self, reports: Sequence[Report], order: Order | None) -> None:
        for name, rule in self.metric.synced.items():
            if len(reports) > 1:
                self._set(name, merge_values(rule, [report.values[name] for report in reports]))

    def snapshot(self) -> dict[str, Any]:
        values = {name: deepcopy(getattr(self.metric, name)) for name in self.metric.synced}
        for name, value in values.items():
            if isinstance(value, Total):  # files are read without classes of ours
                values[name] = [torch.as_tensor(value.sum).detach(), value.weight]
        return {"updates": 0, "values": values}

    def load(self, snapshot: Mapping[str, Any]) -> None:
        for name, value in snapshot["values"].items():
            total = isinstance(getattr(self.metric, name, None), Total)
            setattr(self.metric, name, Total(*value) if total else deepcopy(value))


def _settings(
    attributes: Mapping[str, Any], but: tuple[Collection[str], Collection[str]]
) -> dict[str, Any]:
    one, other = but
    return {
        name: value
        for name, value in attributes.items()
        if name not in one and name not in other and _plain(value)
    }


def _plain(value: Any, nested: bool = False) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(_plain(inner, nested=True) for inner in value)
    if isinstance(value, Tensor):
        return not nested and value.numel() * value.element_size() <= _LARGEST_SETTING
    return isinstance(value, _PLAIN)


def _tensor(value: Any) -> Any:
    """A number that an update put in place of its state's tensor, as a tensor again."""
    return torch.tensor(value) if isinstance(value, bool | int | float) else value


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else deepcopy(leaf)


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def kind_of(metric: Any) -> str:
    return type(metric).__qualname__


def _name_of(function: Any) -> str:
    """With brackets: a function called "sum" is not the rule "sum"."""
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}()"


_base: frozenset[str] = frozenset()


def base_attributes() -> frozenset[str]:
    """What every metric of torchmetrics has."""
    global _base
    if not _base:
        bare = CompositionalMetric(torch.abs, 0.0, None)
        _base = frozenset(vars(bare)) - {"metric_a", "metric_b", "op"}
    return _base
