"""What the operator has heard of the cluster, and which job is looked at next because of it.

It imports `state` and `workers`; it decides nothing of a job.
"""
