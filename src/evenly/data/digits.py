"""Handwritten digits: real data small enough to travel with the package.

1,797 images of 8x8 pixels in 10 classes, from the test part of "Optical Recognition of
Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,
CC BY 4.0), stored in a fixed shuffled order so that both parts hold the same writers.
"""

from importlib.resources import files

import numpy as np
import torch
from torch.utils.data import TensorDataset

TRAIN = 1437


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Train (1,437) and test (360): x float32 of shape (64,) in 0..1, y int64.

    The sizes are awkward on purpose: they divide evenly by hardly any process count.
    """
    with files("evenly.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        x = torch.from_numpy(stored["x"]).to(torch.float32) / 16
        y = torch.from_numpy(stored["y"]).to(torch.int64)
    return TensorDataset(x[:TRAIN], y[:TRAIN]), TensorDataset(x[TRAIN:], y[TRAIN:])
