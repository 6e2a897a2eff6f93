"""Which GPUs a job gets, and why not others: checks, policies, and the words for both. Pure functions of the state.

It imports `state`, and neither reads nor writes anything outside of the process.
"""
