"""The same decisions on a virtual clock: workloads of published experiments, measured truth, tables and pictures.

It imports `placement`, `state` and `settings`; it needs no Kubernetes.
"""
