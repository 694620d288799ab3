"""Runs scripts in processes forked from one that has imported torch and the harness.

A fork takes some milliseconds where a start takes seconds. The shim is preloaded, as in a real
launch on the CPU, and each script has a file of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from autofit.evidence import STEPS
from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.ranks import count
from autofit.worker import meter
from autofit.worker.launch.environment import free_port
from autofit.worker.records.phases import Phases
from autofit.worker.records.trials import (
    Agreed,
    Agreeing,
    Answer,
    ChildSpec,
    Event,
    LaunchRequest,
    Meeting,
    PlanEnded,
    Proven,
    Raised,
    Replaced,
    Script,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    *("torch", "torch._dynamo", "torch.utils.data", "accelerate.utils", "numpy", "resource"),
    *("torch._subclasses.schema_check_mode", "autofit.worker.meter.kinds.cpu"),
    *("autofit.worker.harness.measurement.trial", "autofit.worker.harness.session.real_run"),
    *("autofit.worker.harness.process.lifecycle", "autofit.worker.harness.process.program"),
    *("autofit.strategies.optimizer.fused", "autofit.strategies.checkpointing.recompute"),
    "autofit.strategies.activation_offload.saved_tensors",
)
"""What a script, a session or a plan needs: imported once for all."""
LIMIT = 30.0
"""Seconds after which a loop hangs; the slowest takes one."""
BUDGET = 1 << 30
GONE = "RankGone"
"""Begins the error of a rank that another one has left alone."""
SERVE = "import sys; from tests.loops import nursery; nursery.serve(int(sys.argv[1]))"
"""Not run as ``__main__``, whose place the scripts take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script to run in a process of its own."""

    source: str
    mode: str = "plain"
    """``"plain"``, ``"trial"`` or ``"run"``."""
    plan: Plan = field(default_factory=Plan)
    proven: tuple[Proven, ...] = ()
    """What earlier processes have proven."""


@dataclass(slots=True, kw_only=True)
class Ended:
    """How it ended."""

    result: dict[str, Any] | None = None
    """The script's ``RESULT``; ``None`` if it did not get there."""
    losses: list[float] = field(default_factory=list)
    """As far as it came."""
    error: str = ""
    """What left the script, with the innermost frames."""
    own: bool = False
    """A line of the script itself raised it."""
    refused: str = ""
    blamed: str = ""
    """The strategy that refused, or that the traceback shows."""
    measured: bool = False
    """A trial measured the plan."""
    proven: tuple[Proven, ...] = ()
    seconds: float = 0.0


class Listener:
    """Takes the events of a session in this process, and answers what it asks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.phases = Phases()

    def send(self, event: Event) -> None:
        """Keep the event."""
        self.events.append(event)

    def ask(self, *, fresh: bool) -> Answer:
        """Say that there is no other plan."""
        return Answer(plans=(), timeout=0.0)

    def agree(self, said: Agreeing, patience: float | None = None) -> tuple[Agreeing, ...]:
        """Return what the only rank says."""
        return (said,)

    def answered(self, answer: Answer | Agreed) -> None:
        """Nothing: nobody sends answers here."""


class Nursery:
    """The process that forks, seen from outside; a context manager."""

    def __init__(self) -> None:
        here, there = Pipe()
        environment = {**os.environ, **meter.environment("cpu", None), "OMP_NUM_THREADS": "1"}
        self._pipe = here
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVE, str(there.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=(there.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        there.close()

    def run(self, job: Job) -> Ended:
        """Run a job to its end."""
        self._pipe.send(job)
        ended: Ended = self._pipe.recv()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()  # which ends it
        self._process.wait(LIMIT + 5)


# --- in the process that forks ------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Fork a process for each job that comes, until the pipe breaks."""
    for module in PRELOADED:
        import_module(module)
    import_module("torch").set_num_threads(1)
    vars(import_module("autofit.strategies.compile"))["SETTINGS"] = {"backend": "aot_eager"}
    # Loops are short: without this, all their calls would be compared among the ranks.
    vars(import_module("autofit.worker.harness.ranks.lockstep"))["FEW"] = 1
    gc.collect()
    gc.freeze()  # there is less to look at in each fork
    pipe = Connection(descriptor)
    with tempfile.TemporaryDirectory(prefix="autofit-loops-") as folder:
        os.chdir(folder)
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(_in_a_fork(pipe.recv()))


def _in_a_fork(job: Job) -> Ended:
    """Run the job in a fork for each of its ranks, and say how the run ended."""
    started = time.monotonic()
    Path("loop.py").write_text(job.source)
    ranks = 1 if job.mode == "plain" else count(job.plan["ranks"])
    meeting = Meeting(port=free_port(), seed=0) if ranks > 1 else None
    forks = [_fork(job, rank, meeting) for rank in range(ranks)]
    ended = [_end(pipe, child, started + LIMIT - time.monotonic()) for child, pipe in forks]
    found = _of_all(ended)
    found.seconds = time.monotonic() - started
    return found


