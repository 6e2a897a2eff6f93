"""Reserving and binding, and giving back: all that the extender writes to the cluster.

It imports `kube`, `placement` and `state`, and of the modules beside it `telemetry`. Nothing that only tells or
simulates imports it.
"""
