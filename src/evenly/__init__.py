"""Train PyTorch models on any number of processes and get the same numbers.

The names in ``__all__`` are the whole public interface. Each is loaded on first use, so that
``import evenly`` is quick, imports no torch and changes nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from evenly import callbacks, data, errors, metrics, testing
    from evenly.checkpoint.retention import Retention
    from evenly.checkpoint.weights import load_weights
    from evenly.collectives import (
        agree,
        all_gather,
        all_gather_object,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_object,
        gather,
        gather_object,
        reduce,
        reduce_scatter,
        scatter,
        scatter_object,
    )
    from evenly.crew import launch
    from evenly.layers import SyncBatchNorm
    from evenly.loader import Loader
    from evenly.matching import match
    from evenly.metrics import compute
    from evenly.objective import Output, Total
    from evenly.part import Part
    from evenly.plan import Plan, split
    from evenly.prediction import read_predictions
    from evenly.replica import replicate
    from evenly.seeding import sample_generator, sample_keys
    from evenly.stepping import step_each
    from evenly.tracing.hook import trace
    from evenly.trainer import Trainer
    from evenly.turn import on_rank
    from evenly.world import World, current_world, open_world

__all__ = [
    "Loader",
    "Output",
    "Part",
    "Plan",
    "Retention",
    "SyncBatchNorm",
    "Total",
    "Trainer",
    "World",
    "agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "compute",
    "current_world",
    "data",
    "errors",
    "gather",
    "gather_object",
    "launch",
    "load_weights",
    "match",
    "metrics",
    "on_rank",
    "open_world",
    "read_predictions",
    "reduce",
    "reduce_scatter",
    "replicate",
    "sample_generator",
    "sample_keys",
    "scatter",
    "scatter_object",
    "split",
    "step_each",
    "testing",
    "trace",
]

_HOME = {
    "Loader": "loader",
    "Output": "objective",
    "Part": "part",
    "Plan": "plan",
    "Retention": "checkpoint.retention",
    "SyncBatchNorm": "layers",
    "Total": "objective",
    "Trainer": "trainer",
    "World": "world",
    "compute": "metrics",
    "current_world": "world",
    "launch": "crew",
    "load_weights": "checkpoint.weights",
    "match": "matching",
    "on_rank": "turn",
    "open_world": "world",
    "read_predictions": "prediction",
    "replicate": "replica",
    "sample_generator": "seeding",
    "sample_keys": "seeding",
    "split": "plan",
    "step_each": "stepping",
    "trace": "tracing.hook",
}
_MODULES = ("callbacks", "data", "errors", "metrics", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"evenly.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'evenly' has no attribute {name!r}")
    value = getattr(import_module(f"evenly.{_HOME.get(name, 'collectives')}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
