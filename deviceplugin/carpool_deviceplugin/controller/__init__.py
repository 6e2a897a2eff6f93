"""The controller of the node's GpuNode: hears reservations, has them prepared and measured, writes status and events.

It imports `partitions` and `devices`. What is written is decided by pure functions (`status`, `news`).
"""
