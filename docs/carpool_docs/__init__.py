"""Writes docs/reference/ from the code: settings, metrics, commands and resources. `make docs` runs it."""
