"""Published architectures by name: which there are, how they are built, and what those traced before cost.

May import `features`. PyTorch and the libraries of models are imported only where one is built.
"""
