"""Trains four steps with transformers.Trainer, with a checkpoint after the second and the last."""

import sys

sys.path.pop(0)  # this file's directory, in which `transformers` is this file

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=32)
data = [{"input_ids": torch.ones(5, dtype=torch.long), "labels": torch.tensor(0)}] * 16
args = TrainingArguments(
    "out",
    max_steps=4,
    save_steps=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    use_cpu=True,
    report_to=[],
)
Trainer(BertForSequenceClassification(config), args, train_dataset=data).train()
