"""Decides whether a failure was caused by a lack of memory. Imports no torch.

There are four answers (``ErrorKind``). An OOM is certain. A suspect is an OOM if another sign of a
shortage corroborates it. A poisoned process cannot go on. Everything else is an error. An
exception's type counts before structured signals, and those before text. ``signatures.py`` has the
patterns of the text.

Text counts only in exceptions of a type that allocators and libraries raise: ``RuntimeError``,
``MemoryError``, ``OSError``, their subclasses, and types that quote another process. No allocator
raises ``ValueError("CUDA out of memory")``, so that is the user's own error. A script that turns an
OOM into such an error chains the OOM to it. An OOM that only ``__context__`` links to the failure
counts if ``handled.because`` finds evidence that it is the reason.

``MemoryError`` is certain if C code raised it or if it has no message. If a ``raise`` statement
raised it with a message, it is a suspect: the script may have its own limit.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autofit import host
from autofit.worker.oom import handled
from autofit.worker.oom.signatures import FOLLOWERS, SIGNATURES, TRAPS, ErrorKind, Signature

__all__ = [
    "Diagnosis",
    "ErrorKind",
    "classify",
    "classify_exit",
    "classify_retries",
    "classify_text",
    "oom_kills",
    "pressed",
]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The kind of a failure, and the signature that decided it."""

    kind: ErrorKind
    signature: str = ""
    """Name of what matched, for reports; empty if nothing matched."""
    requested: int | None = None
    """Bytes that the failed allocation requested, if the message states them."""
    message: str = ""
    """First line of what matched."""

    @property
    def follows(self) -> bool:
        """Whether it only reports that another rank failed."""
        return self.signature == FOLLOWERS[0].name

    def corroborated(self) -> Diagnosis:
        """Return this diagnosis, but an OOM if it is a suspect."""
        return replace(self, kind=ErrorKind.OOM) if self.kind is ErrorKind.SUSPECT else self


NOTHING = Diagnosis(ErrorKind.NOT_OOM)

_MEMORY_ERROR = "builtins.MemoryError"
_OOM_TYPES = frozenset({"torch.OutOfMemoryError", "ray.exceptions.OutOfMemoryError"})
_TYPES_WITH_TEXT = frozenset(
    {
        "builtins.RuntimeError",
        "builtins.OSError",
        "torch.multiprocessing.spawn.ProcessException",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
        "ray.exceptions.RayError",
    }
)
_COMPILERS = ("torch._dynamo.", "torch._inductor.")
_OF_THE_USER = (KeyboardInterrupt, GeneratorExit)
_SEVERITY = (ErrorKind.POISONED, ErrorKind.OOM, ErrorKind.SUSPECT)


# --- exceptions -------------------------------------------------------------------------------


def classify(error: BaseException, *, corroborated: bool = False) -> Diagnosis:
    """Return the diagnosis of ``error``, from its causes, its context and its group.

    ``corroborated``: memory did run short (``Meter.short``), so a suspect counts as an OOM. A
    poisoned exception anywhere in the chain decides, because the process cannot go on.
    """
    if isinstance(error, _OF_THE_USER):
        return NOTHING
    found = [diagnosis for each in _chain(error) if (diagnosis := _counted(each)) is not None]
    chosen = _worst(found)
    return chosen.corroborated() if corroborated else chosen


@dataclass(frozen=True, slots=True)
class _Linked:
    """An exception in the chain of another."""

    error: BaseException
    compiling: bool = False
    """A compiler raised an exception in between.

    A compiler's autotuning may run out of memory although training would not.
    """
    contexts: tuple[tuple[BaseException, BaseException], ...] = ()
    """The links that are only a ``__context__``: pairs of an error and the one handled then."""


def _counted(each: _Linked) -> Diagnosis | None:
    """Return the diagnosis of one exception; ``None`` if it is not why the outermost was raised."""
    found = _classify_one(each.error, each.compiling)
    if found.kind in (ErrorKind.OOM, ErrorKind.SUSPECT):
        return found if all(itertools.starmap(handled.because, each.contexts)) else None
    return found


