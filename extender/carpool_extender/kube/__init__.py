"""What Kubernetes tells: requests of kube-scheduler, and the objects that are watched, down to what a pod demands.

It imports `placement` (for what a demand consists of) and `state`, which its watches keep up to date.
"""
