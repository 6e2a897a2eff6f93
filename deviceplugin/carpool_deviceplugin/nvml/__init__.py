"""Real GPUs, through NVIDIA's management library."""
