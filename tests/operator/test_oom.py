"""Recognising GPU out-of-memory from the end of a container's log."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_operator.oom import names_no_cause, reports_gpu_out_of_memory
from carpool_operator.outcomes import outcome_of
from operator_fixtures import pod, terminated

CORPUS = Path(__file__).parents[1] / "data" / "oom"
LOG_TAIL_BYTES = 2048
"""The kubelet's limit for a termination message that it takes from the log."""


def messages(collection: str) -> list[dict[str, Any]]:
    return yaml.safe_load((CORPUS / f"{collection}.yaml").read_text())


NAMES = (
    *("first", "second", "third", "fourth", "fifth", "sixth"),
    *("seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"),
    *("thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth", "twenty-first", "twenty-second", "twenty-third", "twenty-fourth"),
    *("twenty-fifth", "twenty-sixth", "twenty-seventh"),
)
COLLECTIONS = {name: messages(name) for name in NAMES}
"""Each was collected after the rules had been corrected for the one before it."""


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(one, id=f"{name}: {one['kind']}: {one['id']}")
        for name, collection in COLLECTIONS.items()
        for one in collection
    ],
)
def test_message(message: dict[str, Any]) -> None:
    is_unclear = message.get("unclear", False)
    is_reported = message["gpu_oom"] or message.get("misleading", False)
    is_right = reports_gpu_out_of_memory(message["text"]) is (is_reported and not is_unclear)
    is_open = names_no_cause(message["text"]) or not is_unclear
    assert (is_right and is_open) is not message.get("missed", False)


REPORT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
STEP = "epoch 1 step 500 loss: 2.31"


@pytest.mark.parametrize(
    ("text", "is_certain"),
    [
        pytest.param(f"[rank1]: {REPORT}\n{STEP}\n", True, id="a step of another rank"),
        pytest.param(f"{REPORT}\n{STEP}\nW Sending process 9 closing signal SIGTERM\n", True, id="torchrun ends ranks"),
        pytest.param(f"{REPORT}\nTraceback (most recent call last):\nKeyboardInterrupt\n", True, id="an interrupt"),
        pytest.param(f"{REPORT}\n{STEP}\nValueError: math domain error\n", False, id="a step of any rank"),
        pytest.param("10:01:02 INFO train: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)\n"
                     "SystemExit: 1\nRuntimeError: worker ended\n", False, id="for information"),
        pytest.param("10:01:02 | WARNING | CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)\n"
                     "RuntimeError: worker ended\n", False, id="a warning"),
        pytest.param("cuda_driver.cc:924] failed to allocate 8.00G from device: CUDA_ERROR_OUT_OF_MEMORY\n"
                     "ValueError: shapes differ\n", False, id="a try of TensorFlow"),
        pytest.param("alloc.h:48 NCCL WARN Cuda failure 'out of memory'\n", True, id="NCCL has no higher level"),
    ],
)  # fmt: skip
def test_what_follows_a_report_or_its_level_does_not_deny_it(text: str, is_certain: bool) -> None:
    """Where the program may have handled the error, the measurement decides."""
    assert reports_gpu_out_of_memory(text) is is_certain
    assert names_no_cause(text) is not is_certain


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param('  File "train.py", line 9, in step\n    gpu.guard_out_of_memory(batch)', id="source code"),
        pytest.param('[rank0]:   File "gpu/oom.py", line 9, in on_gpu_oom\n[rank0]:     run()\n[rank0]:     ^^^',
                     id="path"),
        pytest.param("frame #3: c10::cuda::out_of_memory() + 0x1f (0x7f in libc10_cuda.so)", id="C++"),
        pytest.param("    @     0x7f11e628b350  gpu::HandleOutOfMemory()", id="glog"),
        pytest.param("\tat ai.rapids.cudf.Rmm.onOutOfMemory(Rmm.java:12)", id="Java"),
    ],
)  # fmt: skip
def test_a_stack_frame_reports_nothing(frame: str) -> None:
    assert not reports_gpu_out_of_memory(f"{frame}\nValueError: shapes differ\n")
    report = f"{frame}\n{REPORT}\n"
    assert reports_gpu_out_of_memory(report)
    assert reports_gpu_out_of_memory(report.replace("\n", "\\n")), "in one line, as Ray and JSON print it"


