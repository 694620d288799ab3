"""Tells a failure for want of memory from all others. Imports no torch.

Four answers (``Kind``): out of memory, suspect (memory if something corroborates it), poisoned
(only a fresh process can go on) and anything else. The type of an exception counts before
structured signals, those before text; the words are in ``oom_table.py``.

Text counts only in an exception whose type an allocator, or a library that passes an allocator's
words on, really raises: ``RuntimeError``, ``MemoryError``, ``OSError`` and their subclasses, and
those that quote another process. ``ValueError("CUDA out of memory")`` is the user's own: no
allocator raises it, and a script that turns an OOM into one chains the OOM by itself. An OOM that
only ``__context__`` links counts where ``handled.because`` has evidence that it is the reason.

``MemoryError`` is certain where C code raised it, or without words. With words of its own, raised
by a ``raise`` statement, it is a suspect: a script's cache may be full where memory is not.
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
from autofit.worker.oom.signatures import FOLLOWERS, SIGNATURES, TRAPS, Kind, Signature

__all__ = [
    "Diagnosis",
    "Kind",
    "classify",
    "classify_exit",
    "classify_retries",
    "classify_text",
    "first_cause",
    "oom_kills",
    "pressed",
]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a failure is, and by what it was told."""

    kind: Kind
    signature: str = ""
    """What matched, as a report names it; empty when nothing did."""
    requested: int | None = None
    """Bytes asked for by the allocation that failed, where the message says so."""
    message: str = ""
    """First line of what matched."""

    @property
    def follows(self) -> bool:
        """Whether it only says that another rank failed."""
        return self.signature == FOLLOWERS[0].name

    def corroborated(self) -> Diagnosis:
        """Return it with a suspect taken for an OOM."""
        return replace(self, kind=Kind.OOM) if self.kind is Kind.SUSPECT else self


NOTHING = Diagnosis(Kind.NOT_OOM)

