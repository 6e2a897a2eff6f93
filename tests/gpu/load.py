"""A process that computes on the GPU: `python load.py KIND [DEVICE]`. Needs nothing of Carpool, only PyTorch with CUDA.

It prints a line of JSON for each event: `{"steps": 12}`, and at its end `{"ended": "out of memory"}`. It reads a
command from each line: `take MIB`, `fault` (write to a free address), `assert` (fail an assertion in a
kernel), or `stop`.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SIZE = 8192
SAY_EVERY_S = 0.25
BLOCK_CYCLES = 10_000_000
"""Some milliseconds: what lies between two kernels is little beside it."""
ILLEGAL_ADDRESS = 0x7F0000000000 + 12345678900
WRITE = 'extern "C" __global__ void write(long long address, float* x) { *(float*)address = x[0]; }'


def say(**what: object) -> None:
    """Tell the parent."""
    print(json.dumps(what), flush=True)


def work_of(kind: str, device: str, torch: Any) -> Callable[[], None]:
    """Return a function that makes a step, and lets the GPU finish it."""
    if kind == "block":

        def block() -> None:
            torch.cuda._sleep(BLOCK_CYCLES)  # one block of one thread
            torch.cuda.synchronize()

        return block
    if kind == "product":
        left, right = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
        into = torch.empty_like(left)

        def product() -> None:
            for _ in range(20):  # so that the GPU never waits for Python
                torch.mm(left, right, out=into)
            torch.cuda.synchronize()

        return product
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 32 * 32, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)

    def train() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return train


def listen(words: "queue.SimpleQueue[list[str]]") -> None:
    """Pass on the commands of the parent."""
    for line in sys.stdin:
        words.put(line.split() or [""])


def main() -> None:
    """Work until a command to stop or an error of the GPU."""
    import torch

    words: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(words,), daemon=True).start()
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    step, steps, said_at = work_of(sys.argv[1], device, torch), 0, 0.0
    taken: list[Any] = []
    while True:
        step()
        steps += 1
        if time.monotonic() - said_at >= SAY_EVERY_S:
            said_at = time.monotonic()
            say(steps=steps)
        word = words.get_nowait() if not words.empty() else [""]
        if word[0] == "stop":
            return
        if word[0] == "take":
            taken.append(torch.ones(int(word[1]) << 20, dtype=torch.uint8, device=device))
        if word[0] == "fault":
            write = torch.cuda._compile_kernel(WRITE, "write")
            write(grid=(1, 1, 1), block=(1, 1, 1), args=[ILLEGAL_ADDRESS, torch.ones(1, device=device)])
            torch.cuda.synchronize()
        if word[0] == "assert":
            torch.ones(1, device=device)[torch.tensor([1 << 40], device=device)].sum().item()


if __name__ == "__main__":
    try:
        main()
    except Exception as e:  # whatever the driver does to it is what it has to say
        is_memory = type(e).__name__ == "OutOfMemoryError"
        lines = str(e).strip().splitlines() or ["no message"]
        say(ended="out of memory" if is_memory else f"{type(e).__name__}: {lines[0][:200]}")
        sys.exit(1)
