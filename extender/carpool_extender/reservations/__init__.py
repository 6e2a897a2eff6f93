"""Reserving and binding, and giving back: everything that writes to GpuNodes and pods.

It imports `kube`, `placement` and `state`, and of the modules beside it `telemetry`. Nothing that only tells or
simulates imports it.
"""