_MEMORY_ERROR = "builtins.MemoryError"
_OOM_TYPES = frozenset({"torch.OutOfMemoryError", "ray.exceptions.OutOfMemoryError"})
_SPEAKING_TYPES = frozenset(
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
_SEVERITY = (Kind.POISONED, Kind.OOM, Kind.SUSPECT)


# --- exceptions -------------------------------------------------------------------------------


def classify(error: BaseException, *, corroborated: bool = False) -> Diagnosis:
    """Return what ``error`` is, looking through its causes, its context and its group.

    ``corroborated`` says that memory did run short (``Meter.short``): a suspect is then an OOM.
    Poison anywhere in the chain counts most, because it decides whether the process can go on.
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
    """A compiler stands between: trial compilations may run out where the training would not."""
    contexts: tuple[tuple[BaseException, BaseException], ...] = ()
    """The links between that are no more than a ``__context__``: an error, what it followed."""


def _counted(each: _Linked) -> Diagnosis | None:
    """Return what an exception of a chain is; ``None`` where the outermost has another reason."""
    found = _classify_one(each.error, each.compiling)
    if found.kind in (Kind.OOM, Kind.SUSPECT):
        return found if all(itertools.starmap(handled.because, each.contexts)) else None
    return found


def _chain(error: BaseException) -> Iterator[_Linked]:
    """Yield ``error`` and what is behind it, outermost first, each once."""
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
    """Yield the exceptions that one names as where it comes from."""
    error = current.error
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for candidate in (error.__cause__, getattr(error, "cause", None), *group):  # Ray has ``cause``
        if isinstance(candidate, BaseException):
            yield replace(current, error=candidate)
    context = error.__context__
    if context is not None and not error.__suppress_context__:
        yield replace(current, error=context, contexts=(*current.contexts, (error, context)))


def _classify_one(error: BaseException, compiling: bool) -> Diagnosis:
    """Return what this exception is, whatever is behind it."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    of_memory = names & {*_OOM_TYPES, _MEMORY_ERROR}
    if not of_memory and not names & _SPEAKING_TYPES:
        return NOTHING
    text = handled.formatted(error)
    if _match(TRAPS, text):
        return NOTHING
    prefix, _, message = text.partition(": ")
    found = _search(text)
    found = replace(found, message=found.message.removeprefix(f"{prefix}: "))
    if of_memory and found.kind is not Kind.OOM:
        certain = names & _OOM_TYPES or handled.raised_in_python(error) is False
        kind = Kind.OOM if certain else Kind.SUSPECT
        found = Diagnosis(kind, min(of_memory), _requested(message), _line(message))
    elif isinstance(error, OSError) and error.errno == errno.ENOMEM:
        found = Diagnosis(Kind.OOM, "operating system", None, _line(message))
    if compiling and found.kind is Kind.OOM:
        return replace(found, kind=Kind.SUSPECT, signature=f"{found.signature}, while compiling")
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
"""What torch or Ray puts before each line of a rank or a task."""
_HEADER = re.compile(r"^(?:\w+ )?Traceback \(most recent call last\):$")
_FRAME = re.compile(r"^(?:\s|$)")
_IGNORED = re.compile(r"^Exception ignored\b")
_CAUSE = "The above exception was the direct cause of the following exception:"


def classify_text(text: str) -> Diagnosis:
    """Return what the last words of a *failed* process say, such as its standard error.

    The last exception that a traceback shows decides, with what it was raised from: what was said
    before it had been dealt with. An exception that only tells of another rank's end leaves it to
    the one before. Without a traceback every line counts. Lines that show an exception no allocator
    raises (``ValueError: ...``) do not count.
    """
    return _search(text)


def _search(text: str) -> Diagnosis:
    lines = _deciding([_PREFIX.sub("", line) for line in text.splitlines()])
    for signature in (*SIGNATURES, *FOLLOWERS):
        for line in lines:
            if signature.pattern.search(line):
                asked = _requested("\n".join(lines))
                return Diagnosis(signature.kind, signature.name, asked, line.strip())
    return NOTHING


def _deciding(lines: Sequence[str]) -> list[str]:
    """Return the lines that may say why a process failed."""
    shown = _exceptions(lines)
    if not shown:
        return _informative(lines)
    first = len(shown) - 1
    while first > 0 and _follows("\n".join(shown[first])):
        first -= 1
    while first > 0 and _CAUSE in shown[first - 1]:
        first -= 1
    return _informative(itertools.chain.from_iterable(shown[first:]))


def _exceptions(lines: Sequence[str]) -> list[list[str]]:
    """Return the exceptions that tracebacks show, each with the lines up to the next traceback."""
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
    """Return the bytes the allocator says were asked for; its units are all powers of 1024."""
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

    ``returncode`` as ``subprocess`` has it (negative for a signal) or as a shell has it (137);
    ``oom_kills``: by how much ``oom_kills()`` grew while it ran; ``output``: its last lines.
    Of the signal, the kernel's count and a suspect's words any two make an OOM, one a suspect.
    """
    if returncode == 0:  # "DataLoader worker is killed" is harmless noise at the end of a good run
        return NOTHING
    said = classify_text(output)
    killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if said.kind is not Kind.NOT_OOM:
        return said.corroborated() if killed or oom_kills > 0 else said
    if killed and oom_kills > 0:
        return Diagnosis(Kind.OOM, "killed by the kernel", None, "killed for want of memory")
    if killed:
        return Diagnosis(Kind.SUSPECT, "signal 9", None, "killed by signal 9 (SIGKILL)")
    if oom_kills > 0:
        return Diagnosis(Kind.SUSPECT, "oom_kill", None, "the kernel killed a process of its group")
    return said


def oom_kills() -> int:
    """Return how many processes the kernel has killed for memory in our control group, ever.

    0 where that cannot be read.
    """
    for folder in host.cgroup_folders()[:1]:
        for name in ("memory.events", "memory.oom_control"):
            count = host.cgroup_number(folder / name, "oom_kill")
            if count is not None:
                return count
    return 0


def pressed(emptied: Iterable[bool]) -> bool:
    """Return whether the allocator emptied its cache in two steps in a row.

    ``emptied``: whether it did, step by step.
    """
    return any(one and two for one, two in itertools.pairwise(emptied))


def classify_retries(retries: Sequence[int]) -> Diagnosis:
    """Return a suspect when the allocator emptied its cache in two steps in a row.

    ``retries``: ``Meter.retries()`` after each step, oldest first.
    """
    if pressed(later > earlier for earlier, later in itertools.pairwise(retries)):
        return Diagnosis(Kind.SUSPECT, "allocator retries", None, "the allocator keeps retrying")
    return NOTHING


def first_cause(ranks: Iterable[Diagnosis]) -> Diagnosis:
    """Return what all ranks failed of: ``ranks`` in the order in which they failed.

    Those that only noticed another's end (a watchdog's time-out) inherit its class.
    """
    return next((rank for rank in ranks if not rank.follows), NOTHING)


def _worst(found: Sequence[Diagnosis]) -> Diagnosis:
    """Return the first of the gravest kind; what says something before what says nothing."""
    for kind in _SEVERITY:
        for diagnosis in found:
            if diagnosis.kind is kind:
                return diagnosis
    return next((diagnosis for diagnosis in found if diagnosis.signature), NOTHING)
