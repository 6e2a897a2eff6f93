"""Evaluation and fitting of the shipped models, and the experiments on published workloads; not in the wheel."""
