"""The classifier: a case for every line of the collected signatures, and real failures."""

from __future__ import annotations

import asyncio
import errno
import importlib
import itertools
import linecache
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.worker import meter
from autofit.worker.oom.classifier import (
    Diagnosis,
    ErrorKind,
    classify,
    classify_exit,
    classify_retries,
    classify_text,
    oom_kills,
)
from autofit.worker.oom.handled import formatted
from autofit.worker.oom.signatures import FOLLOWERS, SIGNATURES, TRAPS

pytestmark = pytest.mark.quick

_NUMBERS = itertools.count()

CERTAIN = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.02 GiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCCachingHostAllocator.cpp",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA driver error: out of memory",
    "Allocation on device 0 would exceed allowed memory. (out of memory)",
    "cudaErrorMemoryAllocation: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Error out of memory at line 380 in file /src/csrc/ops.cu",
    "HIP out of memory. Tried to allocate 256.00 MiB.",
    "XPU out of memory. Tried to allocate 20.00 MiB (GPU  0; 15.91 GiB total capacity)",
    "NPU out of memory. Tried to allocate 1.50 GiB (NPU 0; 60.97 GiB total capacity)",
    "MPS backend out of memory (MPS allocated: 5.05 GB, max allowed: 9.07 GB).",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::402653184 (384)MB",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    "level_zero error: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 400000000 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 4194304 bytes.",
    "std::bad_alloc",
    "unable to mmap 1024 bytes from file </torch_71>: Cannot allocate memory (12)",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: insufficient resources when calling `cusparseSpMM( handle, opA, opB, alpha)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
    "NCCL error in: ProcessGroupNCCL.cpp:1269, ncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:\nCuda failure 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc 10485760 bytes",
]

SUSPECT = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, '
    "please report a bug to PyTorch.",
    '!handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":387',
    "CUDA driver error: device not ready",
    "Invalid buffer size: 16.00 GB",
    "NCCL error, unhandled cuda error: ncclUnhandledCudaError: Call to CUDA function failed.",
    "could not create a primitive descriptor for the matmul primitive",
    "DataLoader worker (pid 4711) is killed by signal: Killed. ",
    "DataLoader worker (pid(s) 4711, 4712) is killed by signal: Killed. ",
    "DataLoader worker (pid(s) 4711) exited unexpectedly",
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
]

SUSPECT_PROCESS = [
    "12345.batch  OUT_OF_MEMORY  0:125",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=12345.batch.",
    "Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
    "(1) the process is killed by SIGKILL by OOM killer due to high memory usage.",
    "MemoryError: my own cache",
    *SUSPECT,
]

POISONED = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa)`",
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true",
    "nonzero is not supported for tensors with more than INT_MAX elements, file a support request",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable ECC error encountered",
]

SHOWN = [
    "torch.OutOfMemoryError: no words of an allocator",
    "[rank1]: torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "MemoryError",
]
"""What Python prints of exceptions whose type says it."""

TRAP = [
    "bloom",
    "no room in the mushroom for a zoom",
    "oom",
    "CUDA error: invalid device ordinal",
    "cuda error",
    "CUDA out of memory. Tried to allocate more than 1EB memory.",
    "we are out of memory lanes",
    "Out of memory, please buy more",
    "MY_CUDA_ERROR_OUT_OF_MEMORY_HANDLER is not set",
    "DataLoader worker (pid 4711) is killed by signal: Terminated. ",
    "",
]


# --- every line, as an exception and as the words of a process --------------------------------


@pytest.mark.parametrize("text", CERTAIN)
def test_certain(text: str) -> None:
    assert classify(RuntimeError(text)).kind is ErrorKind.OOM
    assert classify_text(f"Traceback ...\nRuntimeError: {text}\n").kind is ErrorKind.OOM
    assert classify_exit(1, f"RuntimeError: {text}\n").kind is ErrorKind.OOM


@pytest.mark.parametrize("text", SUSPECT)
def test_a_suspect_needs_corroboration(text: str) -> None:
    assert classify(RuntimeError(text)).kind is ErrorKind.SUSPECT
    assert classify(RuntimeError(text), corroborated=True).kind is ErrorKind.OOM


@pytest.mark.parametrize("text", SUSPECT_PROCESS)
def test_a_process_that_says_something_suspect(text: str) -> None:
    assert classify_exit(1, text).kind is ErrorKind.SUSPECT
    assert classify_exit(1, text, oom_kills=1).kind is ErrorKind.OOM
    assert classify_exit(137, text).kind is ErrorKind.OOM
    assert classify_exit(0, text).kind is ErrorKind.NOT_OOM  # noise at the end of a good run


