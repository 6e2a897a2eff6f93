"""What to do about what NVML says, as a part of a sentence."""

import pynvml

_ADVICE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus: look at dmesg for its last XID and reset or replace it",
    pynvml.NVML_ERROR_RESET_REQUIRED: "drain it and run nvidia-smi --gpu-reset",
    pynvml.NVML_ERROR_UNINITIALIZED: "the agent opens the driver again at its next look",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver (modprobe nvidia); the agent looks again",
    pynvml.NVML_ERROR_NO_PERMISSION: "run the agent as root with the device nodes and, for MIG, CAP_SYS_ADMIN",
    pynvml.NVML_ERROR_IN_USE: "something still uses it: end its processes, DCGM and nvidia-persistenced among them",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and kernel module are of different versions: restart the node",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "no room for it where it was to stand: plan anew",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "look at its power cables",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "its flash memory is damaged: have it flashed anew or replaced",
    pynvml.NVML_ERROR_IRQ_ISSUE: "its interrupts do not arrive: look at dmesg, the firmware's settings and its slot",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "the node's kernel or a cgroup forbids it: give the agent /dev/nvidia*",
    pynvml.NVML_ERROR_MEMORY: "the node has no memory left: free some",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "look whether lspci still has it; reset it, or restart the node",
    pynvml.NVML_ERROR_TIMEOUT: "the driver took too long: the agent asks again; if it stays so, restart the node",
    pynvml.NVML_ERROR_NOT_READY: "the agent asks again; if it stays so, restart the node",
}

_NO_START = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "expected libnvidia-ml.so.1, found none: install NVIDIA's driver on the node; "
    "in a container, run it with the nvidia runtime class (or the driver's libraries mounted)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "expected NVIDIA's kernel module, found it not loaded: run modprobe nvidia",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "expected library and kernel module of one version, found "
    "different ones: the driver was updated under a running kernel module; restart the node",
    pynvml.NVML_ERROR_NO_PERMISSION: "expected to be allowed to talk to the driver, found no permission: give the "
    "container /dev/nvidiactl and /dev/nvidia* and run it as root",
}

_KNOWN = {code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


def on_call(code: int) -> str:
    """Say what to do where a call has failed, also by a code that nobody has heard of."""
    if code in _ADVICE:
        return _ADVICE[code]
    where = "look at dmesg and nvidia-smi -q on the node"
    if code not in _KNOWN:
        return f"this code is newer than the agent, nvmlReturn_t in nvml.h names it: update the agent, and {where}"
    return f"{where}; if it stays so, restart the node, and report both"


def on_start(code: int, error: str) -> str:
    """Say what was expected, found and is to be done where the driver could not be opened."""
    return _NO_START.get(code) or f"expected NVML to start, found: {error}; {on_call(code)}"
