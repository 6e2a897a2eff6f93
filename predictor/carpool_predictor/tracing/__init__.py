"""From a model to its features: one training step on tensors without data."""
