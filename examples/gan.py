"""A small GAN: generator and discriminator each step with the gradients of their own loss.

Noise is drawn per sample from its own stream, so the run is the same on any number of processes.

python examples/gan.py
evenly run -n 3 examples/gan.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenly


class ImagesWithNoise(Dataset[tuple[Tensor, Tensor]]):
    """Each image with noise for the generator, drawn from the sample's own generator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.images = evenly.data.digits()[0].tensors[0].to(dtype)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        noise = torch.randn(16, generator=evenly.sample_generator(), dtype=image.dtype)
        return image, noise


def train(dtype: torch.dtype = torch.float32, epochs: int = 2) -> list[Tensor]:
    """Returns the weights of both networks."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator, critic = generator.to(dtype), critic.to(dtype)
    with evenly.open_world():
        evenly.match(generator, critic)
        loader = evenly.Loader(ImagesWithNoise(dtype), batch_size=100, shuffle=True, workers=0)
        for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
        for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
        for epoch in range(epochs):
            for part in loader.epoch(epoch):
                real, noise = part.data
                fake = generator(noise)
                judged = critic(fake)  # the generator's loss flows through this
                caught = critic(torch.cat([real, fake.detach()])).squeeze(1)
                truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))]).to(caught)
                critic_loss = F.binary_cross_entropy_with_logits(caught, truth)
                generator_loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
                evenly.step_each(
                    [
                        (part.share(generator_loss), for_generator),
                        (part.share(critic_loss), for_critic),
                    ]
                )
    both = [*generator.parameters(), *critic.parameters()]
    return [parameter.detach().cpu() for parameter in both]


if __name__ == "__main__":
    with evenly.open_world():
        norm = sum(weight.double().square().sum() for weight in train()) ** 0.5
        with evenly.on_rank(0) as mine:
            if mine:
                print(f"norm of the weights: {norm:.6f}")
