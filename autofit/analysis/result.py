"""The best of a study: what ``autofit best`` exports and ``autofit run`` uses. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.facts import Hardware
from autofit.plan import Plan
from autofit.worker.records.trials import Measurement, Script, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The best of a study: what ``autofit best`` exports and ``autofit run`` uses."""

    study: str
    script: Script
    hardware: Hardware
    budget: int
    plan: Plan
    """With the micro-batch size as a number where the batch is split."""
    measurement: Measurement
    fidelity: str
    baseline: Measurement | None
    """The script as it is, where it was measured."""
    baseline_verdict: Verdict
    trials: int
    launches: int
    launches_out_of_memory: int
    search_seconds: float
    versions: dict[str, str]
    """Of autofit, torch, Python and the packages that matter to the figures."""
    ranks: int = 1
    """Processes of each training, one a device."""
