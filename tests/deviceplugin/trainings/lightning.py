"""Trains one epoch of six batches with Lightning, in three steps by gradient accumulation."""

import sys

sys.path.pop(0)  # this file's directory, in which `lightning` is this file

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, logger=False, default_root_dir="."
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=8))
