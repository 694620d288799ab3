"""The typed, frozen records that travel from a trial to the store. Imports no torch.

One road: the harness sends events over its pipe; the launcher adds what only the parent can see
and turns them into reports; the controller stores those.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum

from autofit.facts import Facts
from autofit.plan import Plan
from autofit.worker.records.traces import Trace

HORIZON = 10_000
"""Optimizer steps over which the time to compile is charged, where nothing else is asked."""


class Verdict(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    REFUSED = "refused"
    """A strategy cannot keep its promise here; the reason says why."""
    PLAN_FAILED = "plan_failed"
    """It breaks under this plan but not under the neutral one."""
    SCRIPT_FAILED = "script_failed"
    """It breaks under the neutral plan too: the script's own bug."""
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    DRIFTED = "drifted"
    """The training left the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The script to tune, as the user would start it with ``python`` or with a launcher."""

    target: str
    """The path of the script, or the name of the module."""
    module: bool = False
    """Whether it is started with ``python -m``."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    cwd: str
    """Absolute working directory."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the launcher would set, sorted; without those that connect ranks."""
    launcher: tuple[str, ...] = ()
    """The words before it on the launch line, such as ``torchrun``; only for messages."""

    def __str__(self) -> str:
        module = ("-m",) if self.module and not self.launcher else ()
        return " ".join((*self.launcher, *module, self.target, *self.args))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of the user's own code."""

    line: str
    """File, as given to Python, and line number: ``"train.py:41"``."""
    source: str = ""
    """What is written there."""


