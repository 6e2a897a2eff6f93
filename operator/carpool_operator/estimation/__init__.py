"""The predictor at work beside the event loop: predictions, traces that wait, what is learned from jobs that ran.

It imports `decisions` (for what is worth another try, and what a status tells), `state` and `workers`.
"""
