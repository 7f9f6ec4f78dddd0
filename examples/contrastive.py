"""Contrastive training (InfoNCE): every other sample of the whole step is a negative.

Each rank embeds its own part and gathers everyone's embeddings with gradients, so the loss is that
of the full global batch on any number of processes, uneven last step included.

python examples/contrastive.py
evenly run -n 3 examples/contrastive.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly

TEMPERATURE = 0.1


def contrastive_loss(own: Tensor, positives: Tensor, first: int) -> Tensor:
    """InfoNCE of this part's rows against all rows; ``first`` is where its rows stand among all.

    The mean over this part's rows, for `Part.share`.
    """
    own, positives = F.normalize(own, dim=1), F.normalize(positives, dim=1)
    everyone = evenly.all_gather(positives, grad=True)  # every rank must reach this
    targets = torch.arange(first, first + len(own), device=own.device)
    return F.cross_entropy(own @ everyone.t() / TEMPERATURE, targets)


def train(dtype: torch.dtype = torch.float32, epochs: int = 3) -> tuple[list[Tensor], float]:
    """Pairs are an image and its noisy copy. Returns the weights and the mean loss of the last
    epoch.
    """
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(dtype)
    images = evenly.data.digits()[0].tensors[0].to(dtype)
    noisy = images + 0.1 * torch.randn(images.shape, dtype=dtype)
    with evenly.open_world() as world:
        loader = evenly.Loader(TensorDataset(images, noisy), batch_size=200, shuffle=True)
        model = evenly.replicate(encoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(epochs):
            total = torch.zeros((), dtype=dtype, device=world.device)
            for part in loader.epoch(epoch):
                image, copy = part.data
                first, _ = evenly.split(part.global_weight, world.rank, world.size)
                embedded = model(torch.cat([image, copy]))  # one forward pass: DDP wants that
                own, positives = embedded.split(len(image))
                loss = contrastive_loss(own, positives, first)
                part.share(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                if part.weight:
                    total += loss.detach() * part.weight
        mean = evenly.all_reduce(total).item() / len(images)
    return [parameter.detach().cpu() for parameter in encoder.parameters()], mean


if __name__ == "__main__":
    with evenly.open_world():
        _, loss = train()
        with evenly.on_rank(0) as mine:
            if mine:
                print(f"mean loss of the last epoch: {loss:.6f}")
