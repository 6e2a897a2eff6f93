"""Recognise from the end of a container's log whether its program ran out of GPU memory. Pure.

A line reports exhausted GPU memory if it names a lack of memory or a refused allocation, and a GPU, but not the host's
memory. The words are those of frameworks and allocators in `tests/data/oom`.

Logs come from tenants, and the operator searches them in its event loop. So each gap in a pattern has a bound.
"""

import re


def _either(*patterns: str) -> re.Pattern[str]:
    """Return the pattern that finds any of the given ones in a line, in upper or lower case."""
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


_NEAR = r"(?:(?!(?:\w\w|\))\. )(?:[^,;:\n]|:\d)){0,60}?"
"""A gap within a clause."""
_MEMORY = r"(?:memory(?![_ ](?:utilization|efficient|format))|(?<![a-z])mem(?![a-z])|v?ram\b|mem_alloc)"
_ALLOCATION = (
    r"(?:(?<!de)alloc(?!ator|_conf|\w{0,20}\.\w|\w{0,5} [^.,;\n]{0,12}(?:\b(?:ports?|GPUs|nodes|resources)\b|\{)))"
)
_LACK = (
    r"(?:out[ _-]?of(?![ _-](?:bounds|range|date))|r[au]n out|but only|shortage|lack of|exhausted|overflow|not fit"
    r"|exceed(?!\w{0,3} \d+ ?%)|[iu]nsufficient|with sufficient|(?:not|n't)(?: have| provide)? enough"
    r"|too (?:little|small|large|big)|no (?:more|free|available)"
    r"|\b(?:is|are|was|were) (?:(?:larg|great|small|low)er|more|less) than)"
)
"""States of memory. A comparison is one only in the indicative: a memory that must be less than a number is a rule."""
_REFUSED = r"(?:fail(?!ing)|unable|not able|not possible|refused|can ?not(?! import)|can't|could ?n[o']t)"

_EXHAUSTED = _either(
    rf"{_LACK}{_NEAR}{_MEMORY}|{_MEMORY}{_NEAR}{_LACK}|(?:\b|_|(?-i:[a-z]))OOM\b(?!s?[=(-]| count)|out of gpu\b",
    rf"less than desired gpu memory|{_REFUSED}{_NEAR}{_ALLOCATION}|{_ALLOCATION}{_NEAR}{_REFUSED}",
    rf"error[ :]{{0,2}}\w{{0,20}}{_ALLOCATION}|alloc\w{{0,20}}[_ ](?:error|failure)|error=2 :",
    r"\b(?:cuda|cudnn|cuMem|cuCtx|CUresult|hip)\w{0,40}\W.{0,30}?(?:error|fail\w{3,4}|result)(?: code)?[ :=([]{1,3}2\b",
    r"(?:cuda|CUFFT_|CUDNN_STATUS_)success\.? \(?2 vs|bad_?alloc|allocation on device|invalid buffer size",
    r"tried to allocate [\d.]+ [KMG]|no executable batch size|dst tensor is not init|allocating <= available",
    r"tokens that can be stored in kv cache",
)
"""A lack near memory, or a refusal near an allocation; phrases without these words; error 2 of CUDA and HIP."""

_GPU = _either(
    r"cuda|cu(?:blas|dnn|fft|mem|rand|result|solver|sparse|state|tensor|vid|-\w)|gpu|nccl|nvidia|nv_?enc|nvjpeg|optix",
    r"tensorrt|\bTRT\b|thrust|\bRMM|\bTHC|\.cuh?\b|\bhip|rocm|opencl|vulkan|\bxpu|mps backend|xla|jax|vram",
    r"video memory|torch\.\w*\.?OutOf|TaskError\(OutOf|(?:available|stored in) kv cache|cache blocks",
    r"mem-fraction-static|(?:prefill|total) tokens|BFCArena|bfc_|pooled_storage|allocating tensor",
    r"resource[ _]?exhausted|\bHBM\b|\bdevice[ _-](?:mem|ordinal|\d|out|ran)",
    r"(?:on|from) device\b|out_?of_?device|error code 2:|\bcl_|\bvk\w",
    r"of memory (?:(?:trying |while |to )+allocat|allocating [\d,]+ bytes \()|executable batch|parallel_for failed",
    r"dst tensor|allocating <=|invalid buffer size|spark\.rapids|bitsandbytes|flash_?infer|paged_?kv",
)
"""Words for a GPU, its memory, or a library that allocates only there."""

