"""The node agent: inventory, partitions, device plugin and metrics."""
