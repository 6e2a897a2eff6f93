"""`carpool node`: a node's GPUs for people, without Kubernetes, and the battery of trials on a real one.

It imports the composition root, for the same GPUs as the agent would have, and most of what stands below that.
"""