@pytest.mark.parametrize("text", POISONED)
def test_poisoned(text: str) -> None:
    assert classify(RuntimeError(text), corroborated=True).kind is ErrorKind.POISONED
    assert classify_exit(1, text, oom_kills=1).kind is ErrorKind.POISONED


@pytest.mark.parametrize("text", SHOWN)
def test_the_type_in_another_processs_words(text: str) -> None:
    assert (
        classify_text(f"Traceback (most recent call last):\n  File\n{text}\n").kind is ErrorKind.OOM
    )


def test_a_type_that_is_only_named() -> None:
    for text in ("see torch.OutOfMemoryError for more", "a MemoryError is no reason to panic"):
        assert classify(RuntimeError(text)).kind is ErrorKind.NOT_OOM
        assert classify_text(text).kind is ErrorKind.NOT_OOM


@pytest.mark.parametrize("text", TRAP)
def test_a_trap(text: str) -> None:
    assert classify(RuntimeError(text), corroborated=True) == Diagnosis(ErrorKind.NOT_OOM)
    assert classify_text(text).kind is ErrorKind.NOT_OOM


def test_every_row_of_the_table_has_a_case() -> None:
    cases = [*CERTAIN, *SUSPECT_PROCESS, *POISONED, *TRAP, *SHOWN, WATCHDOG]
    rows = (*SIGNATURES, *TRAPS, *FOLLOWERS)
    assert [row.name for row in rows if not any(map(row.pattern.search, cases))] == []


# --- types ------------------------------------------------------------------------------------


def _torch_oom(text: str) -> BaseException:
    error: BaseException = importlib.import_module("torch").OutOfMemoryError(text)
    return error


def _ray_oom(text: str) -> BaseException:
    error: BaseException = importlib.import_module("ray.exceptions").OutOfMemoryError(text)
    return error


@pytest.mark.parametrize("make", [_torch_oom, _ray_oom])
def test_the_type_is_enough(make: Callable[[str], BaseException]) -> None:
    assert classify(make("whatever it says")).kind is ErrorKind.OOM
    assert classify(make("")).kind is ErrorKind.OOM


def test_a_memory_error_in_the_scripts_own_words_is_a_suspect() -> None:
    class Full(MemoryError):
        pass

    for error in (MemoryError("my own cache"), Full("my own cache"), Full()):
        raised = _caught("raise error", error=error)
        assert classify(raised).kind is ErrorKind.SUSPECT
        assert classify(raised, corroborated=True).kind is ErrorKind.OOM
    for wordless in (MemoryError(), _caught("raise MemoryError")):
        assert classify(wordless).kind is ErrorKind.OOM
    said = _caught("raise MemoryError('Unable to allocate 7.45 GiB for an array')")
    assert classify(said).kind is ErrorKind.OOM
    future = asyncio.Future[None](loop=asyncio.new_event_loop())  # C code that raises what it has
    future.set_exception(MemoryError("malloc of size 64 failed"))
    assert classify(_caught("future.result()", future=future)).kind is ErrorKind.OOM
    future.get_loop().close()


def test_a_size_that_cannot_be_meant_is_a_trap_although_the_type_is_right() -> None:
    error = _torch_oom("CUDA out of memory. Tried to allocate more than 1EB memory.")
    assert classify(error).kind is ErrorKind.NOT_OOM


