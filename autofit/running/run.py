"""``autofit run``: the real training under the best plan, in the foreground, with restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

from autofit.analysis.advice import PROCESS, where
from autofit.analysis.fallback import FallbackContext
from autofit.analysis.ranking import best, ranked_sound
from autofit.analysis.verdicts import best_plan
from autofit.evidence import Checked, Evidence, key_of, stored, verify
from autofit.exceptions import StorageError, UsageError
from autofit.facts import HOST
from autofit.plan import Plan
from autofit.running.first_steps import compared, speed
from autofit.running.foreground import Foreground, Silent, started
from autofit.running.supervisor import ATTEMPT, RunEnd, supervise
from autofit.storage import EvidenceKey, State, Store, StudyRecord, TrialRecord
from autofit.strategies import Facts, Fidelity
from autofit.strategies.support.block_levels import more_blocks
from autofit.worker import meter
from autofit.worker.cluster.rank_hosts import Placed, reserved
from autofit.worker.cluster.versions import versions
from autofit.worker.launch.environment import TRACKERS_OFF, launched, under
from autofit.worker.launch.tasks import Hosts, RankTask, tasks
from autofit.worker.oom.classifier import ErrorKind, classify_exit, oom_kills
from autofit.worker.records.trials import (
    ChildSpec,
    FirstSteps,
    InOnePiece,
    LaunchRequest,
    Learned,
    Measurement,
    OutOfMemory,
    PlanEnded,
    Pressed,
    Proven,
    Raised,
    Ran,
    Replaced,
    Saved,
    Script,
    Shortage,
    Verdict,
    Wrote,
)

HELD = "held"
"""Kind of the event that stores the plan under which a run finished."""

FALLBACKS = 8
"""Largest number of the study's plans that a run may fall back to."""
SILENT = (
    "the script has closed every file descriptor (os.closerange?), autofit's too: it goes on, but"
    " would not be started again if memory ran out"
)

Say = Callable[[str], None]


def run(
    script: Script,
    *,
    plan: Plan | None = None,
    storage: str,
    memory: int | None = None,
    resume: str | None = None,
    ranks: int | None = None,
    verify_only: bool = False,
    address: str | None = None,
    say: Say = lambda line: None,
) -> int:
    """Run ``script`` to its end and return its exit code; 128 + N if signal N ended it.

    A plan for which the store has no evidence is verified first, in a launch of its own. With
    ``verify_only`` the call ends there and returns 1 if the plan does not hold.

    ``plan``: the plan to use; by default the best stored plan, or the one with less memory that
    held in the last run. ``memory``: bytes that the run may use on each device; by default the
    budget of the search, if it was given. ``resume``: arguments to add when the script is started
    again after it ran out of memory, see ``supervisor``. ``ranks``: processes to start; by default
    as many as the plan was searched with, or one for a given plan. ``address``: of a Ray cluster,
    over whose hosts the plan's ranks are spread. Raises ``UsageError`` if no plan is stored, if
    ``plan`` leaves a number open, or if there are fewer devices than ranks.
    """
    if plan is not None:
        plan.refuse_open()
    device = meter.default_device()
    context = FallbackContext(hardware=meter.hardware(device), allow=Fidelity.ROUNDING)
    if plan is not None:
        task = _Task(script, plan, memory, ranks or 1, context, _RunLog(storage))
    else:
        task = _searched(storage, script, memory, ranks, context, say)
    script, plan, ranks = task.script, task.plan, task.ranks
    others = int(os.environ.get("WORLD_SIZE") or 1) - 1 if ranks == 1 else 0
    context = replace(task.context, facts=replace(task.context.facts, world_size=ranks))
    name = context.hardware.name
    key = key_of(script, gpu=name, gpus=ranks, versions=versions())
    evidence = stored(storage, key, script)
    user = dict(os.environ)  # before Ray changes it
    spread = _on_hosts(address, script, device, plan, max(ranks, others + 1), say)
    with nullcontext() if spread is None else spread as placed:
        if placed is not None:
            cards = placed.environment
        else:
            devices = max(ranks, plan.ranks)
            _check_devices(device, devices)
            cards = {} if others else _as_many_cards(device, devices, say)
        attempts = _Attempts(
            script=script,
            device=device,
            budget=task.memory,
            environment={**user, **cards, **launched(script, device, ranks)},
            ranks=ranks,
            hosts=None if placed is None else placed.hosts,
            resumes=resume is not None,
            verifies=not others,
            evidence=evidence,
            fallbacks=tuple(_verified(context, evidence)),
            searched=task.searched,
            log=task.log,
            say=say,
        )
        if verify_only:
            checked = attempts.check(plan)
            say(f"{plan}: {checked.refused or 'verified'}")
            return int(bool(checked.refused))
        if others > 0:
            return _single_attempt(attempts, plan, others)
        code, last, attempt = supervise(
            attempts.start, plan, context, resume=resume, say=say, budget=task.memory
        )
    if (attempt > 1 or last != plan) and code == 0:
        task.log.event(HELD, {"plan": last.levels, "attempts": attempt})
    return _exit_code(code)


