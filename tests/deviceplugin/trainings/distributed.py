"""Trains with DDP and FSDP in two processes on the CPU."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")


def train(model, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    return optimizer


def work(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    first = train(DistributedDataParallel(torch.nn.Linear(4, 4)), steps=5)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    train(sharded, steps=7)
    del first  # until here, so that the second optimizer has another id
    dcp.save(sharded.state_dict(), checkpoint_id=os.path.join(directory, "checkpoint"))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
