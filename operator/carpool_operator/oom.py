"""Recognise from the end of a container's log whether its program ran out of GPU memory. Pure.

The rules were written for the messages of `tests/data/oom`.

Logs come from tenants, and the operator searches them in its event loop. So each pattern takes linear time: a gap
before a text that may be missing has a bound, or is atomic.
"""

import re

_RULES: tuple[tuple[str, str], ...] = (
    ("PyTorch", r"(?:CUDA|HIP) out of (?:the )?memory"),
    ("PyTorch", r"torch\.(?:cuda\.)?OutOfMemoryError"),
    ("PyTorch", r"(?<!ray\.exceptions\.)(?<!java\.lang\.)\bOutOfMemoryError\b(?!: Java)"),
    ("PyTorch", r"Tried to allocate [\d.]+ \w+\.? \(?GPU \d"),
    ("PyTorch", r"cuda runtime error \(2\)|\.cu line=\d+ error=2 : out of memory"),
    ("accelerate", r"No executable batch size found"),
    ("Caffe", r"error == cudaSuccess\.? \(?2 vs\.? 0"),
    ("JAX", r"Out of memory (?:while )?(?:trying to allocate|allocating) [\d.]+ ?\w*"),
    ("JAX", r"RESOURCE[_ ]EXHAUSTED:\s+(?:\w+: )?(?:Out of memory|Failed to allocate)"),
    ("TensorFlow", r"OOM when allocating tensor(?![^\n]{0,400}device:CPU)"),
    ("TensorFlow", r"Ran out of GPU memory|ran out of memory trying to allocate"),
    ("TensorFlow", r"device:GPU:\d+\W+failed to allocate memory"),
    ("TensorFlow", r"Dst tensor is not initialized"),
    ("Paddle", r"Out of memory error on GPU \d|enforce allocating <= available failed"),
    ("MXNet", r"pooled_storage_manager[^\n]{0,200}(?:out of memory|Memory allocation failed)"),
    ("ONNX Runtime", r"^(?![^\n]*_nchwc)(?>[^\n]*?BFCArena::AllocateRawInternal)[^\n]* Failed to alloc"),
    ("TensorRT", r"Error Code 2: OutOfMemory|OutOfMemory Error in|Cuda Error in \S*allocate: 2"),
    ("vLLM", r"No available memory for the cache blocks|larger than the available KV cache memory"),
    ("vLLM", r"larger than the maximum number of tokens that can be stored in KV cache"),
    ("vLLM", r"Free memory on device [^\n]{0,200} is less than desired GPU memory utilization"),
    ("SGLang", r"Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static"),
    ("TGI", r"Not enough memory to handle \S+ (?:total|prefill) tokens"),
    ("llama.cpp", r"(?:failed|unable) to allocate (?:CUDA|ROCm)\d+ buffer"),
    ("RMM", r"RMM_ERROR_OUT_OF_MEMORY|std::bad_alloc: (?:out_of_memory: )?(?:CUDA|RMM)|rmm::out_of_memory"),
    ("XGBoost", r"Memory allocation error on worker \d"),
    ("Spark RAPIDS", r"Gpu(?:SplitAnd)?RetryOOM|GpuOOM\b"),
    ("CatBoost", r"NCudaLib::TOutOfMemoryError"),
    ("Julia", r"OutOfGPUMemoryError|Out of GPU memory"),
    ("Theano", r"Error allocating \d+ bytes of device memory"),
    ("CuPy", r"out of memory (?:to allocate|allocating) [\d,]+ bytes"),
    ("Thrust", r"parallel_for failed: [^\n]{0,200}out of memory|thrust::\S{0,80}bad_alloc"),
    ("CUDA library", r"CU[A-Z]{1,12}_(?:STATUS_)?(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED"),
    ("NCCL", r"NCCL WARN [^\n]{0,200}(?:out of memory|Failed to CUDA [mc]alloc)"),
    ("CUDA library", r"cu(?:FFT|BLAS|SOLVER|SPARSE) failed to allocate|NVJPEG_STATUS_ALLOCATOR_FAILURE"),
    ("PyCUDA", r"cuMem\w{1,40} failed: out of memory"),
    ("OpenCL", r"CL_MEM_OBJECT_ALLOCATION_FAILURE"),
    ("Vulkan", r"(?:VK_ERROR_|Error)Out_?Of_?Device_?Memory"),
    ("ROCm", r"hipError(?:OutOfMemory|MemoryAllocation)"),
    ("CUDA driver", r"CUDA_ERROR_OUT_OF_MEMORY|CUresult error\s+result=2\b|CudaException: ErrorOutOfMemory"),
    ("CUDA runtime", r"cudaErrorMemoryAllocation|failed to cuda ?malloc\b|cuda ?malloc failed(?!:)"),
    ("CUDA runtime", r"(?:cuda|gpu|hip)[^\n]{0,120}?\bout[ _]?of[ _]?(?:device |video )?memory"),
    ("CUDA runtime", r"\bcuda\w* error(?: code)?[ :=(]{1,3}2\b"),
    ("CUDA runtime", r"(?:cuda|gpu|device) memory alloc\w* (?:failed|failure|error)"),
    ("CUDA runtime", r"failed to alloc\w*[^\n]{0,80}? (?:on|from|in) (?:the )?(?:gpu|cuda|device)\b"),
    (
        "CUDA runtime",
        r"(?:not enough|insufficient|out of|no more) (?:free )?(?:(?:gpu|cuda|video|device) memory|vram)\b",
    ),
    ("CUDA runtime", r"out[ _]?of[ _]?(?:device |video )?memory (?:error )?(?:on|in|from) (?:the )?(?:cuda|gpu)"),
)
"""Name of a framework and the message by which it reports that GPU memory is exhausted; specific messages first."""

