"""The board: read-only web pages of GPUs, queue and jobs, with the rights of each viewer."""