def _fork(job: Job, rank: int, meeting: Meeting | None) -> tuple[int, Connection]:
    here, there = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _become(job, rank, meeting, there)
    there.close()
    return child, here


def _end(pipe: Connection, child: int, seconds: float) -> Ended:
    """Wait for a fork so long, and return how it ended."""
    ended = None
    with contextlib.suppress(EOFError):  # it died without a word
        ended = pipe.recv() if pipe.poll(max(0.0, seconds)) else Ended(error="Hangs: killed")
    pipe.close()
    if ended is None or ended.error == "Hangs: killed":
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return ended or Ended(error=f"Died: wait status {status}")


def _of_all(ranks: list[Ended]) -> Ended:
    """Return how rank 0 ended, with what all have proven, and the error that came first."""
    first, *others = ranks
    first.proven = tuple(each for rank in ranks for each in rank.proven)
    if first.error.startswith(GONE):
        causes = (each for each in others if each.error and not each.error.startswith(GONE))
        if (cause := next(causes, None)) is not None:
            first.error, first.own, first.blamed = cause.error, cause.own, cause.blamed
    return first


def _become(job: Job, rank: int, meeting: Meeting | None, pipe: Connection) -> NoReturn:
    """Run the job in this process, say how it ended, and end."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        ended = _plain(job) if job.mode == "plain" else _harnessed(job, rank, meeting)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is told
        ended = Ended(error=_told(error))
    try:
        pipe.send(ended)
    finally:
        os._exit(0)


def _plain(job: Job) -> Ended:
    from autofit.worker.harness.process import program

    script = _script()
    program.become(loaded := program.load(script), script)
    ended = Ended()
    try:
        program.run(loaded)
    except Exception as error:  # noqa: BLE001 - the script's own
        ended.error = _told(error)
    return _read(ended, loaded.main.__dict__)


def _script() -> Script:
    return Script(target="loop.py", cwd=os.getcwd())


def _harnessed(job: Job, rank: int, meeting: Meeting | None) -> Ended:
    """Lead the script through a trial or a real run, as ``worker.harness.__main__`` does."""
    from autofit.worker.harness.process import program
    from autofit.worker.harness.process.lifecycle import ScriptLifecycle

    script = _script()
    request = LaunchRequest(
        script=script,
        plans=(job.plan, Plan()) if job.mode == "run" else (job.plan,),
        device="cpu",
        budget=BUDGET,
        timeout=LIMIT,
        steps=STEPS,
        proven=job.proven,
    )
    listener = Listener(rank)
    spec = ChildSpec(mode=job.mode, request=request, rank=rank, meeting=meeting)
    gauge = meter.for_device("cpu")
    meter.forget()
    conduct = ScriptLifecycle(spec, listener, gauge, time.monotonic())  # type: ignore[arg-type]
    ended = Ended()
    loaded = program.load(script)
    program.become(loaded, script)
    try:
        conduct.wait_for_torch()
        program.run(loaded)
        conduct.wait_for_rank_0("")
        conduct.ended()
    except BaseException as error:  # noqa: BLE001 - as the child's own program does
        if not conduct.stopped(error):
            conduct.wait_for_rank_0(f", by {type(error).__name__}")
            if not isinstance(error, Refused):
                ended.error = _told(error)
            conduct.raised(error)
    _hear(ended, listener.events)
    return _read(ended, loaded.main.__dict__)


def _hear(ended: Ended, events: list[Event]) -> None:
    ended.proven = tuple(each for each in events if isinstance(each, Proven))
    for event in events:
        match event:
            case PlanEnded(report=report):
                ended.blamed = report.blamed or ended.blamed
                ended.measured = report.verdict is Verdict.MEASURED
                if report.verdict is Verdict.REFUSED:
                    ended.refused = report.reason
            case Replaced():
                ended.refused, ended.blamed = event.reason, event.blamed or ""
            case Raised():
                ended.blamed, ended.own = event.blamed or ended.blamed, event.own


def _read(ended: Ended, names: dict[str, Any]) -> Ended:
    ended.result = names.get("RESULT")
    ended.losses = [float(each) for each in names.get("LOSSES", [])]
    return ended


def _told(error: BaseException) -> str:
    """Return an error's type, message and innermost frames of ours."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        path = Path(code.co_filename)
        if path.parent.name in ("harness", "strategies", "worker"):
            frames.append(f"{path.parent.name}/{path.name}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    place = "; ".join(frames[-3:])
    message = str(error).strip().split("\n", 1)[0][:300]
    return f"{type(error).__name__}: {message}" + (f" [{place}]" if place else "")
