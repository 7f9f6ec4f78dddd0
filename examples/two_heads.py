"""Two losses, two optimizers with schedules of their own, one shared trunk, one forward pass.

One head names the digit, the other tells even from odd. Each optimizer owns the trunk and its own
head, and sees only its own loss's gradients.

python examples/two_heads.py
evenly run -n 3 examples/two_heads.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly


def train(dtype: torch.dtype = torch.float32, epochs: int = 3) -> list[Tensor]:
    """Returns the weights of trunk and heads."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(dtype)
    digit, parity = nn.Linear(64, 10).to(dtype), nn.Linear(64, 2).to(dtype)
    images, labels = evenly.data.digits()[0].tensors
    with evenly.open_world():
        evenly.match(trunk, digit, parity)
        loader = evenly.Loader(
            TensorDataset(images.to(dtype), labels), batch_size=100, shuffle=True
        )
        for_digit = torch.optim.SGD([*trunk.parameters(), *digit.parameters()], lr=0.1)
        for_parity = torch.optim.Adam([*trunk.parameters(), *parity.parameters()], lr=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(for_digit, 0.9)
        for epoch in range(epochs):
            for part in loader.epoch(epoch):
                x, y = part.data
                features = trunk(x)
                which = F.cross_entropy(digit(features), y)
                even = F.cross_entropy(parity(features), y % 2)
                evenly.step_each([(part.share(which), for_digit), (part.share(even), for_parity)])
            schedule.step()
    modules = nn.ModuleList([trunk, digit, parity])
    return [parameter.detach().cpu() for parameter in modules.parameters()]


if __name__ == "__main__":
    with evenly.open_world():
        norm = sum(weight.double().square().sum() for weight in train()) ** 0.5
        with evenly.on_rank(0) as mine:
            if mine:
                print(f"norm of the weights: {norm:.6f}")
