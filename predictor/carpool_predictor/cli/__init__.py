"""What `carpool predict` is made of: what can be asked about, files of rows, and how answers are shown.

The commands themselves are `carpool_predictor.commands`. May import everything but `evaluation` and `profiler`.
"""
