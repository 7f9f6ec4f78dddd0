"""The parts of Evenly in a loop of one's own. Run it in any of these ways; the weights agree.

python examples/digits_parts.py
evenly run -n 3 examples/digits_parts.py
torchrun --nproc-per-node 3 examples/digits_parts.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import evenly

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
train, test = evenly.data.digits()

with evenly.open_world() as world:
    loader = evenly.Loader(train, batch_size=64, shuffle=True, seed=0)
    model = evenly.replicate(net)  # DDP when there are several processes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for part in loader.epoch(epoch):  # this rank's part of each step
            x, y = part.data
            loss = F.cross_entropy(model(x), y)
            part.share(loss).backward()  # its share of the global mean
            optimizer.step()
            optimizer.zero_grad()

    right = torch.zeros((), dtype=torch.int64)
    for part in evenly.Loader(test, batch_size=64).epoch(0):
        x, y = part.data
        right += (net(x).argmax(1) == y).sum()
    right = evenly.all_reduce(right)

    with evenly.on_rank(0) as mine:
        if mine:
            norm = sum(p.double().square().sum() for p in net.parameters()) ** 0.5
            print(f"{right} of {len(test)} right, norm of the weights {norm:.6f}")
