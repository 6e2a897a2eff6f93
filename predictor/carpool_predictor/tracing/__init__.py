"""From a model to its features: one training step on tensors without data, without a GPU.

May import `catalog` and `features`. `source` and `requests` do without PyTorch and stand on the caller's side of the
process that traces; all others belong into it.
"""
