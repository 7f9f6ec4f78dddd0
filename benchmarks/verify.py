"""What `evenly verify` measures in healthy programs, and in one whose samples are repeated.

python benchmarks/verify.py

Networks on the digits, 20 steps of 64, 1 process and 2. Largest difference in units of rounding;
the limits are in docs/how-to/verify.md.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenly
from evenly.parity.rounding import gap, gradient_limit
from evenly.testing import verify

STEPS = 20


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 10)
        self.layers = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.layers(self.inner(x.view(-1, 8, 8))).mean(1))
        return found


class Convolutions(nn.Module):
    """With the bias before BatchNorm, which has no effect in training, or without."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=bias),
            evenly.SyncBatchNorm(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=bias),
            evenly.SyncBatchNorm(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 64, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x.view(-1, 1, 8, 8))
        return found


def network(name: str) -> nn.Module:
    if name == "transformer":
        return Transformer()
    if name.startswith("CNN"):
        return Convolutions(bias=name.endswith("bias"))
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def train(model: str, method: str, precision: str) -> None:
    torch.manual_seed(0)
    train, test = evenly.data.digits()
    double = precision == "fp64"
    if double:
        for data in (train, test):
            data.tensors = (data.tensors[0].double(), data.tensors[1])
    trainer = evenly.Trainer(
        model=network(model).double() if double else network(model),
        loss=F.cross_entropy,
        optimizer=lambda net: optimizer(method, net),
        batch_size=64,
        precision="bf16" if precision == "bf16" else "fp32",
        progress=False,
        device="cpu",
    )
    trainer.fit(train, epochs=1)
    trainer.test(test)
    trainer.predict(test)


def repeated(batch: int) -> tuple[float, float]:
    """The gradient in another order, and with one sample twice: units from that of the batch."""
    x, y = (tensor[:batch] for tensor in evenly.data.digits()[0].tensors)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(1))
    twice = torch.cat([torch.arange(batch), torch.tensor([0])])
    right, other, wrong = (gradient(x[i], y[i]) for i in (torch.arange(batch), order, twice))
    eps = torch.finfo(right.dtype).eps
    return gap(right, other, eps).units, gap(right, wrong, eps).units


def gradient(x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    net = network("MLP")
    F.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


def main() -> None:
    print("largest difference of any step, in units of rounding")
    print(f"{'':34}{'loss':>10}{'gradient':>10}{'parameters':>12}{'predictions':>13}  outcome")
    for case in (
        ("MLP", "SGD", "fp32"),
        ("MLP", "AdamW", "fp32"),
        ("transformer", "SGD", "fp32"),
        ("transformer", "AdamW", "fp32"),
        ("transformer", "AdamW", "bf16"),
        ("CNN", "SGD", "fp32"),
        ("CNN", "AdamW", "fp32"),
        ("CNN, bias", "AdamW", "fp32"),
        ("CNN, bias", "AdamW", "fp64"),
    ):
        comparison = verify(train, *case, processes=(1, 2), steps=STEPS, timeout=200)
        found = comparison.counts[0].findings
        row = f"{', '.join(case):34}"
        for name, width in (
            ("loss", 10),
            ("gradient", 10),
            ("parameters", 12),
            ("predictions", 13),
        ):
            row += f"{found[name].units:>{width}.2g}"
        outcome = "equal to rounding" if comparison.holds else comparison.reasons[0].name
        print(f"{row}  {outcome}")
    print(
        "\none step in another order, and with one sample twice; what is allowed in the first step"
    )
    for batch in (64, 256, 1024):
        order, twice = repeated(batch)
        allowed = gradient_limit(torch.finfo(torch.float32).eps, 0.0)
        print(f"{batch:>6} samples: {order:.2g}, {twice:,.0f}; {allowed:,.0f}")


if __name__ == "__main__":
    main()