def _chain(error: BaseException) -> Iterator[_Linked]:
    """Yield ``error`` and all exceptions chained to it, outermost first, each once."""
    waiting = [_Linked(error)]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if id(current.error) in seen:
            continue
        seen.add(id(current.error))
        compiler = type(current.error).__module__.startswith(_COMPILERS)
        current = replace(current, compiling=current.compiling or compiler)
        yield current
        waiting += _behind(current)


def _behind(current: _Linked) -> Iterator[_Linked]:
    """Yield the exceptions that ``current`` links to directly."""
    error = current.error
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for candidate in (error.__cause__, getattr(error, "cause", None), *group):  # Ray has ``cause``
        if isinstance(candidate, BaseException):
            yield replace(current, error=candidate)
    context = error.__context__
    if context is not None and not error.__suppress_context__:
        yield replace(current, error=context, contexts=(*current.contexts, (error, context)))


def _classify_one(error: BaseException, compiling: bool) -> Diagnosis:
    """Return the diagnosis of this exception alone, without its chain."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    of_memory = names & {*_OOM_TYPES, _MEMORY_ERROR}
    if not of_memory and not names & _TYPES_WITH_TEXT:
        return NOTHING
    text = handled.formatted(error)
    if _match(TRAPS, text):
        return NOTHING
    prefix, _, message = text.partition(": ")
    found = _search(text)
    found = replace(found, message=found.message.removeprefix(f"{prefix}: "))
    if of_memory and found.kind is not ErrorKind.OOM:
        certain = names & _OOM_TYPES or handled.raised_in_python(error) is False
        kind = ErrorKind.OOM if certain else ErrorKind.SUSPECT
        found = Diagnosis(kind, min(of_memory), _requested(message), _line(message))
    elif isinstance(error, OSError) and error.errno == errno.ENOMEM:
        found = Diagnosis(ErrorKind.OOM, "operating system", None, _line(message))
    if compiling and found.kind is ErrorKind.OOM:
        return replace(
            found, kind=ErrorKind.SUSPECT, signature=f"{found.signature}, while compiling"
        )
    return found


# --- text -------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"(?:[Tt]ried to allocate|Unable to allocate|Failed to CUDA calloc) "
    r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>bytes|B|[KMGTP]i?B)\b"
)
_ORDINARY = "|".join(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type)
    and issubclass(value, BaseException)
    and not issubclass(value, RuntimeError | MemoryError | OSError)
)
_ORDINARY_LINE = re.compile(rf"(?:^|: )(?:{_ORDINARY}): ")


_PREFIX = re.compile(r"^(?:\[\w*\d\]: ?|\(\w+ pid=[^)]*\) )")
"""The prefix that torch or Ray puts before each line of a rank or a task."""
_HEADER = re.compile(r"^(?:\w+ )?Traceback \(most recent call last\):$")
_FRAME = re.compile(r"^(?:\s|$)")
_IGNORED = re.compile(r"^Exception ignored\b")
_CAUSE = "The above exception was the direct cause of the following exception:"


def classify_text(text: str) -> Diagnosis:
    """Return the diagnosis of a *failed* process from its last output, such as standard error.

    The last traceback decides, together with the exceptions that it was raised from. The script
    has handled earlier exceptions. If the last exception only reports another rank's end, the one
    before it decides. Without a traceback, every line counts. Lines of an exception that no
    allocator raises (``ValueError: ...``) do not count.

    >>> found = classify_text("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    >>> str(found.kind), found.requested
    ('oom', 2147483648)
    """
    return _search(text)


def _search(text: str) -> Diagnosis:
    lines = _deciding([_PREFIX.sub("", line) for line in text.splitlines()])
    for signature in (*SIGNATURES, *FOLLOWERS):
        for line in lines:
            if signature.pattern.search(line):
                requested = _requested("\n".join(lines))
                return Diagnosis(signature.kind, signature.name, requested, line.strip())
    return NOTHING


def _deciding(lines: Sequence[str]) -> list[str]:
    """Return the lines that may state why a process failed."""
    exceptions = _exceptions(lines)
    if not exceptions:
        return _informative(lines)
    first = len(exceptions) - 1
    while first > 0 and _follows("\n".join(exceptions[first])):
        first -= 1
    while first > 0 and _CAUSE in exceptions[first - 1]:
        first -= 1
    return _informative(itertools.chain.from_iterable(exceptions[first:]))


def _exceptions(lines: Sequence[str]) -> list[list[str]]:
    """Return the exceptions of all tracebacks, each with the lines up to the next traceback."""
    found: list[list[str]] = []
    frames, before = False, ""
    for line in lines:
        if _HEADER.search(line) and not _IGNORED.search(before):
            found.append([])
            frames = True
        elif found and not (frames and _FRAME.search(line)):
            frames = False
            found[-1].append(line)
        before = line
    return found


def _follows(text: str) -> bool:
    return _match(FOLLOWERS, text) and not _match(SIGNATURES, text)


def _informative(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not _ORDINARY_LINE.search(line) and not _match(TRAPS, line)]


def _match(rows: Iterable[Signature], text: str) -> bool:
    return any(row.pattern.search(text) for row in rows)


def _requested(text: str) -> int | None:
    """Return the bytes that the failed allocation requested; units are powers of 1024."""
    match = _NUMBER.search(text)
    if match is None:
        return None
    power = 0 if match["unit"] in ("bytes", "B") else "KMGTP".index(match["unit"][0]) + 1
    return int(float(match["number"]) * 1024**power)


def _line(text: str) -> str:
    return text.strip().partition("\n")[0]


# --- processes --------------------------------------------------------------------------------


def classify_exit(returncode: int, output: str = "", *, oom_kills: int = 0) -> Diagnosis:
    """Return why a process ended, from what its parent can see.

    ``returncode``: of ``subprocess`` (negative for a signal) or of a shell (137). ``output``: the
    last lines. ``oom_kills``: by how much ``oom_kills()`` grew while the process ran.
    The signal, the kernel's count and a suspect's text are three signs: two make an OOM, one makes
    a suspect.
    """
    if returncode == 0:  # a good run may print "DataLoader worker is killed" at its end
        return NOTHING
    found = classify_text(output)
    killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if found.kind is not ErrorKind.NOT_OOM:
        return found.corroborated() if killed or oom_kills > 0 else found
    if killed and oom_kills > 0:
        return Diagnosis(
            ErrorKind.OOM, "killed by the kernel", None, "killed by the kernel for lack of memory"
        )
    if killed:
        return Diagnosis(ErrorKind.SUSPECT, "signal 9", None, "killed by signal 9 (SIGKILL)")
    if oom_kills > 0:
        return Diagnosis(
            ErrorKind.SUSPECT, "oom_kill", None, "the kernel killed a process of its group"
        )
    return found


def oom_kills() -> int:
    """Return how many processes of our control group the OOM killer has ended since its creation.

    0 if the count cannot be read.
    """
    for folder in host.cgroup_folders()[:1]:
        for name in ("memory.events", "memory.oom_control"):
            count = host.cgroup_number(folder / name, "oom_kill")
            if count is not None:
                return count
    return 0


def pressed(emptied: Iterable[bool]) -> bool:
    """Return whether the allocator emptied its cache in two consecutive steps.

    ``emptied``: whether the allocator emptied its cache in each step.
    """
    return any(one and two for one, two in itertools.pairwise(emptied))


def classify_retries(retries: Sequence[int]) -> Diagnosis:
    """Return a suspect if the allocator emptied its cache in two consecutive steps.

    ``retries``: ``Meter.retries()`` after each step, oldest first.
    """
    if pressed(later > earlier for earlier, later in itertools.pairwise(retries)):
        return Diagnosis(
            ErrorKind.SUSPECT, "allocator retries", None, "the allocator keeps retrying"
        )
    return NOTHING


def _worst(found: Sequence[Diagnosis]) -> Diagnosis:
    """Return the first diagnosis of the gravest kind; one with a signature before one without."""
    for kind in _SEVERITY:
        for diagnosis in found:
            if diagnosis.kind is kind:
                return diagnosis
    return next((diagnosis for diagnosis in found if diagnosis.signature), NOTHING)
