"""The published experiments as jobs on a cluster, and traces of one's own."""
