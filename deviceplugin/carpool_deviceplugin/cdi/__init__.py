"""Container Device Interface: what a slot brings into a container, and what NVIDIA says that a GPU needs in one.

It imports `devices`, which says what gives access to a GPU.
"""
