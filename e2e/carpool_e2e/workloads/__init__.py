"""Programs that run inside the demo's containers."""