def test_a_system_call_without_memory() -> None:
    assert classify(OSError(errno.ENOMEM, "Cannot allocate memory")).kind is ErrorKind.OOM
    assert classify(OSError(errno.ENOENT, "No such file")).kind is ErrorKind.NOT_OOM


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AssertionError, Exception])
def test_no_allocator_raises_such_a_type(kind: type[Exception]) -> None:
    assert (
        classify(kind("CUDA out of memory. Tried to allocate 2.00 GiB")).kind is ErrorKind.NOT_OOM
    )
    said = classify_text(f"{kind.__name__}: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert said.kind is ErrorKind.NOT_OOM


def test_a_message_that_cannot_be_read_is_no_oom() -> None:
    class Broken(RuntimeError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert classify(Broken()).kind is ErrorKind.NOT_OOM


# --- chains -----------------------------------------------------------------------------------


def _caught(program: str, **names: object) -> BaseException:
    """What leaves a program, whose source can be read as that of a script can."""
    text = textwrap.dedent(program)
    name = f"<program {next(_NUMBERS)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    # Compiled first: exec of a string leaves CPython's mark of an unhandled KeyboardInterrupt set
    # although it is caught here, and the interpreter would end itself by SIGINT after all tests.
    code = compile(text, name, "exec")
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it is
        exec(code, names)
    return caught.value


def test_a_cause() -> None:
    error = _caught("raise ValueError('training failed') from MemoryError()")
    assert classify(error).kind is ErrorKind.OOM


HANDLED = """
def step(size):
    if size > 8:
        raise MemoryError("the allocator's words")
    raise ValueError("no such size")

class Writer:
    def __enter__(self): pass
    def __exit__(self, *failure): failed_clean_up

def report(error):
    raise ValueError(f"training failed: {error}")

def train():
    try:
        step(16)
    except MemoryError as error:
        {}

{}
"""


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        # Raised because of it: a wrapper that does without ``from``.
        ('raise ValueError("bad batch")', ErrorKind.SUSPECT),
        ('raise RuntimeError("step 3 failed")', ErrorKind.SUSPECT),
        ('raise ValueError("lost").with_traceback(error.__traceback__)', ErrorKind.SUSPECT),
        ("report(error)", ErrorKind.SUSPECT),
        ("raise KeyError(str(error))", ErrorKind.SUSPECT),
        ("raise SystemExit(1)", ErrorKind.SUSPECT),
        ("import sys; sys.exit('no memory')", ErrorKind.SUSPECT),
        # Another failure, after the script had dealt with it.
        ("undefined", ErrorKind.NOT_OOM),
        ("{}['batch']", ErrorKind.NOT_OOM),
        ("raise TypeError('a bug')", ErrorKind.NOT_OOM),
        ("step(4)", ErrorKind.NOT_OOM),
        ("int('eight')", ErrorKind.NOT_OOM),
        ("import torch; torch.ones(2, 3) @ torch.ones(2, 3)", ErrorKind.NOT_OOM),
        ("raise ValueError('bad batch') from None", ErrorKind.NOT_OOM),
        ("raise ValueError('bad batch') from KeyError()", ErrorKind.NOT_OOM),
        ("raise SystemExit(0)", ErrorKind.NOT_OOM),
        ("raise KeyboardInterrupt", ErrorKind.NOT_OOM),
    ],
)
def test_an_error_while_an_oom_is_handled(handler: str, kind: ErrorKind) -> None:
    program = HANDLED.replace("{}\n\n{}", handler + "\n\ntrain()")
    assert classify(_caught(program)).kind is kind
    certain = program.replace('MemoryError("the allocator\'s words")', "MemoryError")
    if "error" not in handler:  # what quotes it needs something to quote
        expected = ErrorKind.OOM if kind is ErrorKind.SUSPECT else kind
        assert classify(_caught(certain)).kind is expected


@pytest.mark.parametrize(
    "program",
    [
        "try:\n    step(16)\nfinally:\n    failed_clean_up",
        "with Writer():\n    step(16)",
        "try:\n    step(16)\nexcept KeyError:\n    pass\nfinally:\n    {}[0]",
    ],
)
def test_a_clean_up_that_fails_hides_no_oom(program: str) -> None:
    """Nobody had handled it: it would have ended the script."""
    defined = HANDLED.replace("{}\n\n{}", "pass\n\n").replace("{failure}", "") + program
    assert classify(_caught(defined)).kind is ErrorKind.SUSPECT


def test_an_error_whose_source_cannot_be_read() -> None:
    """It is taken for one that was raised in an ``except`` block."""
    code = "try:\n    raise MemoryError\nfinally:\n    {}"
    for end, kind in (("raise ValueError", ErrorKind.OOM), ("undefined", ErrorKind.NOT_OOM)):
        with pytest.raises((ValueError, NameError)) as caught:
            exec(compile(code.format(end), "<nowhere>", "exec"), {})
        assert classify(caught.value).kind is kind


def test_a_poisoned_context_counts_though_the_error_is_another() -> None:
    error = _caught("""
    try:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    except RuntimeError:
        undefined
    """)
    assert classify(error).kind is ErrorKind.POISONED


def test_a_group() -> None:
    group = ExceptionGroup("ranks", [KeyError("x"), ExceptionGroup("more", [MemoryError()])])
    assert classify(group).kind is ErrorKind.OOM
    assert classify(ExceptionGroup("CUDA out of memory", [KeyError("x")])).kind is ErrorKind.NOT_OOM


