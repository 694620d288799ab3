"""Starts a session when the script imports torch, and reports how the script ended.

The session needs torch, and only the script may import torch first. This module handles the time
before that, and scripts that never import torch. It imports no torch itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from typing import TYPE_CHECKING

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.process import import_hooks
from autofit.worker.harness.process.saved_files import SavedFiles
from autofit.worker.harness.session import error_source
from autofit.worker.harness.torch_state import frames
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.short_of_memory import in_check
from autofit.worker.meter import Meter
from autofit.worker.oom.classifier import ErrorKind, classify
from autofit.worker.oom.handled import formatted
from autofit.worker.records.trials import (
    CHECK,
    ChildSpec,
    Finished,
    Learned,
    PlanEnded,
    Raised,
    TrialReport,
    Verdict,
)

if TYPE_CHECKING:
    from autofit.worker.harness.fake_gpu.card import FakeGpu
    from autofit.worker.harness.measurement.inspection import InspectedRun
    from autofit.worker.harness.measurement.trial import Trial
    from autofit.worker.harness.ranks.group import RankGroup
    from autofit.worker.harness.session.real_run import RealRun

SWITCHES = "autofit.resilience.switches"
BATCH_SIZES = "accelerate.utils.memory"


class ScriptLifecycle:
    """Runs a trial or a real run along with the script, and reports its end."""

    def __init__(self, spec: ChildSpec, reporter: Reporter, meter: Meter, started: float) -> None:
        self._spec = spec
        self._reporter = reporter
        self._meter = meter
        self._started = started
        self._session: Trial | InspectedRun | RealRun | None = None
        self._group: RankGroup | None = None
        self._fake_gpu: FakeGpu | None = None

    def wait_for_torch(self) -> None:
        """Start the session as soon as the script has imported torch."""
        if self._spec.mode == "run" and self._spec.saves_files:
            SavedFiles(self._reporter).attach(checkpoints=self._spec.report_saves)
        if self._spec.meeting is not None:
            random.seed(self._spec.meeting.seed)  # the script may draw before it imports torch
        import_hooks.after_import(SWITCHES, _switch_off)
        if self._spec.mode == "trial":
            import_hooks.after_import(BATCH_SIZES, _keep_batch_size)
        import_hooks.after_import("torch", self._start)

    def ended(self) -> None:
        """Report that the script ended without an error."""
        if self._session is not None:
            self._session.script_ended()
        else:
            self._reporter.send(Finished(steps=0, stopped=False))

    def stopped(self, error: BaseException) -> bool:
        """Return whether the session has already told the script to end."""
        return self._session is not None and self._session.over

    def raised(self, error: BaseException) -> None:
        """Report the error that ended the script, without our frames in its traceback."""
        if isinstance(error, NotTakenBack):
            error = error.error
        session = self._session
        index = session.index if session else 0
        measured = session.measured_plan if session else None
        held = self._meter.current() if "torch" in sys.modules else None
        checked = in_check(error)
        where = None if checked else frames.place(error)
        fault = error_source.fault_of(error, self._plan(index))
        culprit = (
            fault.strategy if fault else error_source.blamed(error.__traceback__, self._plan(index))
        )
        own = fault is None and error_source.raised_by_script(error.__traceback__)
        short = self._meter.short()
        found = classify(error)
        out_of_memory = found.kind is ErrorKind.OOM or (short and found.kind is ErrorKind.SUSPECT)
        if session is not None:
            session.script_failed(error, short=out_of_memory)
            if out_of_memory and self._reporter.rank and session.roots:
                # The leading rank may be killed before it reports what all have learned.
                self._reporter.send(Learned(facts=session.facts))
        frames.strip_our_frames(error)
        text = _traceback_text(error)
        if isinstance(error, Refused):
            report = TrialReport(
                index=index,
                plan=self._plan(index),
                verdict=Verdict.REFUSED,
                reason=str(error),
                blamed=error.strategy,
            )
            self._reporter.send(PlanEnded(report=report))
            return
        summary = formatted(error)
        message = summary if found.follows else found.message or summary
        if self._fake_gpu is not None and where is not None:
            message = f"{where.line}: {message}"  # the only trace of it where an estimate is shown
        self._reporter.send(
            Raised(
                index=index,
                kind=found.kind.value,
                message=message,
                traceback=text,
                phase=CHECK if checked else session.phase if session else "outside the model",
                requested=found.requested,
                blamed=culprit,
                own=own,
                corroborated=short,
                steps=session.steps if session else 0,
                place=where,
                held=held,
                started=session is None or bool(session.roots),
                room=self._meter.available() if "torch" in sys.modules else None,
                micro_batch=measured.chunk if measured else None,
                checkpointing=measured.blocks if measured else None,
                follows=found.follows,
            )
        )

    def _plan(self, index: int) -> Plan:
        plans = self._spec.request.plans if self._session is None else self._session.plans()
        return plans[index]

    def _start(self) -> None:
        self._connect()
        if self._spec.request.fake_gpu is not None:
            from autofit.worker.harness.fake_gpu.card import FakeGpu

            self._fake_gpu = FakeGpu(self._spec.request.fake_gpu)
            self._fake_gpu.attach()
        if self._spec.mode == "run":
            from autofit.worker.harness.session.real_run import RealRun

            self._session = RealRun(self._spec.request, self._reporter, self._meter, self._group)
        elif self._spec.request.inspection is not None:
            from autofit.worker.harness.measurement.inspection import InspectedRun

            seed_everything()
            self._session = InspectedRun(
                self._spec.request, self._reporter, self._meter, self._fake_gpu
            )
        else:
            from autofit.worker.harness.measurement.trial import Trial

            seed_everything()
            request = self._spec.request
            self._session = Trial(request, self._reporter, self._meter, self._started, self._group)
        self._session.start()

    def _connect(self) -> None:
        """Connect to the other ranks, if the script is one of several replicas."""
        spec = self._spec
        if spec.meeting is None:
            return
        from autofit.worker.harness.ranks.group import RankGroup

        count, device = spec.request.replicas, spec.request.device
        seed_everything(spec.meeting.seed)
        self._group = RankGroup.connect(spec.rank, count, spec.meeting, device)

    def wait_for_rank_0(self, reason: str) -> None:
        """Wait at the end of a replica's script for rank 0, whose end is that of the run.

        Ends this process once rank 0 has ended. Returns if rank 0 goes on without this rank, which
        is then an error: ``reason`` tells the other ranks how this script has ended.
        """
        spec, group = self._spec, self._group
        if spec.rank == 0 or spec.mode != "run" or group is None or group.over:
            return
        from autofit.worker.harness.ranks.group import Diverged, RankGone

        try:
            group.meet(f"the end of the script{reason}")
        except RankGone:
            os._exit(0)
        except Diverged:
            return


def _switch_off() -> None:
    """Disable the script's own ``@autofit.resilient``: it would hide shortages and add a plan."""
    sys.modules[SWITCHES].set_active(False)


def _keep_batch_size() -> None:
    """Stop Accelerate's ``find_executable_batch_size`` from hiding shortages in a trial."""
    vars(sys.modules[BATCH_SIZES])["should_reduce_batch_size"] = lambda error: False


def seed_everything(seed: int = 0) -> None:
    """Seed the random generators, so that trials of an unseeded script are comparable."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    import_hooks.after_import("numpy", lambda: sys.modules["numpy"].random.seed(seed))


def _traceback_text(error: BaseException) -> str:
    """Return what Python prints for an uncaught error.

    Python's own printer is used: the ``traceback`` module suggests names only from Python 3.12 on.
    """
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.__excepthook__(type(error), error, error.__traceback__)
    return text.getvalue()
