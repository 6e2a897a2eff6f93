"""Doing what was decided: all that is created, written and deleted for a job, and what is remembered of it for a while.

It imports `watching`, `estimation`, and all that those import.
"""
