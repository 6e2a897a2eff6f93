"""What is answered of a job: the cost models and what was learned in the cluster, put together.

May import `calibration`, `cost_models` and `features`: it starts from features, and never traces.
"""
