"""What is true of simulated jobs and GPUs: slowdowns of measured pairs, memory, power, failures.

Nothing here asks the model that decides.
"""
