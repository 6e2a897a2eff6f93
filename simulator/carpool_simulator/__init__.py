"""Capacity planning: the scheduler's own decisions on a virtual clock."""