def test_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first).kind is ErrorKind.NOT_OOM


def test_poison_counts_most() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    error.__context__ = MemoryError()
    assert classify(error).kind is ErrorKind.POISONED


def test_rays_cause() -> None:
    exceptions = importlib.import_module("ray.exceptions")
    task_error = exceptions.RayTaskError("train", "Traceback ...", MemoryError())
    assert classify(task_error).kind is ErrorKind.OOM
    assert classify(task_error.as_instanceof_cause()).kind is ErrorKind.OOM
    other = exceptions.RayTaskError("train", "Traceback ...", KeyError("x"))
    assert classify(other.as_instanceof_cause()).kind is ErrorKind.NOT_OOM


def test_rays_report_of_a_killed_worker() -> None:
    exceptions = importlib.import_module("ray.exceptions")
    error = exceptions.RayError("(1) The process is killed by SIGKILL by OOM killer, (2) or not.")
    assert classify(error).kind is ErrorKind.SUSPECT


def test_an_oom_while_compiling_is_a_suspect() -> None:
    exc = importlib.import_module("torch._dynamo.exc")
    inner = _torch_oom("CUDA out of memory. Tried to allocate 2.00 GiB")
    wrapped = exc.BackendCompilerFailed(lambda: None, inner, None)
    assert classify(wrapped).kind is ErrorKind.SUSPECT
    chained = exc.TorchRuntimeError("failed running call_function")
    chained.__cause__ = inner
    assert classify(chained).kind is ErrorKind.SUSPECT
    assert classify(chained, corroborated=True).kind is ErrorKind.OOM
    inner.__context__ = exc.Unsupported("graph break")  # but a compile error behind it is nothing
    assert classify(inner).kind is ErrorKind.OOM


def test_a_process_that_quotes_anothers_traceback() -> None:
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    for line, kind in [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", ErrorKind.OOM),
        ("ValueError: CUDA out of memory", ErrorKind.NOT_OOM),
    ]:
        message = f"\n\n-- Process 0 terminated with the following error:\nTraceback ...\n{line}"
        assert classify(spawn.ProcessRaisedException(message, 0, 1)).kind is kind


OOM_LINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    f()\n'
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA out of memory. retrying\n" + TRACEBACK + "KeyError: 'x'", ErrorKind.NOT_OOM),
        ("CUDA out of memory. retrying\n" + TRACEBACK + "my.Error: sorry", ErrorKind.NOT_OOM),
        (TRACEBACK + OOM_LINE + DURING + TRACEBACK + "RuntimeError: shapes", ErrorKind.NOT_OOM),
        (TRACEBACK + OOM_LINE + "\nretrying\n" + TRACEBACK + "OSError: full", ErrorKind.NOT_OOM),
        (TRACEBACK + 'RuntimeError: shapes\n    raise E("CUDA out of memory")', ErrorKind.OOM),
        (TRACEBACK.replace("f()", "raise E('std::bad_alloc')") + "E: x", ErrorKind.NOT_OOM),
        (TRACEBACK + OOM_LINE + CAUSE + TRACEBACK + "ValueError: training failed", ErrorKind.OOM),
        (TRACEBACK + "KeyError: 'x'" + DURING + TRACEBACK + OOM_LINE, ErrorKind.OOM),
        (
            TRACEBACK + OOM_LINE + "\nException ignored in: <f>\n" + TRACEBACK + "KeyError: 1",
            ErrorKind.OOM,
        ),
        (TRACEBACK + OOM_LINE + "\n" + TRACEBACK + "RuntimeError: NCCL error: x", ErrorKind.OOM),
        (TRACEBACK + "KeyError: 1\nterminate called after std::bad_alloc", ErrorKind.OOM),
    ],
)
def test_the_last_exception_of_a_text_decides(text: str, kind: ErrorKind) -> None:
    assert classify_text(text).kind is kind
    ranked = "".join(f"[rank0]: {line}\n" for line in text.splitlines())
    assert classify_text(ranked).kind is kind
    assert classify_exit(1, text).kind is kind


# --- sizes and messages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", 2 << 30),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0;", 20 << 20),
        ("CUDA out of memory. Tried to allocate 512 bytes", 512),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes.", 123),
        ("MPS backend out of memory. Tried to allocate 1.00 GB on private pool.", 1 << 30),
        ("Failed to CUDA calloc 10485760 bytes", 10485760),
        ("std::bad_alloc", None),
    ],
)
def test_the_size_asked_for(text: str, requested: int | None) -> None:
    assert classify(RuntimeError(text)).requested == requested


