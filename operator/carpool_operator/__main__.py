"""`python -m carpool_operator`."""

from carpool_operator.commands import operator

operator()
