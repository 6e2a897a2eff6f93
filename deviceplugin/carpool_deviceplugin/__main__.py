"""`python -m carpool_deviceplugin`: the same as `carpool agent`."""

from carpool_deviceplugin.commands import agent

if __name__ == "__main__":
    agent()
