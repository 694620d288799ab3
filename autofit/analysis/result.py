"""The record of a study's best plan. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.facts import Facts, Hardware
from autofit.plan import Plan
from autofit.units import format_size
from autofit.worker.records.phases import Seconds
from autofit.worker.records.trials import Measurement, Script, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The best plan of a study: ``autofit best`` exports it and ``autofit run`` uses it."""

    study: str
    """Identifier of the study."""
    script: Script
    hardware: Hardware
    budget: int
    """Bytes per device."""
    plan: Plan
    """The plan; its micro-batch size is a number if the batch is split."""
    measurement: Measurement
    """The figures of the plan."""
    confirmed: bool
    """Whether these figures are from a confirmation run, in a new process."""
    fidelity: str
    """How much the plan may change the training, as ``str(Fidelity)``."""
    baseline: Measurement | None
    """The figures of the script without a plan, if it was measured."""
    baseline_verdict: Verdict
    variation: float
    """How much the figures vary, as a share: see ``analysis/verdicts.py``."""
    trials: int
    launches: int
    """Processes started."""
    launches_out_of_memory: int
    """Processes that ended because memory ran out."""
    search_seconds: float
    versions: dict[str, str]
    """Releases of autofit, torch, Python and other packages that affect the figures."""
    seconds_by_phase: Seconds = ()
    """Where the time went, in all trials and outside of them: see ``worker/records/phases.py``."""
    ranks: int = 1
    """Processes of each training, one a device; those of a plan's ``ranks`` do not count."""
    facts: Facts | None = None
    """What the search knows of the script; ``None`` if no launch reached the model."""
    elsewhere: tuple[Plan, Measurement] | None = None
    """The fastest plan on another number of devices that was measured, and its figures."""

    def __str__(self) -> str:
        """Return the speed, the peak on the device and the plan, in one line."""
        speed = f"{self.measurement.samples_per_second:.4g} samples/s"
        peak = format_size(self.measurement.peak_device)
        return f"{speed} in {peak} of {format_size(self.budget)}: {self.plan}"

    @property
    def devices(self) -> int:
        """Number of devices of the training under the plan."""
        return max(self.ranks, self.plan.ranks)
