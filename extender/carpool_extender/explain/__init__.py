"""`carpool explain` and `carpool what-if`: the extender's decisions for people, with the caller's rights.

The package reserves nothing: it runs filters, gang placement and queue on a copy of the cluster.
"""