_NOT_GPU = _either(
    r"(?<!gpu and shared )(?<!gpu or )(?<! \()\bhost\b|host_?(?:alloc|bfc|mem)|allocmapped|pinned|page-locked|mlock",
    r"shared memory|\bshm\b|\b[sv]mem\b|(?:system|virtual) (?:memory|ram)|low on memory|java\.lang\.Out|java runtime",
    r"system call|bottom of memory|heap (?:space|limit|out)|cgroup|kill(?:ed)? process|oom[- ]?kill|slurm|srun:",
    r"alloc_cpu|allocator \(?\w{0,5}cpu|err(?:no|or)\W{0,3}(?:code )?(?:is )?12\b|\(12\)|mmap|memalign|\bfork",
    r"for an array|arraymemory|memoryerror: unable|fail to alloc memory of|ray\.exceptions\.Out|CPUAllocator",
    r"after a total of|swap space|\bdisk|space left|quota|message larger|busy or unavailable|unsupported|not supported",
    r"invalid(?! buffer size)|illegal|driver version|capable|than 1EB memory|compiler error|ptxas|_nchwc",
    r"initiali[sz]ation error|device-side assert\b|launch failure|misaligned|cuda_error_(?!out_)",
    r"unknown error(?! was| code)|\b(?:Import|ModuleNotFound|Attribute|Name|Key|Index|Syntax|Type|FileNotFound)Error: ",
    r"\bnon[ -]OOM\b|^memory allocation of.*failed$|cannot allocate memory(?! (?:on|from|in|for))|std::bad_alloc(?!:)",
)
"""Words for the host's memory, the memory of a core, other resources and other errors."""

_UNCLEAR = _either(
    r"_STATUS_(?:NOT_INIT|INTERNAL_|EXECUTION_|INSUFFICIENT_)|cuDNN.{0,20}algo|algo.{0,40}cuDNN|cu\w{3,8} handle",
    r"unhandled ?cuda ?error|cuda context for|ASSERT\w{0,4} FAILED at.{0,90}Allocator|find an engine|GEMM launch",
    r"DNN lib|native memory|trained on this hardware|(?<!launch_)out_of_resources|(?:\A|recent call last\):)\s*\Z",
)
"""Ends of logs that exhausted GPU memory causes, and other things too."""

_REST = r"(?:(?!\\n).)*"
"""The rest of a line; JSON and reprs of exceptions have several lines in one, with a backslash and n between them."""

_NO_FAILURE = _either(
    # TensorFlow and ONNX Runtime try again with less memory, and log each try.
    r"ran out of memory\s{1,9}trying to allocate\s(?:[^\n]{0,200}\n)?[^\n]{0,200}(?:not a failure|the caller)",
    # A user may have the name of a vendor.
    r"[/\\](?:home|Users)[/\\]\w+",
    # A test may have the name of an error.
    r"\btest_\w+",
    # Stack frames: their paths, names and source code are no messages.
    rf'^([^\n]{{0,60}}?)File "[^"\n]{{1,300}}", line \d{_REST}(?:\n\1[ \t]{{1,60}}(?!File "){_REST}){{0,2}}',
    rf"\bframe #\d{_REST}|^\s{{1,9}}@\s{_REST}|^\s{{1,9}}at [\w.$/]{{1,200}}\({_REST}",
    # Advice, conditions and skipped items.
    r"^skip[^\n]{0,200} due to [^\n]*\n[^\n]*",
    r"\b(?:if|avoid\w{0,3}|prevent\w{0,3}|when|may|might|could|must not|should not)\b(?! not)[^\n:)]{0,60}"
    r"(?:out[ _-]?of[ _-](?:\w{2,6}[ _])?memory|OOMs?\b|exceed)[^\n]*",
    r"(?<!device )\b(?:no|without|0|zero)\b (?:\w{1,12} ){0,2}(?:out[ -]of[ -]memory|OOM)[^\n]*",
    r"(?:out[ -]of[ -]memory|OOM)(?: \w{1,12}){0,4} (?:occurs?|happens?|means)\b[^\n]*",
)
"""Texts that name exhausted memory without a failure."""

_INFORMATION = _either(
    r"^(?>.*?\b(?-i:INFO|DEBUG)\b)(?!.*(?:error|exception))",
    r"(?<!NCCL )\b(?-i:WARN(?:ING)?)\b|\w{1,40}Warning: |\[W\]|(?:cuda|rocm)_driver\.cc:\d+\] failed to alloc",
)
"""Lines for information, warnings and tries of TensorFlow: no program ends by them. NCCL warns of errors."""

