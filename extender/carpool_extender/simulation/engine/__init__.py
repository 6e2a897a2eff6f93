"""The event loop, the board on which the extender's own functions decide, and what they are told of the jobs."""
