"""Nested structures (dict, list, tuple, named tuple) with leaves that are treated alike.

``atoms`` names types that are leaves although they are containers: predictions keep lists whole.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

Atoms = tuple[type, ...]


def leaves(tree: Any, atoms: Atoms = ()) -> Iterator[Any]:
    """The leaves of a structure, in a fixed order (mappings in their own order)."""
    if isinstance(tree, atoms):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value, atoms)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value, atoms)
    else:
        yield tree


def names(tree: Any, atoms: Atoms = (), name: str = "") -> Iterator[str]:
    """Where each leaf is, in the order of `leaves`: keys, fields and places joined by dots."""
    if isinstance(tree, Mapping) and not isinstance(tree, atoms):
        entries = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and not isinstance(tree, atoms):
        places = getattr(tree, "_fields", range(len(tree)))
        entries = [(str(place), value) for place, value in zip(places, tree, strict=True)]
    else:
        yield name
        return
    for key, value in entries:
        yield from names(value, atoms, f"{name}.{key}" if name else key)


def map_leaves(function: Callable[[Any], Any], tree: Any, atoms: Atoms = ()) -> Any:
    """The same structure with each leaf replaced by ``function(leaf)``."""
    if isinstance(tree, atoms):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(function, value, atoms) for key, value in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return mapped
        same = copy(tree)  # its type may need other arguments than a mapping, as defaultdict does
        same.update(mapped)
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value, atoms) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(function, value, atoms) for value in tree)
    return function(tree)


def replace_leaves(tree: Any, values: Iterator[Any], atoms: Atoms = ()) -> Any:
    """The same structure with its leaves taken from ``values``, in the order of `leaves`."""
    return map_leaves(lambda _: next(values), tree, atoms)


def outline(tree: Any) -> str:
    """The structure without its leaves, as text: equal outlines mean equal structures."""
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key!r}:{outline(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return f"{type(tree).__name__}(" + ",".join(map(outline, tree)) + ")"
    return "*"