_ADVICE = re.compile(
    r"(?:(?!\. )[^\n]){0,200}\b(?:try|consider|please|should|can|could(?! not)|may|might)\b[^\n]*", re.IGNORECASE
)

_HANDLED = _either(
    r"(?<![-/_.])(?<!by )\b(?:skipping(?! tactic[^\0]{0,600}find any impl)|(?:reduc|halv|decreas|lower|recover"
    r"|offload|ignor|continu|retry)ing|falling back|fell back|will retry|attempting to (?:free|copy)|switching to"
    r"|trying again|will [^.\n]{1,40} instead)\b",
)
"""Words of a program that handled the error and went on."""

_LATER_STEP = _either(r"^(?![^\n]*\d%)[^\n]*\bloss\b(?: is|:|=) ?\d")
"""A step after the error: of a program that handled it, or of another rank. A bar of progress is printed last."""

_BROKEN = _either(
    "illegal (?:memory access|address)|IllegalAddress|device-side assert\\b|misaligned address|launch failure",
    "cuda error 1: invalid argument|cuda\\w+ fail\\w{0,3}[:,] unknown error",
)
"""Errors of the GPU after which calls fail for their own cause: no later allocation is refused for lack of memory."""

_RANK_FAILED = _either(r"\A\[rank\d{1,5}\]: |closing signal SIG|first observed failure|Killing subprocess")
"""The rank of an error that no program handled, and launchers that end the other ranks."""

_NOT_CPU = re.compile("(?i)^(?!.*cpu)")

_ERROR = re.compile(r"^.*?(?:Error|Exception)\b(?:: Engine core)?", re.MULTILINE)
_LAUNCHER_ERROR = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessRaisedException|Engine core|failed \(exitcode: \d+\)"
)
_LAUNCHER_END = re.compile("exits with return code|first observed failure|non-zero exit status|Killing subprocess")
_KILLED = re.compile(r"(?:exitcode *: *|return code = |status )-\d|\bSIGKILL\b")


def _from_last_report(text: str, gpu: re.Pattern[str] = _GPU, *, is_any_level: bool = False) -> str:
    """Return the text from the last line that reports exhausted memory of what `gpu` names; empty if there is none."""
    lines = re.split(r"\n|\\n", text)
    that_count = [(number, line) for number, line in enumerate(lines) if is_any_level or not _INFORMATION.search(line)]
    is_gpu_named = any(gpu.search(line) for _, line in that_count)
    for number, line in reversed(that_count):
        # A line that names neither a GPU nor the host is about the GPU if the rest of the text is.
        is_gpu = gpu.search(line) or ("cpu" not in line.lower() and is_gpu_named)
        if is_gpu and _EXHAUSTED.search(line) and not _NOT_GPU.search(line):
            return "\n".join(lines[number:])
    return ""


def _unhandled(text: str, *, is_any_level: bool = False) -> str:
    """Return the text from its last report of exhausted GPU memory; empty if the program handled that."""
    report = _from_last_report(text, is_any_level=is_any_level)
    return "" if _HANDLED.search(_ADVICE.sub("", report)) else report


def reports_gpu_out_of_memory(log_end: str) -> bool:
    """Return whether a log ends with a report of exhausted GPU memory that the program did not handle."""
    text = _NO_FAILURE.sub("", log_end).replace("\\n", "\n")
    report = _unhandled(text)
    if not report or _BROKEN.search(text.removesuffix(report)):
        return False
    return not _LATER_STEP.search(report) or bool(_RANK_FAILED.search(report))


def names_no_cause(log_end: str) -> bool:
    """Return whether the end of a log leaves open why the program failed.

    It is empty, holds only a launcher's report that its process failed, an error that exhausted GPU memory may have
    caused, or a report of exhausted GPU memory that the program may have handled. Launchers (torchrun, accelerate,
    DeepSpeed) print so much after the error of the program that the kubelet cuts it off. A report that the process was
    killed by a signal is a cause.
    """
    if _KILLED.search(log_end):
        return False
    text = _NO_FAILURE.sub("", log_end)
    if not reports_gpu_out_of_memory(log_end) and _unhandled(text, is_any_level=True):
        return True
    text = "\n".join(line for line in text.split("\n") if not _INFORMATION.search(line))
    if _UNCLEAR.search(text) or (not _from_last_report(text) and _from_last_report(text, _NOT_CPU)):
        return True
    errors = [match.group() for match in _ERROR.finditer(log_end)]
    return all(map(_LAUNCHER_ERROR.search, errors)) if errors else _LAUNCHER_END.search(log_end) is not None
