"""The package as a whole: its public names, its layers, and what importing it does."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import evenly

SOURCE = Path(evenly.__file__).parent

# Lowest first; a module may import from its own layer and from those below.
LAYERS = [
    {"errors"},
    {
        "variables",
        "tree",
        "permutation",
        "plan",
        "seeding",
        "lifeline",
        "blame",
        "wording",
        "storage",
        "surroundings",
        "record",
    },
    {
        "report",
        "store",
        "board",
        "devices",
        "packing",
        "objective",
        "lines",
        "watchdog",
        "tracing",
        "watch",
    },
    {"world"},
    {"turn", "meeting", "collectives", "parcel", "together", "stopping"},
    {
        "fetching",
        "copying",
        "part",
        "loader",
        "stepping",
        "layers",
        "data",
        "matching",
        "replica",
        "pieces",
    },
    {"metrics", "prediction", "training", "checkpoint"},
    {"evaluation"},
    {"callbacks", "guarding", "fitting", "resuming", "stages", "trainer"},
    {"worker", "launcher", "member", "crew"},
    {"parity"},
    {"testing", "demo"},
    {"cli", "__main__"},
]


def imports_of(file: Path) -> set[str]:
    """The first-level modules of the package that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "evenly":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("evenly."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("evenly.")}
    return found


def test_modules_import_downwards_only() -> None:
    height = {name: level for level, names in enumerate(LAYERS) for name in names}
    upward = []
    for file in SOURCE.rglob("*.py"):
        module = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        assert module in height, f"{module} is in no layer; add it to LAYERS"
        above = {name for name in imports_of(file) & height.keys() if height[name] > height[module]}
        upward += [f"{module} imports {name}" for name in above]
    assert not upward


def test_the_public_names_are_these_and_all_of_them_load() -> None:
    assert evenly.__all__ == [
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
    for name in evenly.__all__:
        assert getattr(evenly, name) is not None
    assert set(evenly.__all__) <= set(dir(evenly))


PURITY = """
import logging, os, sys
environ, loggers = dict(os.environ), set(logging.root.manager.loggerDict)
modules = set(sys.modules)
import evenly
assert "torch" not in sys.modules, "importing evenly imports torch"
assert "numpy" not in sys.modules, "importing evenly imports numpy"
evenly.Plan(length=10, batch_size=3)
import evenly.permutation, evenly.variables, evenly.errors, evenly.cli
import evenly.record.summary, evenly.report, evenly.cli.runs, evenly.cli.report, evenly.cli.watch
assert "torch" not in sys.modules, "the plan needs torch"
assert dict(os.environ) == environ, "the environment was changed"
assert set(logging.root.manager.loggerDict) == loggers, "a logger was made"
evenly.open_world
assert "torch" in sys.modules
import torch.distributed
assert not torch.distributed.is_initialized(), "a process group was made"
assert dict(os.environ) == environ, "the environment was changed"
"""


def test_importing_changes_nothing_and_loads_torch_only_when_needed() -> None:
    done = subprocess.run([sys.executable, "-c", PURITY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_digits_are_the_real_ones_in_the_stated_shapes() -> None:
    train, test = evenly.data.digits()
    assert (len(train), len(test)) == (1437, 360)
    for x, y in (train.tensors, test.tensors):
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.shape[1:] == (64,)
        assert (float(x.min()), float(x.max())) == (0.0, 1.0)
        assert set(y.tolist()) == set(range(10))
    together = torch.cat([train.tensors[1], test.tensors[1]])
    assert np.bincount(together.numpy()).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert (SOURCE / "data" / "digits.npz").stat().st_size < 150_000


def test_the_architecture_page_names_every_module() -> None:
    page = (SOURCE.parent.parent / "docs" / "explanation" / "architecture.md").read_text()
    for level, names in enumerate(LAYERS):
        missing = [name for name in names - {"__main__"} if name not in page]
        assert not missing, f"layer {level} of the package is not on the page: {missing}"
