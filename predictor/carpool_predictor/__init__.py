"""Predicts memory, activity, step time and slowdown from a model's graph."""
