"""State as plain values: tensors by name, and JSON for the rest. No pickle, in or out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from evenly.errors import SettingError, StorageError

_TENSOR, _TUPLE, _ITEMS = "tensor:", "tuple:", "items:"


def taken_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, its tensors put into ``tensors`` by name."""
    if isinstance(value, Tensor):
        taken, again = name, 1
        while taken in tensors:  # as {"a.b": ..., "a": {"b": ...}} would have it
            taken, again = f"{name}~{again}", again + 1
        tensors[taken] = value.detach()
        return {_TENSOR: taken}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.endswith(":") for key in value)
        parts = [(key, taken_apart(v, f"{name}.{key}", tensors)) for key, v in value.items()]
        if plain:
            return dict(parts)
        return {_ITEMS: [[taken_apart(key, name, tensors), part] for key, part in parts]}
    if isinstance(value, list | tuple):
        parts_of = [taken_apart(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return parts_of if isinstance(value, list) else {_TUPLE: parts_of}
    raise SettingError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it holds tensors, "
        "numbers, strings, lists, tuples and dicts, because reading must not run code. Leave it "
        "out of state_dict()."
    )


def put_together(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value again; ``tensor`` gives a tensor by its name."""
    if isinstance(value, list):
        return [put_together(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == _TENSOR:
            return tensor(inner)
        if key == _TUPLE:
            return tuple(put_together(v, tensor) for v in inner)
        if key == _ITEMS:
            return {_key(put_together(k, tensor)): put_together(v, tensor) for k, v in inner}
    return {key: put_together(v, tensor) for key, v in value.items()}


def _key(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        raise StorageError(f"a checkpoint has {key!r} for a key.") from None
    return key
