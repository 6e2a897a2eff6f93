"""Trains six steps with DeepSpeed (ZeRO 1, two groups of parameters) in one process on the CPU."""

import os
import sys

sys.path.pop(0)  # this file's directory, in which `deepspeed` is this file
os.environ.update(
    DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29561", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
)

import deepspeed
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
groups = [{"params": list(part.parameters()), "lr": 0.01} for part in model]
config = {
    "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(groups), config=config, dist_init_required=True
)
for _ in range(12):
    engine.backward(engine(torch.ones(8, 4)).sum())
    engine.step()
