"""The GPUs of a node: what is known of one, the port to them, and how long the agent waits for what it asks there.

Simulated GPUs stand behind the port here, real ones in `nvml`. It imports `mig`, for how a GPU is divided.
"""
