"""The same decisions on a virtual clock: workloads of published experiments, measured truth, tables and pictures."""
