"""The second process of a test: `python simulated_process.py COMMAND ARGUMENTS`, talking on its pipes.

It runs with nothing but the standard library and carpool_simulated, as in a container.
"""

import sys

from carpool_simulated import SimulatedGpuError, open_gpus


def main() -> None:
    command, *arguments = sys.argv[1:]
    try:
        (gpu,) = open_gpus()
        if command == "hold":
            gpu.allocate(int(arguments[0]))
            print("ready", flush=True)
            sys.stdin.read()
        elif command == "race":
            print("open", flush=True)
            sys.stdin.readline()
            gpu.allocate(int(arguments[0]))
            print("ready", flush=True)
            sys.stdin.read()
    except SimulatedGpuError as e:
        print(f"{type(e).__name__}: {e}", flush=True)
        sys.exit(1)


main()
