"""Fits the shipped models and judges them: every table and figure of the model cards, from the measurements.

`carpool train` and `carpool evaluate`; they need the extra `train`. A folder for each suite, which imports no other's;
around them what all of them use. May import everything but `profiler`; nothing that predicts imports it.
"""