@dataclass(frozen=True, slots=True)
class _Task:
    """What to run, and within which limits."""

    script: Script
    plan: Plan
    memory: int | None
    """Bytes of a device; ``None`` for no limit."""
    ranks: int
    """Processes to start."""
    context: FallbackContext
    log: _RunLog
    searched: Mapping[Plan, Measurement] = field(default_factory=dict)
    """What the search measured under each sound plan."""


def _searched(
    storage: str,
    script: Script,
    memory: int | None,
    ranks: int | None,
    context: FallbackContext,
    say: Say,
) -> _Task:
    """Return the best stored plan of ``script``, with what its study knows.

    If the last run ended under another plan, because memory ran out, that plan is returned.
    """
    result, which = best(storage, script, ranks=ranks, say=say)
    log = _RunLog(storage, result.study)
    study, trials = log.study()
    plan = result.plan
    say(f"{which}: {plan}, {speed(result.measurement)} samples/s when searched")
    if (held := log.plan_of_last_run(study)) is not None and held != plan:
        say(f"using {held} instead: the last run of the script finished under it")
        plan = held
    context = replace(
        context,
        allow=Fidelity[study.key.allow.upper()],
        facts=study.facts or Facts(),
        trials=trials,
        budget=study.budget,
        left_out=frozenset((strategy, level) for strategy, level, _ in study.left_out),
    )
    sound = ranked_sound(trials, study.budget)
    searched = {best_plan(trial): found for trial in sound if (found := trial.measurement)}
    return _Task(
        script=as_searched(script, study.script),
        plan=plan,
        memory=memory or study.key.memory,
        ranks=ranks or study.key.gpus or 1,
        context=context,
        log=log,
        searched={**searched, result.plan: result.measurement},
    )


def _single_attempt(attempts: _Attempts, plan: Plan, others: int) -> int:
    """Run one rank that another launcher has started, besides ``others``; return its exit code."""
    code = attempts.start(1, plan, ()).code
    if code:
        attempts.say(
            f"another launcher has started this rank and {others} more: no new attempt is made"
        )
    return _exit_code(code)


def _exit_code(code: int) -> int:
    """Return the exit code of this process: 128 + N if signal N ended the script."""
    return code if code >= 0 else 128 - code


def _on_hosts(
    address: str | None, script: Script, device: str, plan: Plan, processes: int, say: Say
) -> AbstractContextManager[Placed] | None:
    """Return what reserves devices for the plan's ranks on a cluster; ``None`` without one.

    ``processes``: started by a launcher. Raises ``UsageError`` if the plan has no ranks of ours.
    """
    if address is None:
        return None
    replicas = plan.ranks
    if processes > 1:
        raise UsageError(
            f"--address {address}: it spreads the ranks of a plan over hosts, and a launcher starts"
            f" {processes} ranks here; leave --address out"
        )
    if replicas == 1:
        raise UsageError(
            f"--address {address}: it spreads the ranks of a plan over hosts, and this plan has"
            f" none: {plan}; add them, or leave --address out"
        )
    return reserved(address, script, device, replicas, say)


def as_searched(script: Script, searched: Script) -> Script:
    """Return ``script`` with the launcher of the search, unless its own line names a launcher.

    Variables for options of Python on its line (``python -u``) are added.
    """
    if script.launcher:
        return script
    environment = dict(searched.environment) | dict(script.environment)
    return replace(
        script, environment=tuple(sorted(environment.items())), launcher=searched.launcher
    )


