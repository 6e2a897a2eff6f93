"""The cluster as decisions read it: GPUs as arrays, their health and usage, and what pods request. Pure."""
