"""What a step costs on a GPU, from its features: memory, activity, time, and the slowdown beside others.

Each model is read from `artifacts` and evaluated here; none is fitted here. May import `features`, and no PyTorch.
"""