def _as_many_cards(device: str, ranks: int, say: Say) -> dict[str, str]:
    """Return the variable that shows the script as many cards as in the search: one for each rank.

    A script that sees more cards may use them all, which would be another training.
    """
    cards = meter.kind(device).cards()
    if len(cards) <= ranks:
        return {}
    entries = [card.entry for card in cards[:ranks]]
    say(f"{len(cards)} GPUs are visible; the script sees {', '.join(entries)}, as searched")
    return meter.kind(device).visible_only(entries)


def _verified(context: FallbackContext, evidence: Evidence) -> Iterator[tuple[Plan, int]]:
    """Yield the study's verified plans with their peaks in bytes, the fastest first.

    A plan is followed by those that checkpoint more blocks. The unchanged script comes last. An
    unknown peak is 0.
    """
    for trial in ranked_sound(context.trials, context.budget)[:FALLBACKS]:
        if trial.measurement is None:
            continue
        plan, more = best_plan(trial), _more_blocks(trial)
        found = {plan: trial.measurement.peak_device}
        found |= {each.plan(trial.plan).whole(context.facts): each.peak_device for each in more}
        found.setdefault(plan.all_blocks, 0)
        if evidence.holds(plan):  # each block is checked by itself, so more of them are too
            yield from found.items()
    yield Plan(), 0


def _more_blocks(trial: TrialRecord) -> list[Measurement]:
    """Return what a trial measured at its best size with more blocks, the fastest first."""
    last, report = trial.measurement, trial.report
    if last is None or report is None:
        return []
    same = (each for each in report.measurements if each.micro_batch == last.micro_batch)
    more = (each for each in same if more_blocks(each.checkpointing, last.checkpointing))
    return sorted(more, key=lambda each: each.seconds)


