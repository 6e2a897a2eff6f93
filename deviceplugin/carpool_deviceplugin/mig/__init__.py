"""Multi-Instance GPU: what instances a GPU can be divided into, and how to get from one division to another. Pure."""
