"""Trains six batches with Accelerate, in three steps by gradient accumulation."""

import sys

sys.path.pop(0)  # this file's directory, in which `accelerate` is this file

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for (batch,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_model(model, "saved")
