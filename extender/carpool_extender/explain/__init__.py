"""`carpool explain` and `carpool what-if`: the same decisions for people, with the rights of whoever asks.

It imports `kube`, `placement`, `state` and `settings`; nothing that could reserve.
"""
