"""A loop that knows nothing of Evenly but two lines: DDP and DistributedSampler, as usual.

evenly verify examples/foreign_ddp.py -n 1,2,4

1,437 samples do not divide by 2 or 4, so DistributedSampler repeats some; `evenly verify` finds the
step in which that changes the gradient: the last of the epoch.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import evenly  # the first line

BATCH = 120


def main() -> None:
    train, test = evenly.data.digits()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = evenly.trace(model, optimizer)  # the second line

    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train, shuffle=True, seed=0
    )
    loader = DataLoader(train, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in trace.batches(loader):  # if you like: the samples by number
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        right = (net(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    if dist.get_rank() == 0:
        print(f"{float(right):.4%} right")


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29501")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
main()  # in a function, so that DDP and the last loss are gone before the group is
dist.destroy_process_group()
