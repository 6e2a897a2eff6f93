"""What is done about a job, from its admission to its end: a snapshot in, actions out.

`reconcile` decides, `actions` lists all that can come of it. Pure: it imports `state` and `workers`, and nothing that
calls the API server or traces a model.
"""
