"""The state of the cluster: GpuNodes as arrays, a row for each GPU, and their ledgers as pure functions.

What was measured of tenants, and which GPUs are in doubt or at rest, belongs to it; how anything is decided does not.
It imports none of its siblings.
"""