@pytest.mark.parametrize(
    "text",
    [
        "ImportError: cannot import name 'memory_allocated' from 'torch.cuda' (torch/cuda/__init__.py)",
        "ValueError: GPU memory utilization must be less than 1.0. Got 1.5.",
        "ValueError: `gpu_memory_utilization` cannot be greater than 1",
        "ValueError: memory_efficient_attention on cuda: a head dim larger than 256 is not possible",
    ],
)
def test_a_name_with_memory_in_it_reports_nothing(text: str) -> None:
    """Regression: a lack near such a name, or an import that fails near one, was exhausted memory."""
    assert not reports_gpu_out_of_memory(f"{text}\n")
    assert not names_no_cause(f"{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("AssertionError: expected peak GPU memory to be less than 10 GB, got 12.3", id="expectation"),
        pytest.param("ValueError: GPU memory limit must be less than the total memory of the device", id="rule"),
        pytest.param("ValueError: --gpu-memory must not exceed the memory of the device", id="prohibition"),
        pytest.param("Estimated GPU memory: 14 GB, which may exceed your 12 GB", id="estimate"),
        pytest.param("GPU memory usage exceeded 90% of the threshold", id="threshold"),
        pytest.param("Requires more than 16 GB of VRAM", id="requirement"),
        pytest.param("max GPU memory 8.1 GB, epoch 3, loss overflow", id="another clause"),
        pytest.param("cuda:0: allocated 10 GiB, 2 requests failed", id="a failure in another clause"),
        pytest.param("To avoid running out of GPU memory, use checkpoints", id="advice"),
        pytest.param("3 epochs without CUDA OOM; OOM count: 0; ooms=0", id="none"),
        pytest.param("AttributeError: module 'torch.cuda' has no attribute 'OutOfMemoryError'", id="a name"),
        pytest.param("FAILED tests/gpu/test_train.py::test_cuda_out_of_memory - assert 1 == 2", id="a test's name"),
        pytest.param("Error: cannot allocate 4 GPUs on node gpu-1", id="GPUs themselves"),
        pytest.param("CUDA error: an illegal memory access was encountered\nUnable to allocate memory on cuda:0",
                     id="every call fails after some errors"),
    ],
)  # fmt: skip
def test_rules_estimates_and_advice_report_nothing(text: str) -> None:
    """Regression: a limit or a comparison near memory, and a failure in another clause, were exhausted memory."""
    assert not reports_gpu_out_of_memory(f"{text}\nValueError: shapes differ\n")


def test_advice_after_a_report_does_not_deny_it() -> None:
    """Regression: reducing a size was taken for what the program did, also where it may help."""
    assert reports_gpu_out_of_memory(f"{REPORT} Reducing the batch size may help.\n")
    assert not reports_gpu_out_of_memory(f"{REPORT}\nReducing the batch size to 4.\n")


def test_corpus_is_large_and_each_message_has_its_source() -> None:
    every = [one for collection in COLLECTIONS.values() for one in collection]
    count = Counter(one["gpu_oom"] for one in every)
    assert (count[True] >= 150, count[False] >= 100) == (True, True)
    assert len({one["id"] for one in every}) == len(every)
    assert all(one["source"].startswith("https://") and one["text"] for one in every)
    sources = [source for collection in COLLECTIONS.values() for source in {one["source"] for one in collection}]
    assert len(sources) == len({*sources}), "a later collection has new sources only"


SCRIPT = """
import torch
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    raise torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.49 GiB of which 1.00 GiB is "
        "free. Including non-PyTorch memory, this process has 38.48 GiB memory in use."
    )

{main}()
"""


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        pytest.param("main", "ContainerFailed", id="the summary hides the error of the script"),
        pytest.param("record(main)", "GpuOutOfMemory", id="with @record, the summary ends with the error"),
    ],
)
def test_torchrun(main: str, reason: str, tmp_path: Path) -> None:
    """The launcher's real output: its summary after the script's error is longer than the kubelet's log tail."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{main}", main))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launcher, capture_output=True, text=True, check=False, cwd=tmp_path)
    log = done.stdout + done.stderr
    assert done.returncode == 1
    assert reports_gpu_out_of_memory(log)
    ended = terminated(done.returncode, message=log[-LOG_TAIL_BYTES:])
    assert outcome_of(pod(phase="Failed", status=ended)).reason == reason