def _check_devices(device: str, ranks: int) -> None:
    """Raise ``UsageError`` if there are fewer GPUs than ranks; the CPU runs any number."""
    of_device = meter.kind(device)
    if not of_device.on_host and (found := len(of_device.cards())) < ranks:
        raise UsageError(f"{ranks} ranks need {ranks} GPUs, and {found} are visible: plan fewer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """Runs the script once for each attempt."""

    script: Script
    device: str
    budget: int | None
    environment: Mapping[str, str]
    ranks: int
    hosts: Hosts | None
    """Where the plan's ranks run, if they are on several hosts."""
    resumes: bool
    verifies: bool
    """Whether plans without evidence are verified first."""
    evidence: Evidence
    fallbacks: tuple[tuple[Plan, int], ...]
    """Plans under which the run may continue in the same process, with the peak of each."""
    searched: Mapping[Plan, Measurement]
    """As in ``_Task``."""
    log: _RunLog
    say: Say

    def check(self, plan: Plan) -> Checked:
        """Verify ``plan`` in a launch of its own, unless there is evidence."""
        if not self.verifies or self.evidence.holds(plan):
            return Checked()
        self.say(
            f"{plan} is verified first, in a short launch: the store has no check of it for this"
            " script and device"
        )
        return verify(
            self.script,
            plan,
            self.evidence,
            device=self.device,
            ranks=self.ranks,
            memory=self.budget,
            environment=self.environment,
            storage=self.log.storage,
            hosts=self.hosts,
        )

    def start(self, attempt: int, plan: Plan, more: tuple[str, ...]) -> RunEnd:
        """Run the script under ``plan`` to its end; implements ``supervisor.Start``."""
        checked = self.check(plan)
        if checked.refused:
            return RunEnd(code=1, shortage=None, refused=checked.refused, blamed=checked.blamed)
        script = replace(self.script, args=(*self.script.args, *more))
        others = [pair for pair in self.fallbacks if pair[0] != plan]
        peaks = dict(self.fallbacks)
        request = LaunchRequest(
            script=script,
            plans=(plan, *(other for other, _ in others)),
            peaks=(peaks.get(plan, 0), *(peak for _, peak in others)),
            device=self.device,
            budget=self.budget or 0,
            timeout=float("inf"),
            ranks=self.ranks,
            proven=self.evidence.proven,
        )
        spec = ChildSpec(mode="run", request=request, report_saves=self.resumes)
        environment = under(plan, self.environment)
        if self.budget is not None:
            environment |= meter.environment(self.device, self.budget, environment)
        if attempt > 1:  # the first attempt has the same environment as without autofit
            environment[ATTEMPT] = str(attempt)
        kills = oom_kills()
        with self._ready(spec, environment) as ready, started(ready) as running:
            reported = self._follow(running, request.plans)
            code = running.code
        if running.size > 1 and (failed := _failed_rank(running, code, reported.raised)):
            self.say(failed)
        self.log.keep_evidence(self.evidence.key, reported.proven)
        plan = reported.plan or plan
        called = reported.facts is not None and reported.facts.called
        if not (code or called) and any(strategy.changes_models for strategy, _ in plan):
            self.say(f"the script called no model with gradients: {plan} was not applied")
        shortage, raised = None, None
        if code and not running.signals:
            raised = reported.cause(running.first, oom_kills() - kills)
            shortage = self._shortage_of(code, raised, oom_kills() - kills)
        broken = raised is not None and shortage is None and raised.blamed is not None
        return RunEnd(
            code=code,
            shortage=shortage,
            facts=reported.facts,
            refused=raised.message if raised and broken else reported.refused if code else "",
            blamed=raised.blamed if raised and broken else reported.blamed,
            checkpoints=tuple(reported.saved),
            wrote=reported.wrote,
            plan=plan,
        )

    @contextmanager
    def _ready(self, spec: ChildSpec, environment: Mapping[str, str]) -> Iterator[list[RankTask]]:
        """Prepare the task of each process.

        Of a single-process script's replicas, only rank 0 leaves files and reports to trackers.
        """
        if spec.request.replicas == 1:
            yield tasks(spec, environment)
            return
        with TemporaryDirectory(prefix="autofit-", ignore_cleanup_errors=True) as folder:
            first, *others = tasks(replace(spec, scratch=folder), environment, self.hosts)
            first = replace(first, spec=replace(first.spec, scratch=None))
            quiet = [replace(o, environment={**o.environment, **TRACKERS_OFF}) for o in others]
            yield [first, *quiet]

    def _follow(self, running: Foreground, plans: Sequence[Plan]) -> _AttemptEvents:
        """Report and store the events of the run until its end."""
        reported = _AttemptEvents()
        for number, event in running.events():
            several = running.size > 1
            who, of = (f"rank {number}: ", {"rank": number}) if several else ("", {})
            match event:
                case Pressed(micro_batch=size):
                    self.say(
                        f"{who}memory is nearly full; continuing with {size} samples at a time"
                    )
                    self.log.event("pressed", asdict(event) | of)
                    reported.shrunk = True
                case InOnePiece():
                    self.say(f"{who}{_in_one_piece(event)}")
                    self.log.event("in one piece", asdict(event) | of)
                case Silent():
                    self.say(f"{who}{SILENT}")
                case FirstSteps() if found := self.searched.get(reported.plan or plans[0]):
                    alike = self.device != HOST or self.budget is not None
                    self.say(compared(event, found, peak=alike, shrunk=reported.shrunk))
                case Ran():
                    self.log.event("ran", asdict(event) | of)
                case Shortage(out_of_memory=found) if (found.micro_batch or 0) > 1:
                    self.say(f"{who}{where(found)}; continuing with smaller parts of the batch")
                    self.log.short_of_memory(found, fatal=False)
                    reported.shrunk = True
                case Learned():
                    if number == 0 or reported.facts is None:
                        reported.facts = event.facts
                case Saved():
                    reported.saved.append(event.path)
                    reported.wrote = True
                case Wrote():
                    reported.wrote = True
                case Proven():
                    reported.proven.append(self.evidence.add(event))
                case Replaced(plan=after, reason=reason):
                    before, reported.plan = reported.plan or plans[0], after
                    self.say(f"{before} cannot be used here: {reason}; continuing under {after}")
                    self.log.event("replaced", {"plan": before.levels, "reason": reason} | of)
                case Raised():
                    reported.raised[number] = event
                case PlanEnded(report=report) if report.verdict is Verdict.REFUSED:
                    reported.refused, reported.blamed = f"{who}{report.reason}", report.blamed
        return reported

    def _shortage_of(self, code: int, raised: Raised | None, kills: int) -> OutOfMemory | None:
        """Return where a process that failed ran out of memory; ``None`` if it did not."""
        if raised is None:
            found = classify_exit(code, oom_kills=kills)
            if found.kind is not ErrorKind.OOM:
                return None
            shortage = OutOfMemory(phase=PROCESS, message=found.message)
        elif raised.starved(kills):
            shortage = raised.out_of_memory
        else:
            return None
        self.log.short_of_memory(shortage, fatal=True)
        return shortage


def _in_one_piece(event: InOnePiece) -> str:
    """Say why calls run in one piece, and how."""
    if event.on_host:
        return (
            f"out of memory in {event.phase}: {event.reason}; calls of this size go on with what"
            " backward needs in host memory"
        )
    return f"a batch runs in one piece, as the script has it: {event.reason}"


def _failed_rank(running: Foreground, code: int, raised: Mapping[int, Raised]) -> str:
    """Say why the rank that failed first did; empty if it has printed that itself."""
    rank = running.first
    if rank is None or running.signals:
        return ""
    if rank in raised:
        silent = running.replicas and rank > 0
        return f"rank {rank} failed: {raised[rank].message}" if silent else ""
    if code < 0:
        name = signal.strsignal(-code)
        return f"rank {rank} was killed by signal {-code} ({name}); the other ranks were ended"
    return ""


@dataclass(slots=True)
class _AttemptEvents:
    """The events of all processes of an attempt."""

    raised: dict[int, Raised] = field(default_factory=dict)
    """Errors by rank, in the order of their arrival."""
    refused: str = ""
    """Why the plan was refused."""
    blamed: str | None = None
    facts: Facts | None = None
    saved: list[str] = field(default_factory=list)
    wrote: bool = False
    """Whether the script has opened a file for writing."""
    proven: list[Proven] = field(default_factory=list)
    plan: Plan | None = None
    """The plan under which the run continued; ``None`` if it did not change."""
    shrunk: bool = False
    """Whether the run has made its chunks smaller, because memory ran short."""

    def cause(self, first: int | None, kills: int) -> Raised | None:
        """Return the error that ended the run: any rank's OOM, else the error of rank ``first``.

        Ranks that wait for a failed one fail too, and their errors may arrive earlier.
        """
        starved = (each for each in self.raised.values() if each.starved(kills))
        return next(starved, None if first is None else self.raised.get(first))


@dataclass(frozen=True, slots=True)
class _RunLog:
    """Stores the events of a run; errors of the store do not end the training."""

    storage: str
    study_id: str | None = None

    def study(self) -> tuple[StudyRecord, tuple[Any, ...]]:
        """Return the study of the plan, and its finished trials."""
        assert self.study_id is not None
        with Store(self.storage, create=False) as store:
            study = store.study(self.study_id)
            return study, store.trials(study, state=State.FINISHED)

    def plan_of_last_run(self, study: StudyRecord) -> Plan | None:
        """Return the plan under which the last run since the last search finished, or ``None``."""
        with Store(self.storage, create=False) as store:
            events = store.events(HELD, study=study)
        if not events or events[-1].created < study.opened:
            return None
        try:
            return Plan.of(events[-1].payload["plan"])
        except (KeyError, UsageError):  # another version wrote it, or somebody edited it
            return None

    def keep_evidence(self, key: EvidenceKey, found: Sequence[Proven]) -> None:
        """Store the evidence that the run has found."""
        if found:
            with suppress(StorageError), Store(self.storage, create=False) as store:
                store.add_evidence(key, found)

    def short_of_memory(self, found: OutOfMemory, *, fatal: bool) -> None:
        """Store where memory ran out, and whether that ended the process."""
        self.event(
            "out_of_memory",
            {
                "phase": found.phase,
                "message": found.message,
                "requested": found.requested,
                "micro_batch": found.micro_batch,
                "line": found.place.line if found.place else None,
                "held": found.held,
                "fatal": fatal,
            },
        )

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Store an event."""
        try:
            with Store(self.storage, create=False) as store:
                study = store.study(self.study_id) if self.study_id else None
                store.record_event(kind, payload, study=study)
        except StorageError:
            return