def test_the_message_is_one_line_without_its_type() -> None:
    found = classify(_torch_oom("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee docs"))
    assert found.message == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert found.signature == "CUDA allocator"


# --- processes, steps and ranks ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("returncode", "kills", "kind"),
    [
        (-9, 0, ErrorKind.SUSPECT),
        (137, 0, ErrorKind.SUSPECT),
        (-9, 1, ErrorKind.OOM),
        (137, 2, ErrorKind.OOM),
        (1, 1, ErrorKind.SUSPECT),
        (0, 1, ErrorKind.NOT_OOM),
        (1, 0, ErrorKind.NOT_OOM),
        (-11, 0, ErrorKind.NOT_OOM),
    ],
)
def test_an_exit_without_a_word(returncode: int, kills: int, kind: ErrorKind) -> None:
    assert classify_exit(returncode, oom_kills=kills).kind is kind


def test_the_kernels_count_can_be_read() -> None:
    assert oom_kills() >= 0


def test_thrash_is_two_steps_in_a_row() -> None:
    assert classify_retries([0, 1, 2]).kind is ErrorKind.SUSPECT
    assert classify_retries([5, 5, 6, 7, 7]).kind is ErrorKind.SUSPECT
    assert classify_retries([0, 1, 1, 2]).kind is ErrorKind.NOT_OOM
    assert classify_retries([]).kind is ErrorKind.NOT_OOM


WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12) ran for 600s"


def test_a_rank_that_noticed_the_end_of_another_follows() -> None:
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    child = errors.ChildFailedError("train.py", {0: errors.ProcessFailure(0, 1, 1, "")})
    assert classify_text(WATCHDOG).follows
    assert classify(child).follows
    assert not classify(MemoryError()).follows
    assert not classify(KeyError("x")).follows


# --- real failures ----------------------------------------------------------------------------


def _fail(body: str, tmp_path: Path, cap: int | None = None) -> list[str]:
    """Run ``body`` in a process of its own and return what the classifier says of its error."""
    script = tmp_path / "fails.py"
    script.write_text(
        "from autofit.worker.oom.classifier import classify, ErrorKind\n"
        "try:\n"
        f"{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "except BaseException as error:\n"
        "    found = classify(error)\n"
        "    print(type(error).__name__, found.kind, found.requested, sep='|')\n"
    )
    environment = os.environ | (meter.environment("cpu", cap) if cap else {})
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_torchs_cpu_allocator_under_the_cap(tmp_path: Path) -> None:
    body = "import torch; torch.empty(25_000_000)"
    assert _fail(body, tmp_path, cap=50 << 20) == ["RuntimeError", "oom", "100000000"]


def test_torchs_cpu_allocator_without_any_cap(tmp_path: Path) -> None:
    body = "import torch; torch.empty(1 << 48)"
    assert _fail(body, tmp_path) == ["RuntimeError", "oom", str(4 << 48)]


def test_a_real_memory_error(tmp_path: Path) -> None:
    body = "bytearray(1 << 60)"
    assert _fail(body, tmp_path) == ["MemoryError", "oom", "None"]


def test_a_real_memory_error_of_numpys(tmp_path: Path) -> None:
    body = "import numpy; numpy.empty(1 << 47, dtype=numpy.int64)"
    assert _fail(body, tmp_path) == ["MemoryError", "oom", str(1 << 50)]


def test_a_real_bad_alloc_in_torch(tmp_path: Path) -> None:
    body = """
    import resource, torch
    row = torch.zeros(1).expand(1 << 31)
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, -1))
    row.unbind()  # a vector of 2^31 tensors
    """
    assert _fail(body, tmp_path) == ["RuntimeError", "oom", "None"]


def test_an_uncaught_bad_alloc_kills_the_process() -> None:
    output = "terminate called after throwing an instance of 'std::bad_alloc'\n  what(): x\n"
    assert classify_exit(-6, output).kind is ErrorKind.OOM


def test_the_line_of_a_syntax_error_begins_with_its_message() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("print((1", "train.py", "exec")
    assert formatted(caught.value) == "SyntaxError: '(' was never closed (train.py, line 1)"
    assert formatted(ValueError("two\nlines")) == "ValueError: two\nlines"
