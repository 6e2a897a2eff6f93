"""The kubelet's side: its device plugin and PodResources APIs, and whose container is about to start.

It imports `cdi` and `devices`; which reservations are ready, and whose, it asks whoever built it.
"""