CHECK = "the check"
"""Phase of autofit's own calls of the model, by which it checks a plan."""
CHECK_STARVED = "the check needs more memory than the budget leaves"
"""What is said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Where memory ran out."""

    phase: str
    """``"forward"``, ``"backward"``, ``"evaluation"`` (a call of the model without gradients),
    ``"optimizer step"``, ``"outside the model"`` or ``CHECK``."""
    message: str
    """First line of the allocator's own error."""
    requested: int | None = None
    """Bytes asked for by the allocation that failed, where the error says so."""
    micro_batch: int | None = None
    place: Place | None = None
    """The deepest line of the script's own, for an error that ended it."""
    held: int | None = None
    """Bytes that tensors held when it died of that error."""
    started: bool = True
    """The model had been called; before that, memory runs out over the weights."""
    steps: int | None = None
    """Optimizer steps that its process had taken before, where that is known."""
    room: int | None = None
    """Bytes the process held on the device and those nobody did, then; less than its budget where
    others had taken the card. ``None`` where nobody knows."""

    @property
    def where(self) -> str:
        """What happened, in words: ``"out of memory in backward"``."""
        if self.phase == CHECK:
            return CHECK_STARVED
        place = self.phase if self.phase.startswith("outside") else f"in {self.phase}"
        return f"out of memory {place}"

    def of_activations(self, budget: int | None = None) -> bool:
        """Return whether fewer activations may help a process that may hold ``budget`` bytes.

        Not before the model ran, nor in the first step, which makes the optimizer's state (what
        has grown by a later one may leave room), nor outside where one tensor is too large.
        """
        if self.phase == "optimizer step":
            return self.steps != 0
        outside = self.phase == "outside the model"
        too_large = bool(budget and self.requested and self.requested > budget)
        return self.started and not (outside and too_large)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One plan at one micro-batch size, over a window of full optimizer steps."""

    micro_batch: int
    """Samples in the largest chunk of a root call."""
    effective_batch: int
    """Samples in one optimizer step over all ranks."""
    step_seconds: tuple[float, ...]
    """Of each measured step; the first step after a change is dropped."""
    peak_allocated: int
    """Bytes held by tensors at the worst moment."""
    peak_reserved: int
    """Bytes held by torch's allocator at the worst moment."""
    peak_device: int
    """Bytes the process occupied on the device at the worst moment."""
    allocation_retries: int = 0
    """Measured steps in which torch's allocator emptied its cache and tried again."""
    allocations_refused: int = 0
    """Since the plan began, and done without: cuDNN keeps to an algorithm that needs less."""
    data_wait: float = 0.0
    """Share of the step spent waiting for data, 0 to 1."""
    losses: tuple[float, ...] = ()
    """Loss of every optimizer step in the window."""
    compile_seconds: float = 0.0
    """Spent compiling before the window and in it."""
    rank_peaks: tuple[int, ...] = ()
    """``peak_device`` of each rank, where there are several: the largest counts."""

    @property
    def seconds(self) -> float:
        """Median seconds of an optimizer step."""
        return statistics.median(self.step_seconds)

    @property
    def spread(self) -> float:
        """Half the range of the step times over their median."""
        return (max(self.step_seconds) - min(self.step_seconds)) / 2 / self.seconds

    @property
    def strained(self) -> bool:
        """Whether the plan hardly fits, which may make it slower.

        The allocator retried in half of the steps, or more; or a library did with less memory.
        """
        return self.allocations_refused > 0 or 2 * self.allocation_retries >= len(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples trained on in a second, over all ranks."""
        return self.effective_batch / self.seconds

    def charged(self, horizon: int) -> float:
        """Return samples per second with the time to compile spread over ``horizon`` steps."""
        return self.effective_batch / (self.seconds + self.compile_seconds / horizon)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """What became of one plan of a launch."""

    index: int
    """Position of the plan in its launch."""
    plan: Plan
    """As asked; ``best`` holds the one to keep."""
    verdict: Verdict
    reason: str = ""
    """One line for people: why it was refused, what failed, what was asked of the allocator."""
    best: Plan | None = None
    """The plan with the micro-batch size that won, for a measured trial."""
    measurements: tuple[Measurement, ...] = ()
    """Every size that was measured, the winner last."""
    out_of_memory: OutOfMemory | None = None
    """The shortage met at the smallest size, also in a trial that then found one that fits."""
    blamed: str | None = None
    """The strategy at fault, where the traceback shows one."""
    own: bool = False
    """A line of the script itself raised it, with no strategy's code on the way. Not stored."""
    killed: bool = False
    """Its process was ended by a signal that others send, and memory had not run out. Not stored.
    """
    traceback: str = ""
    """As Python prints it, our frames left out; for a failed trial."""
    startup_seconds: float = 0.0
    """From the start of the process to the root's first call."""
    gradient_difference: float | None = None
    """Of the model's gradients from the plain model's, relative, as its proof found it; ``None``
    where nothing in them could differ. Not stored."""

    @property
    def measurement(self) -> Measurement | None:
        """The winner's measurement."""
        return self.measurements[-1] if self.measurements else None


# --- events, child to parent ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What is known of the script by now; a later one replaces an earlier one."""

    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """Evidence: something was verified of the model that no other process verifies again."""

    key: str
    content: str
    """JSON; only the harness knows what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The script took an optimizer step under a plan that was found to keep its promise."""

    plan: Plan
    sources: tuple[tuple[str, str], ...]
    """The user's own modules: path, relative to the working directory, and SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStarted:
    """The child has turned to the plan at ``index``."""

    index: int
    startup_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One size of the current plan was measured."""

    index: int
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory ran out under the current plan; the process goes on if it can."""

    index: int
    out_of_memory: OutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What the first steps of the launch did, under the plan at ``index``."""

    index: int
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEnded:
    """The child is done with the plan at ``index``."""

    report: TrialReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The child is done with every plan it was given, and waits for an ``Answer``."""

    fresh: bool = False
    """Those were refused before anything had run under them: the next one comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception left the script, or a strategy, and ends the process."""

    index: int
    kind: str
    """``"oom"``, ``"suspect"``, ``"poisoned"`` or ``"error"``: the classifier's word."""
    message: str
    traceback: str
    phase: str = "outside the model"
    requested: int | None = None
    blamed: str | None = None
    own: bool = False
    """As in ``TrialReport``."""
    corroborated: bool = False
    """An allocation was refused in this step, so that a suspect counts as an OOM."""
    steps: int = 0
    """Optimizer steps taken."""
    place: Place | None = None
    """The deepest line of the script's own that it came through."""
    held: int | None = None
    """Bytes that tensors held when it left the script."""
    started: bool = True
    """The model had been called."""
    room: int | None = None
    """As in ``OutOfMemory``, when it left the script."""
    micro_batch: int | None = None
    """Samples at a time that were being measured."""
    follows: bool = False
    """It only says that another rank is gone."""

    @property
    def out_of_memory(self) -> OutOfMemory:
        """What there is to say of it as a shortage of memory."""
        return OutOfMemory(
            phase=self.phase,
            message=self.message,
            requested=self.requested,
            micro_batch=self.micro_batch,
            place=self.place,
            held=self.held,
            started=self.started,
            steps=self.steps,
            room=self.room,
        )

    def starved(self, kernel_kills: int = 0) -> bool:
        """Return whether it is one of memory; a suspect that the kernel killed for is believed."""
        certain = self.corroborated or kernel_kills > 0
        return self.kind == "oom" or (self.kind == "suspect" and certain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A real run goes on under another plan in the same process, from the same step."""

    index: int
    """The plan that it goes on under."""
    reason: str
    """Why the one before was given up."""
    blamed: str | None = None
    """The strategy at fault, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """The script has opened a file for writing; told once."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The script came to its own end, or was stopped after the last plan."""

    steps: int
    """Optimizer steps taken."""
    stopped: bool
    """By us, after the last plan, and not by the script itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """A rank waits until every rank has said as much; then all hear ``Agreed``."""

    what: str
    """Where it stands: ``"an optimizer step"``."""
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncontained:
    """What the script writes to disk is really written: the system allows no overlay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressed:
    """The allocator emptied its cache in steps on end; the batch is cut smaller before it fails."""

    micro_batch: int
    """Samples at a time from here on."""
    retries: int
    """Of the allocator, since the start."""
    steps: int
    """Optimizer steps taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a real run came to, told at its end."""

    steps: int
    """Optimizer steps taken."""
    peak_allocated: int
    """Bytes, at the worst moment after the first step, later proofs included."""
    peak_reserved: int
    peak_device: int
    retries: int
    """Of the allocator, after the first step and the last with a proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The script has written a checkpoint."""

    path: str
    """Absolute."""


Event = (
    Agreeing
    | Saved
    | Wrote
    | Replaced
    | Pressed
    | Ran
    | Uncontained
    | Learned
    | Proven
    | Verified
    | PlanStarted
    | Measured
    | Traced
    | Shortage
    | PlanEnded
    | Asking
    | Raised
    | Finished
)
"""What the child sends."""


# --- a launch ---------------------------------------------------------------------------------

STEPS = 5
"""Optimizer steps that a window has as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A process to start, or several, and the plans to measure in them, one after another.

    Where it ``converses``, it asks for another plan after the last, until it is told that there is
    none: start-up is paid once, and each plan is chosen by what those before it have shown.
    """

    script: Script
    plans: tuple[Plan, ...]
    """Each follows the one before it (``Plan.follows``), and so do those it asks for."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    budget: int
    """Bytes each process may occupy on its device."""
    timeout: float
    """Seconds after which the launch is ended; an answer brings its own."""
    steps: int = STEPS
    """Optimizer steps measured at the size that is kept; the first after a change comes on top."""
    whole_fits: bool = False
    """The script as it is is known to fit: one chunk is worth trying first."""
    environment: tuple[tuple[str, str], ...] = ()
    converses: bool = False
    """It asks for more plans."""
    waits: bool = False
    """It asks for its first plan too: ``plans`` says what is fixed in all, and is not measured."""
    ranks: int = 1
    """Processes it consists of, on one machine: see ``worker/launch/rank_environment.py``."""
    proven: tuple[Proven, ...] = ()
    """What earlier launches have proven."""
    peaks: tuple[int, ...] = ()
    """Of a real run, for each of ``plans``: bytes on the device when it was measured; 0 where it
    was not. The first is the plan of the run, the others are what it may fall back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a launch that asks for another plan is told."""

    plan: Plan | None
    """``None`` when there is none: the launch ends."""
    timeout: float
    """Seconds from now after which the launch is ended."""
    whole_fits: bool = False
    """The script as it is is known to fit by now."""
    proven: tuple[Proven, ...] = ()
    """What all launches have proven by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The one thing the launcher says to its child, first, over the control pipe."""

    request: LaunchRequest
    mode: str = "trial"
    """``"trial"``: measure the plans, report, stop. ``"run"``: train under the first plan."""
    report_saves: bool = False
    """Say which checkpoints the script writes."""
    scratch: str | None = None
    """An empty folder for what the script writes to disk; ``None`` to let it write."""
    rank: int = 0
    """Which of the request's ranks it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What every rank has said, by rank: the answer to ``Agreeing``."""

    said: tuple[Agreeing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnded:
    """The last thing said of a launch; a plan without a report before it was not reached."""

    steps: int
    """Optimizer steps the script took."""
    stopped: bool
    """Ended by us after the last plan (``False``: the script came to its own end, or died)."""
    seconds: float
    output: str = ""
    """The last lines the script wrote to standard output and error."""
    oom_killed: bool = False
    """The kernel ended it for want of memory."""
    taken: str = ""
    """Who took the device from it; the plan that was running is reported as interrupted."""
    lost: str = ""
    """Why the slot is of no more use: memory that others hold, or that has not come back."""


LaunchEvent = (
    Uncontained
    | Learned
    | Proven
    | Verified
    | Measured
    | Traced
    | Shortage
    | TrialReport
    | Asking
    | LaunchEnded
)
"""What a launch yields to the controller, in order, ``LaunchEnded`` last."""
