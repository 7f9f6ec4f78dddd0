"""The training programs that tests run at several process counts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenly


def train_digits(
    batch_size: int = 64,
    dtype: torch.dtype = torch.float32,
    epochs: int = 3,
    limit: int | None = None,
    length: int | None = None,
) -> list[torch.Tensor]:
    """The second program of the design, at some size and precision; returns the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    x, y = evenly.data.digits()[0].tensors
    train = TensorDataset(x[:length].to(dtype), y[:length])
    with evenly.open_world():
        loader = evenly.Loader(train, batch_size=batch_size, shuffle=True, seed=0)
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(epochs):
            for part in loader.epoch(epoch):
                for micro in part.microbatches(limit) if limit else [part]:
                    x, y = micro.data
                    loss = F.cross_entropy(model(x), y)
                    micro.share(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
