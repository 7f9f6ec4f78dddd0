"""Nested structures (dict, list, tuple, named tuple) with leaves that are treated alike."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a structure, in a fixed order (mappings in their own order)."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with each leaf replaced by ``function(leaf)``."""
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(function, value) for key, value in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return mapped
        same = copy(tree)  # its type may need other arguments than a mapping, as defaultdict does
        same.update(mapped)
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(function, value) for value in tree)
    return function(tree)


def replace_leaves(tree: Any, values: Iterator[Any]) -> Any:
    """The same structure with its leaves taken from ``values``, in the order of `leaves`."""
    return map_leaves(lambda _: next(values), tree)


def outline(tree: Any) -> str:
    """The structure without its leaves, as text: equal outlines mean equal structures."""
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key!r}:{outline(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return f"{type(tree).__name__}(" + ",".join(map(outline, tree)) + ")"
    return "*"
