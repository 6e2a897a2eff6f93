"""The vocabulary of Carpool: domain values, resource types, keys, ports, and the way to the Kubernetes API."""
