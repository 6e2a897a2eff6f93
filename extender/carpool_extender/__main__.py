"""`python -m carpool_extender`: the same as `carpool extender`."""

from carpool_extender.commands import extender

if __name__ == "__main__":
    extender()
