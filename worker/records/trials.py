"""The typed, frozen records of a trial, from the harness to the store. Imports no torch.

The harness sends events over its pipe. The launcher turns them into reports and adds what only the
parent can see. The controller stores the reports.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum

from autofit.facts import Bandwidth, Facts, Hardware
from autofit.plan import Plan
from autofit.strategies.support.block_levels import more_blocks
from autofit.worker.records import medians
from autofit.worker.records.inspection import Growth, Inspected, Inspection, SourceLine
from autofit.worker.records.phases import Seconds
from autofit.worker.records.traces import Trace

PROBE_SPREAD = 0.05
"""How far the seconds of a probe may be off: the loader and the loss are not part of it."""
HORIZON = 10_000
"""Default number of optimizer steps over which the compile time is spread."""
LOOPBACK = "127.0.0.1"
"""Address at which rank 0 listens if all ranks are on one host."""


class Verdict(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    REFUSED = "refused"
    """A strategy cannot keep its promise for this script; the reason says why."""
    PLAN_FAILED = "plan_failed"
    """The script fails under this plan but not under the neutral one."""
    SCRIPT_FAILED = "script_failed"
    """The script fails under the neutral plan too: a bug of the script."""
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    DRIFTED = "drifted"
    """The training differs from the reference by more than the tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The script to tune, as the user would start it with ``python`` or a launcher."""

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
    """The words before the script on the launch line, such as ``torchrun``; only for messages."""

    def __str__(self) -> str:
        module = ("-m",) if self.module and not self.launcher else ()
        return " ".join((*self.launcher, *module, self.target, *self.args))


CHECK = "the check"
"""Phase of autofit's own calls of the model, which check a plan."""
NOT_COMPARABLE = (
    "the gradients are infinite or NaN without the plan too, so nothing can be compared"
)
"""Why no plan can be verified once a training has diverged."""
CHECK_STARVED = "the check needs more memory than the budget leaves"
"""Message if memory runs out in that phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Where memory ran out."""

    phase: str
    """``"forward"``, ``"backward"``, ``"evaluation"`` (a call of the model without gradients),
    ``"optimizer step"``, ``"outside the model"`` or ``CHECK``."""
    message: str
    """First line of the allocator's own error."""
    requested: int | None = None
    """Bytes that the failed allocation requested, if the error states them."""
    micro_batch: int | None = None
    checkpointing: str | None = None
    """The level of ``checkpointing``, for a plan that was being measured."""
    place: SourceLine | None = None
    """The deepest line of the script's own code, for an error that ended the script."""
    held: int | None = None
    """Bytes that tensors held when that error left the script."""
    started: bool = True
    """Whether the model had been called. Before that, the weights themselves do not fit."""
    steps: int | None = None
    """Optimizer steps that the process had taken before, if known."""
    room: int | None = None
    """Bytes that the process held on the device plus free bytes, at that moment.

    Less than the budget if other processes use the card. ``None`` if unknown.
    """

    @property
    def where(self) -> str:
        """A phrase for messages: ``"out of memory in backward"``."""
        if self.phase == CHECK:
            return CHECK_STARVED
        place = self.phase if self.phase.startswith("outside") else f"in {self.phase}"
        return f"out of memory {place}"

    def of_activations(self, budget: int | None = None) -> bool:
        """Return whether fewer activations may help a process with a budget of ``budget`` bytes.

        They do not help before the model was called. They do not help in the first optimizer step
        either, because it makes the optimizer's state; they may in a later step. Outside the model
        they do not help if the requested tensor alone exceeds the budget.
        """
        if self.phase == "optimizer step":
            return self.steps != 0
        not_in_model = self.phase == "outside the model"
        too_large = bool(budget and self.requested and self.requested > budget)
        return self.started and not (not_in_model and too_large)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One plan at one micro-batch size, over a window of full optimizer steps."""

    micro_batch: int
    """Samples in the largest chunk of a root call."""
    effective_batch: int
    """Samples in one optimizer step over all ranks."""
    step_seconds: tuple[float, ...]
    """Seconds of each measured step; the first step after a change of plan is not measured."""
    peak_allocated: int
    """Most bytes that tensors held."""
    peak_reserved: int
    """Most bytes that torch's allocator held."""
    peak_device: int
    """Most bytes that the process occupied on the device."""
    allocation_retries: int = 0
    """Measured steps in which torch's allocator emptied its cache and tried again."""
    allocations_refused: int = 0
    """Failed allocations since the plan began that did not end the step.

    cuDNN, for instance, then uses an algorithm that needs less memory.
    """
    data_wait: float = 0.0
    """Share of the step spent waiting for data, 0 to 1."""
    losses: tuple[float, ...] = ()
    """Loss of every optimizer step in the window."""
    compile_seconds: float = 0.0
    """Seconds spent compiling, before the window and in it."""
    rank_peaks: tuple[int, ...] = ()
    """``peak_device`` of each rank, with several ranks; ``peak_device`` is the largest."""
    checkpointing: str | None = None
    """The level of ``checkpointing``: how many blocks ran again. ``None`` in older measurements."""
    probed: bool = False
    """Whether the figures are those of one chunk, from which a step's were computed."""

    def plan(self, searched: Plan) -> Plan:
        """Return the plan that was measured: ``searched`` with the measured numbers."""
        return searched.sized(self.micro_batch, self.checkpointing)

    def leaner(self, micro_batch: int | None, checkpointing: str | None) -> bool:
        """Return whether it needs less memory than other numbers of the same plan.

        ``micro_batch``: ``None`` for the same size.
        """
        if more_blocks(checkpointing, self.checkpointing):
            return False
        if micro_batch is None or micro_batch == self.micro_batch:
            return more_blocks(self.checkpointing, checkpointing)
        return self.micro_batch < micro_batch

    @property
    def seconds(self) -> float:
        """Median seconds of an optimizer step."""
        return statistics.median(self.step_seconds)

    @property
    def spread(self) -> float:
        """How far ``seconds`` may be off, as a share: see ``worker/records/medians.py``."""
        if self.probed:
            return PROBE_SPREAD
        return medians.spread(self.step_seconds)

    @property
    def variation(self) -> float:
        """How much single steps vary, as a share: the quartile coefficient of dispersion.

        Unlike ``spread`` it does not shrink with more steps. Below two steps it is zero.
        """
        if len(self.step_seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return (high - low) / (high + low)

    @property
    def strained(self) -> bool:
        """Whether the plan barely fits, which may slow it down.

        It is so if the allocator retried in at least half of the steps, or an allocation failed
        without ending the step.
        """
        return self.allocations_refused > 0 or 2 * self.allocation_retries >= len(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples trained on per second, over all ranks."""
        return self.effective_batch / self.seconds

    @property
    def samples_per_second_spread(self) -> float:
        """How far ``samples_per_second`` may be off, up or down."""
        return self.spread * self.samples_per_second

    def charged(self, horizon: int) -> float:
        """Return samples per second with the compile time spread over ``horizon`` steps."""
        return self.effective_batch / (self.seconds + self.compile_seconds / horizon)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """Result of one plan of a launch."""

    index: int
    """Position of the plan in its launch."""
    plan: Plan
    """The plan that was requested; ``best`` holds the one to use."""
    verdict: Verdict
    reason: str = ""
    """One line for people: why the plan was refused, what failed, or where memory ran out."""
    best: Plan | None = None
    """The plan with its best micro-batch size, for a measured trial."""
    measurements: tuple[Measurement, ...] = ()
    """One for every size that was measured, the best last."""
    out_of_memory: OutOfMemory | None = None
    """The shortage at the smallest size that failed, even if another size fitted."""
    blamed: str | None = None
    """The strategy at fault, if the traceback shows one."""
    own: bool = False
    """Whether the script's own code raised the error, without a strategy's code in the traceback.
    """
    killed: bool = False
    """Whether a signal from outside ended its process although memory had not run out."""
    traceback: str = ""
    """Python's traceback without autofit's own frames, for a failed trial."""
    startup_seconds: float = 0.0
    """Seconds from the start of the process to the root's first call."""
    seconds_by_phase: Seconds = ()
    """The plan's seconds by phase; the first plan of a process also has those before it."""
    gradient_difference: float | None = None
    """Relative difference of the gradients from the plain model's, as the gradient check found it.

    ``None`` if the plan cannot change the gradients.
    """

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of the best size."""
        return self.measurements[-1] if self.measurements else None


# --- events, child to parent ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What is known of the script so far; a later event replaces an earlier one."""

    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """Evidence of a check, so that no other process has to repeat it."""

    key: str
    content: str
    """JSON that only the harness reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The script took an optimizer step under a plan that passed its checks."""

    plan: Plan
    sources: tuple[tuple[str, str], ...]
    """The user's own modules: path, relative to the working directory, and SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthMeasured:
    """The ranks of a single-process script have measured how fast they communicate."""

    ranks: int
    bandwidth: Bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsGrow:
    """The script as it is has left a graph of each observed step."""

    growth: Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStarted:
    """The child has started the plan at ``index``."""

    index: int
    startup_seconds: float = 0.0
    seconds_by_phase: Seconds = ()
    """The process's seconds by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The child has measured one micro-batch size of the current plan."""

    index: int
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory ran out under the current plan; the process continues if it can."""

    index: int
    out_of_memory: OutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The trace of the launch's first steps, under the plan at ``index``."""

    index: int
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEnded:
    """The child has finished the plan of ``report``."""

    report: TrialReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The child has finished all plans that it was given, and waits for an ``Answer``."""

    fresh: bool = False
    """Whether all of them were refused before any step ran, so the process is as new."""


LOST = "lost"
"""Kind of ``Raised`` if a rank on another host was killed, or its host has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception left the script or a strategy, and ends the process."""

    index: int
    kind: str
    """A value of ``ErrorKind``: ``"oom"``, ``"suspect"``, ``"poisoned"``, ``"error"``.

    Or ``LOST``.
    """
    message: str
    traceback: str
    phase: str = "outside the model"
    requested: int | None = None
    blamed: str | None = None
    own: bool = False
    """As in ``TrialReport``."""
    corroborated: bool = False
    """Whether an allocation was refused in this step, so that a suspect counts as an OOM."""
    steps: int = 0
    """Optimizer steps taken."""
    place: SourceLine | None = None
    """The deepest line of the script's own code in the traceback."""
    held: int | None = None
    """Bytes that tensors held when it left the script."""
    started: bool = True
    """Whether the model had been called."""
    room: int | None = None
    """As in ``OutOfMemory``, when it left the script."""
    micro_batch: int | None = None
    """The micro-batch size that was being measured."""
    checkpointing: str | None = None
    """The level of ``checkpointing`` that was being measured."""
    follows: bool = False
    """Whether it only reports that another rank has ended."""
    seconds_by_phase: Seconds = ()
    """The process's seconds by phase."""

    @property
    def out_of_memory(self) -> OutOfMemory:
        """The same failure as a shortage of memory."""
        return OutOfMemory(
            phase=self.phase,
            message=self.message,
            requested=self.requested,
            micro_batch=self.micro_batch,
            checkpointing=self.checkpointing,
            place=self.place,
            held=self.held,
            started=self.started,
            steps=self.steps,
            room=self.room,
        )

    def starved(self, kernel_kills: int = 0) -> bool:
        """Return whether it is an OOM.

        A suspect counts if it is corroborated or the OOM killer ended ``kernel_kills`` processes.
        """
        certain = self.corroborated or kernel_kills > 0
        return self.kind == "oom" or (self.kind == "suspect" and certain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A real run continues under another plan in the same process, from the same step."""

    plan: Plan
    """The new plan."""
    reason: str
    """Why the run left the plan before."""
    blamed: str | None = None
    """The strategy at fault, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """The script has opened a file for writing; sent once."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The script has ended, or the harness stopped it after the last plan."""

    steps: int
    """Optimizer steps taken."""
    stopped: bool
    """Whether the harness stopped it after the last plan."""
    seconds_by_phase: Seconds = ()
    """The process's seconds by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """A rank waits until every rank has sent this event; then all receive ``Agreed``."""

    what: str
    """What the rank is about to do: ``"an optimizer step"``."""
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A prepared process waits before its first device call, until a launch uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncontained:
    """The system allows no overlay, so the script's writes to disk are real."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The process has begun a phase that may take seconds (``phases.TOLD``)."""

    phase: str


MOST_PRINTED = 8000
"""Characters of a script's output that are told at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The script has written to standard output or error."""

    text: str
    """The end of what it has written since its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressed:
    """The allocator emptied its cache in consecutive steps; the harness makes the chunks smaller.

    This prevents an OOM that was likely.
    """

    micro_batch: int
    """The new micro-batch size."""
    retries: int
    """Retries of the allocator since the start."""
    steps: int
    """Optimizer steps taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InOnePiece:
    """From now on, calls that the plan cannot serve run in one piece, as the script has them."""

    reason: str
    on_host: bool
    """Memory ran out: they keep the tensors that backward needs in host memory."""
    phase: str
    steps: int
    """Optimizer steps taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """What a real run measured in its first steps under a plan; sent once.

    The shares are of the time of the measured steps, 0 to 1.
    """

    steps: int
    """Optimizer steps taken under the plan; the first few of them are not measured."""
    step_seconds: tuple[float, ...]
    """Seconds of each measured step."""
    effective_batch: int | None
    """Samples in one optimizer step over all ranks; ``None`` if unknown."""
    peak_device: int
    """As in ``Measurement``."""
    data_wait: float
    """Share spent waiting for data."""
    compiling: float
    """Share spent compiling."""
    cpu_wait: float
    """Share in which a thread was ready to run, and other threads had the CPUs."""
    others: int
    """Bytes of the device that other processes hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Figures of a real run, sent at its end."""

    steps: int
    """Optimizer steps taken."""
    peak_allocated: int
    """Most bytes that tensors held after the first step."""
    peak_reserved: int
    peak_device: int
    retries: int
    """Retries of the allocator after the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The script has written a checkpoint."""

    path: str
    """Absolute path."""


Event = (
    Agreeing
    | Saved
    | Wrote
    | Replaced
    | Pressed
    | InOnePiece
    | FirstSteps
    | Ran
    | Uncontained
    | Entered
    | Printed
    | Inspected
    | Learned
    | Proven
    | Verified
    | BandwidthMeasured
    | GraphsGrow
    | PlanStarted
    | Measured
    | Traced
    | Shortage
    | PlanEnded
    | Asking
    | Paused
    | Raised
    | Finished
)
"""Everything that the child sends; its parent adds ``Printed``."""


# --- a launch ---------------------------------------------------------------------------------

STEPS = 5
"""Default number of optimizer steps over which a given plan is measured."""


class Stage(StrEnum):
    """What a launch does with the plans of an answer."""

    PROBE = "probe"
    """Run single chunks under the plan while the script waits, and compute a step from them."""
    STEPS = "steps"
    """Measure real optimizer steps, under the plans in turn."""
    CHECK = "check"
    """Verify the plan on the script's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Processes to start, and the plans to measure in them, one after another.

    With ``converses``, the launch asks for another plan after the last, until the answer is that
    there is none. The start-up time is spent once, and each choice uses the results so far.
    """

    script: Script
    plans: tuple[Plan, ...]
    """Each follows the one before it (``Plan.follows``); so do the plans of later answers."""
    device: str
    """The kind of device, such as ``"cpu"`` or ``"cuda"``."""
    budget: int
    """Bytes that each process may occupy on its device."""
    timeout: float
    """Seconds after which the launch is killed; an answer has its own."""
    steps: int = STEPS
    """Optimizer steps measured at the chosen size, without the first step after a change."""
    whole_fits: bool = False
    """Whether the unchanged script is known to fit, so that one chunk is tried first."""
    environment: tuple[tuple[str, str], ...] = ()
    converses: bool = False
    """Whether the launch asks for more plans."""
    waits: bool = False
    """Whether the launch also asks for its first plan.

    ``plans`` then only holds the levels that all its plans share, and is not measured.
    """
    prepared: bool = False
    """Whether the process is prepared beside a running one, for a request to come.

    It waits for that request before its first device call. ``plans`` holds the levels that the
    process is started with (``Plan.at_start``).
    """
    ranks: int = 1
    """Number of processes, on one machine: see ``worker/launch/environment.py``."""
    measures_bandwidth: bool = False
    """Whether the replicas first measure how fast they communicate, if they have the memory."""
    proven: tuple[Proven, ...] = ()
    """Evidence from earlier launches."""
    peaks: tuple[int, ...] = ()
    """For a real run: bytes that each of ``plans`` occupied when measured; 0 if not measured.

    The first plan is the run's, the others are its fallbacks.
    """
    inspection: Inspection | None = None
    """Given if the launch is to find out what holds the memory under its only plan."""
    fake_gpu: Hardware | None = None
    """The card that the process is to believe in: nothing is computed, and nothing allocated."""

    @property
    def given(self) -> tuple[Plan, ...]:
        """The plans to measure; none if the process gets its first plan later."""
        return () if self.waits or self.prepared else self.plans

    @property
    def replicas(self) -> int:
        """Copies of a single-process script that train as one; all plans have the same number."""
        return max((plan.ranks for plan in self.plans[:1]), default=1)

    @property
    def processes(self) -> int:
        """Number of processes to start."""
        return max(self.ranks, self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The reply to a launch that asks for more plans."""

    plans: tuple[Plan, ...]
    """None if there are none; then the launch ends. Only ``Stage.STEPS`` takes several."""
    stage: Stage = Stage.PROBE
    """What to do with them."""
    timeout: float
    """Seconds from now after which the launch is killed."""
    whole_fits: bool = False
    """Whether the unchanged script is known to fit by now."""
    proven: tuple[Proven, ...] = ()
    """Evidence from all launches so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the replicas of a single-process script need to find one another."""

    address: str = LOOPBACK
    """Address of rank 0's host."""
    port: int
    """Port on which rank 0 listens."""
    seed: int
    """Seed of all random generators when the script starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The launcher's first message to its child, over the control pipe."""

    request: LaunchRequest
    mode: str = "trial"
    """``"trial"``: measure the plans, report, stop. ``"run"``: train under the first plan."""
    report_saves: bool = False
    """Whether the child reports the checkpoints that the script writes."""
    scratch: str | None = None
    """An empty folder that receives the script's writes to disk; ``None`` if they are real."""
    rank: int = 0
    """The child's rank."""
    meeting: Meeting | None = None
    """Where the ranks meet, if they are replicas of a single-process script."""

    @property
    def saves_files(self) -> bool:
        """Whether the script's files are this process's: of replicas, only rank 0 leaves any."""
        return self.meeting is None or self.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The events of all ranks, by rank: the answer to ``Agreeing``."""

    said: tuple[Agreeing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnded:
    """The last event of a launch. A plan without a report before it was not started."""

    steps: int
    """Optimizer steps that the script took."""
    stopped: bool
    """Whether the harness stopped the script after the last plan; else it ended or died."""
    seconds: float
    seconds_by_phase: Seconds = ()
    """``seconds`` by phase: those of all trials, and those outside of them."""
    output: str = ""
    """The last lines that the script wrote to standard output and error."""
    oom_killed: bool = False
    """Whether the kernel's OOM killer ended it."""
    taken: str = ""
    """Which processes took the device's memory; the running plan is reported as interrupted."""
    lost: str = ""
    """Why the slot is of no more use: its memory is occupied after the launch."""


LaunchEvent = (
    Uncontained
    | Entered
    | Printed
    | Inspected
    | Learned
    | Proven
    | Verified
    | BandwidthMeasured
    | GraphsGrow
    | Measured
    | Traced
    | Shortage
    | TrialReport
    | Asking
    | LaunchEnded
)
"""Everything that a launch yields to the controller, ``LaunchEnded`` last."""
