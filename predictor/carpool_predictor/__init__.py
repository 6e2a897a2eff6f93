"""Predicts memory, activity, step time and slowdown from a model's graph.

Here stands what is started: the commands, and the modules `trace`, `sweep` and `packing` for `python -m`. All else lies
in folders, each of which says what it is for and what it may import; together they are layers that `make lint` checks.
"""