_MESSAGES = tuple((name, re.compile(pattern, re.IGNORECASE | re.MULTILINE)) for name, pattern in _RULES)

_NO_FAILURE = re.compile(
    # TensorFlow and ONNX Runtime try again with less memory, and log each try.
    r"ran out of memory\s{1,9}trying to allocate\s(?:[^\n]{0,200}\n)?[^\n]{0,200}not a failure"
    r"|^(?>[^\n]*? I )[^\n]*failed to alloc[^\n]*$"
    # Pinned memory of the host.
    r"|failed to alloc\w* [^\n]{0,200} on host:[^\n]*"
    # A warning of Python is no exception.
    r"|\b\w+Warning: [^\n]*"
    # Advice for the case that memory is exhausted.
    r"|\bif you (?:encounter|get|see|run|face|still)[^\n]*"
    r"|\b(?:to avoid|to prevent) [^\n]{0,40}out of memory[^\n]*"
    # fairseq logs an error that it handles.
    r"|\| WARNING \|[^\n]{0,200}ran out of memory[^\n]*",
    re.IGNORECASE | re.MULTILINE,
)
"""Texts that name exhausted memory without a failure."""

_ADVICE = re.compile(r"\b(?:try|consider|please|should|can|could|may|might)\b[^\n]*", re.IGNORECASE)

_HANDLED = re.compile(
    r"(?<!by )\b(?:skipp(?:ing|ed)|retry(?:ing)?|retried|reduc(?:ing|ed)|halv(?:ing|ed)|decreas(?:ing|ed)"
    r"|lower(?:ing|ed)|fall(?:ing|s)? back|fell back|recover(?:ing|ed)|offloading|attempting to free)\b",
    re.IGNORECASE,
)
"""Words of a program that handled the error and went on."""

_ERROR = re.compile(r"^.*?(?:Error|Exception)\b", re.MULTILINE)

_LAUNCHER_ERROR = re.compile(r"ChildFailedError|CalledProcessError|ProcessRaisedException|failed \(exitcode: \d+\)")

_KILLED = re.compile(r"(?:exitcode *: *|return code = |status )-\d|\bSIGKILL\b")


def framework_out_of_gpu_memory(log_end: str) -> str | None:
    """Return which framework reported at the end of a log that GPU memory was exhausted; None if none did.

    A report after which the program announces that it goes on, for example with a smaller batch, does not count.
    """
    text = _NO_FAILURE.sub("", log_end)
    found = [(name, match) for name, pattern in _MESSAGES for match in pattern.finditer(text)]
    if not found:
        return None
    last = max(match.end() for _, match in found)
    after = _ADVICE.sub("", text[last:])
    return None if _HANDLED.search(after) else found[0][0]


def names_no_cause(log_end: str) -> bool:
    """Return whether the end of a log is empty, or holds no error but a launcher's report that its process failed.

    Launchers (torchrun, accelerate, DeepSpeed) print so much after the error of the program that the kubelet cuts it
    off. A report that the process was killed by a signal is a cause.
    """
    if _KILLED.search(log_end):
        return False
    errors = [match.group() for match in _ERROR.finditer(log_end)]
    is_deepspeed = not errors and "exits with return code" in log_end
    return not log_end.strip() or is_deepspeed or (bool(errors) and all(map(_LAUNCHER_ERROR.search, errors)))
