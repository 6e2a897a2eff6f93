"""From how a GPU is to how its reservations want it: the steps, and one worker for each GPU that takes them.

It imports `devices` and `mig`; plan and division are pure.
"""
