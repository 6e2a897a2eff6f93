"""NVIDIA's MPS: a control daemon for each GPU, the processes that belong to it, and the host that they live in.

It imports `devices`; who may share a daemon is decided in `partitions`.
"""
