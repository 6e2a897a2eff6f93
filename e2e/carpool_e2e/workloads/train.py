"""A training job for simulated GPUs: a real PyTorch loop on the CPU, with given GPU memory and activity.

The loop is real, so its loss really falls. There is no GPU: options give the memory and activity that a real job
would have, and `carpool_simulated` takes both from the simulated device, which its neighbours use, too.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from carpool_simulated import Gpu, SimulatedGpuError, open_gpus

_REPORT_EVERY_S = 0.7


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mib", type=float, required=True, help="GPU memory to take beside the context, in MiB")
    parser.add_argument("--step-seconds", type=float, default=0.5, help="time of one step alone, in seconds")
    parser.add_argument("--gpu-util", type=float, default=0.5, help="share of the step in which a kernel runs, 0..1")
    parser.add_argument("--sm-active", type=float, default=0.3, help="share of SMs with work, 0..1")
    parser.add_argument("--dram-active", type=float, default=0.2, help="share of memory bandwidth in use, 0..1")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="steps to train; by default until the pod ends")
    parser.add_argument("--no-loop", action="store_true", help="take the GPU but train nothing")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, flush=True)


def _training_loop() -> Callable[[], float]:
    """Make a small network, and return a function that trains one step and returns the loss."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 16)
    targets = inputs[:, :4].sum(dim=1, keepdim=True).sin()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=len(inputs))

    def step() -> float:
        (batch,) = data
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item())

    return step


def _train(gpus: list[Gpu], args: argparse.Namespace) -> None:
    for gpu in gpus:
        limit = "none" if gpu.memory_limit_mib is None else f"{gpu.memory_limit_mib} MiB"
        threads = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        _say(f"GPU {gpu.index}: {gpu.name} {gpu.uuid}, {gpu.mode}, memory limit {limit}, threads {threads}%")
        gpu.allocate(args.memory_mib)
    step: Callable[[], float] = (lambda: math.nan) if args.no_loop else _training_loop()
    reported = -math.inf
    for number in range(args.steps):
        took = max(gpu.run(args.step_seconds, args.sm_active, args.dram_active, args.gpu_util) for gpu in gpus)
        loss = step()
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            _say(f"step {number}: loss {loss:.4f}, {took:.3f} s ({took / args.step_seconds:.2f} × alone)")
    _say(f"finished after {args.steps} steps")


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def main() -> None:
    """Train until SIGTERM. A full GPU ends the process with PyTorch's words and exit code 1."""
    signal.signal(signal.SIGTERM, _end)
    args = _arguments()
    try:
        with open_gpus() as gpus:
            _train(list(gpus), args)
    except SimulatedGpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
