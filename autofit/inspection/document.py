"""An explanation, a check and what fits, as plain data for ``--json``. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autofit.inspection.card_fits import FittingPlan, sizes_by_kind
from autofit.inspection.check import Check
from autofit.inspection.explanation import Explanation
from autofit.inspection.fitting import Fit
from autofit.inspection.techniques import Technique
from autofit.worker.records.inspection import Growth, Part, SourceLine, TensorKind
from autofit.worker.records.trials import OutOfMemory


def explanation_document(found: Explanation) -> dict[str, Any]:
    """Return an explanation as plain data."""
    plain = found.inspected.plain
    return {
        "script": asdict(found.script),
        "hardware": asdict(found.hardware),
        "budget_bytes": found.budget,
        "plan": found.plan.levels,
        "fits": found.out_of_memory is None and found.failed is None,
        "out_of_memory": _shortage(found.out_of_memory),
        "kinds_out_of_memory": (
            _kinds(sizes_by_kind(found.failed.parts)) if found.failed else None
        ),
        "peak_bytes": sum(found.by_kind.values()),
        "peak_allocated_bytes": found.peak.peak,
        "measured_allocated_bytes": plain.allocated if plain else None,
        "phase": found.peak.phase,
        "operation": found.peak.operation,
        "kinds": _kinds(found.by_kind),
        "phases": {moment.phase: moment.peak for moment in found.inspected.moments},
        "parts": [_part(part) for part in found.parts],
        "techniques": [_technique(each) for each in found.techniques],
        "unsplittable": found.unsplittable,
        "cards": [
            {
                "name": card.name,
                "total_bytes": card.size,
                "plan": None if card.advised is None else card.advised.levels,
            }
            for card in found.cards
        ],
        "growths": [_growth(each) for each in found.growths] if found.follows_leaks else None,
    }


def fit_document(found: Fit) -> dict[str, Any]:
    """Return which cards a script fits as plain data."""

    def plan(each: FittingPlan | None) -> dict[str, Any] | None:
        if each is None:
            return None
        return {
            "plan": dict(each.plan.changes),
            "peak_bytes": each.peak,
            "margin_bytes": each.margin,
            "kinds": dict(each.kinds),
        }

    plain = found.inspected.plain
    return {
        "script": asdict(found.script),
        "peak_bytes": sum(found.by_kind.values()),
        "peak_allocated_bytes": found.inspected.moments[0].peak,
        "peak_reserved_bytes": plain.reserved if plain else None,
        "kinds": _kinds(found.by_kind),
        "stopped": found.stopped or None,
        "tries_kernels": found.inspected.tries_kernels,
        "cards": [
            {
                "name": card.name,
                "budget_bytes": card.budget,
                "as_it_is": plan(card.as_it_is),
                "least_change": plan(card.plan),
                "likely_fastest": [dict(each.changes) for each in card.fastest],
            }
            for card in found.cards
        ],
        "guesses": [
            {"line": _line(each.place), "count": each.count, "decides": each.decides}
            for each in found.guesses
        ],
    }


def check_document(found: Check) -> dict[str, Any]:
    """Return a check as plain data."""
    return {
        "script": asdict(found.script),
        "fits": found.fits,
        "budget_bytes": found.memory,
        "peak_bytes": found.peak,
        "out_of_memory": _shortage(found.out_of_memory),
        "last_peak_bytes": found.last_peak,
        "last": None if found.last is None else found.last.isoformat(),
        "grown": [
            {
                "module": each.module,
                "before_bytes": each.before,
                "after_bytes": each.after,
                "kinds": list(each.kinds),
            }
            for each in found.grown
        ],
        "seconds": found.seconds,
    }


def _kinds(sizes: Mapping[TensorKind, int]) -> dict[str, int]:
    return {str(kind): size for kind, size in sizes.items()}


def _part(part: Part) -> dict[str, Any]:
    return {
        "kind": str(part.kind),
        "bytes": part.size,
        "tensors": part.count,
        "module": part.module,
        "line": _line(part.place),
        "source": part.place.source if part.place else None,
        "library_line": _line(part.library),
        "library_source": part.library.source if part.library else None,
        "operation": part.operation,
    }


def _technique(each: Technique) -> dict[str, Any]:
    return {
        "plan": dict(each.plan.changes),
        "freed_bytes": each.freed,
        "peak_bytes": each.peak,
        "slowdown": each.slowdown,
        "fidelity": str(each.fidelity),
        "basis": str(each.basis),
        "predicted_freed_bytes": each.predicted_freed,
    }


def _growth(each: Growth) -> dict[str, Any]:
    return {
        "bytes_per_step": each.size,
        "tensors_per_step": each.count,
        "line": _line(each.made),
        "source": each.made.source if each.made else None,
        "module": each.module,
        "operation": each.operation,
        "kept_by": each.holder or None,
        "kept_at": _line(each.held_at),
    }


def _shortage(short: OutOfMemory | None) -> dict[str, Any] | None:
    if short is None:
        return None
    return {
        "phase": short.phase,
        "requested_bytes": short.requested,
        "line": _line(short.place),
        "message": short.message,
    }


def _line(place: SourceLine | None) -> str | None:
    return None if place is None else place.line
