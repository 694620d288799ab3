"""Writes the whole result as JSON, for programs: the stable format of ``autofit best``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from autofit.analysis.result import Result
from autofit.export.load import PLAN
from autofit.strategies import AS_IS
from autofit.worker.records.trials import Measurement, Script


def render(result: Result) -> str:
    """Return the document of ``result`` as indented JSON."""
    return json.dumps(document(result), indent=2) + "\n"


def document(result: Result) -> dict[str, Any]:
    """Return ``result`` as nested dictionaries of text and numbers.

    Later versions only add keys. Bytes and seconds are plain numbers. ``micro_batch`` is the
    largest chunk in samples. ``baseline`` has its verdict, and figures if it was measured.
    """
    return {
        PLAN: result.plan.levels,
        **figures(result.measurement),
        "confirmed": result.confirmed,
        "budget_bytes": result.budget,
        "fidelity": result.fidelity,
        "baseline": _baseline(result),
        "step_variation": result.variation,
        "trials": result.trials,
        "launches": result.launches,
        "launches_out_of_memory": result.launches_out_of_memory,
        "search_seconds": result.search_seconds,
        "seconds_by_phase": dict(result.seconds_by_phase),
        "study": result.study,
        "script": script_document(result.script),
        "ranks": result.ranks,
        "devices": result.devices,
        "hardware": _hardware(result),
        "versions": dict(result.versions),
    }


def script_document(script: Script) -> dict[str, Any]:
    """Return a script and its arguments."""
    return {
        **asdict(script),
        "args": list(script.args),
        "environment": dict(script.environment),
        "launcher": list(script.launcher),
    }


def figures(measurement: Measurement) -> dict[str, Any]:
    """Return the figures of a plan."""
    return {
        "samples_per_second": measurement.samples_per_second,
        "samples_per_second_spread": measurement.samples_per_second_spread,
        "step_seconds": measurement.seconds,
        "peak_bytes": measurement.peak_device,
        "peak_reserved_bytes": measurement.peak_reserved,
        "peak_allocated_bytes": measurement.peak_allocated,
        "rank_peak_bytes": list(measurement.rank_peaks),
        "effective_batch": measurement.effective_batch,
        "micro_batch": measurement.micro_batch,
    }


def _baseline(result: Result) -> dict[str, Any]:
    verdict = {"verdict": str(result.baseline_verdict)}
    if result.baseline is None:
        return verdict
    levels = dict.fromkeys(result.plan.levels, AS_IS)
    fixed = {PLAN: levels, "budget_bytes": result.budget, "fidelity": "exact"}
    return {**verdict, **fixed, **figures(result.baseline)}


def _hardware(result: Result) -> dict[str, Any]:
    capability = result.hardware.capability
    return {
        **asdict(result.hardware),
        "capability": None if capability is None else ".".join(map(str, capability)),
    }
