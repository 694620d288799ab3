"""How exact ``autofit explain`` is: sums by kind, leaking lines, and savings of five techniques.

    python benchmarks/explain.py [--small] [--work vit] [--work gpt] [--work leak] [--seconds 240]

Each work is explained once. Then it runs under each of five techniques, and the savings are
compared with the predictions. Prints one JSON document, and a line for each launch to stderr.
``--small`` has models that a CPU trains in a second. After ``--seconds`` no launch begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.exceptions import AutofitError
from autofit.inspection.explanation import STEPS
from autofit.inspection.launches import LaunchOutcome, Target, inspect
from autofit.inspection.prediction import Predictor
from autofit.plan import Plan
from autofit.worker.cluster.versions import versions
from autofit.worker.records.inspection import Inspection, TensorKind
from autofit.worker.records.trials import Script

WORKS = Path(__file__).resolve().parent / "works"
BRIEF = Inspection(steps=1, plain=2)
"""Of a launch under a technique: only its peak is of interest."""


@dataclass(frozen=True, slots=True)
class Work:
    """A script and the techniques whose savings are predicted."""

    script: str
    techniques: tuple[dict[str, str], ...]


def _five(blocks: int, batch: int) -> tuple[dict[str, str], ...]:
    return (
        {"precision": "bf16"},
        {"checkpointing": str(blocks // 2)},
        {"checkpointing": "all"},
        {"micro_batch": str(batch // 2)},
    )


def works(*, small: bool) -> dict[str, Work]:
    """Return the works by name."""
    vit = (*_five(6, 8), {"precision": "bf16", "checkpointing": "all"})
    gpt = (*_five(4, 8), {"loss": "chunked"})
    if not small:
        vit = (*_five(24, 64), {"precision": "bf16", "checkpointing": "all"})
        gpt = (*_five(24, 4), {"loss": "chunked"})
    return {
        "vit": Work("vit_large.py", vit),
        "gpt": Work("gpt2_medium.py", gpt),
        "leak": Work("leaking.py", ()),
    }


def explained(work: Work, *, small: bool, in_time: Callable[[], bool]) -> dict[str, Any]:
    """Return the figures of a work."""
    args = ("--small",) if small else ()
    target = Target.on(Script(target=work.script, cwd=str(WORKS), args=args))
    leaks = not work.techniques
    began = time.monotonic()
    whole = inspect(target, Plan(), Inspection(steps=STEPS) if leaks else Inspection())
    inspected = whole.inspected
    if inspected is None or inspected.plain is None:
        return {"error": "it does not fit this device"}
    peak, plain = inspected.moments[0], inspected.plain
    kinds = {str(kind): peak.of(kind) for kind in TensorKind if peak.of(kind)}
    found: dict[str, Any] = {
        "device": target.hardware.name,
        "seconds": time.monotonic() - began,
        "phase": peak.phase,
        "kinds": kinds,
        "sum_bytes": sum(kinds.values()),
        "measured_allocated_bytes": plain.allocated,
        "sum_over_measured": sum(kinds.values()) / plain.allocated,
        "reserved_bytes": plain.reserved,
        "device_bytes": plain.device,
    }
    if leaks:
        found["leaks"] = [
            {
                "bytes_per_step": each.size,
                "made": each.made and each.made.line,
                "kept_by": each.holder,
                "kept_at": each.held_at and f"{each.held_at.line} {each.held_at.source}",
            }
            for each in inspected.growths
        ]
        return found
    found["techniques"] = [
        _technique(target, whole, Plan.of(levels)) for levels in work.techniques if in_time()
    ]
    return found


def _technique(target: Target, whole: LaunchOutcome, plan: Plan) -> dict[str, Any]:
    """Return predicted and measured bytes that a plan saves."""
    assert whole.inspected is not None, "it fits as it is"
    assert whole.inspected.plain is not None, "it fits as it is"
    timeline, before = whole.inspected.timeline, whole.inspected.plain.allocated
    began = time.monotonic()
    try:
        outcome = inspect(target, plan, BRIEF)
    except AutofitError as error:
        return {"plan": str(plan), "error": str(error)}
    seconds = time.monotonic() - began
    sys.stderr.write(f"{target.script.target}: {plan}: {seconds:.1f} s\n")
    if timeline is None or outcome.inspected is None or outcome.inspected.plain is None:
        reason = outcome.report.reason if outcome.report else "out of memory"
        return {"plan": str(plan), "error": reason}
    predicted = before - Predictor(timeline, whole.facts).peak(plan)
    measured = before - outcome.inspected.plain.allocated
    return {
        "plan": str(plan),
        "predicted_bytes": round(predicted),
        "measured_bytes": measured,
        "predicted_over_measured": predicted / measured if measured else None,
        "seconds": seconds,
    }


def main() -> int:
    """Print the figures of the works; return 0."""
    parser = argparse.ArgumentParser(description="Compare explain's figures with measurements.")
    parser.add_argument("--small", action="store_true", help="models for a CPU")
    parser.add_argument("--work", action="append", choices=[*works(small=True)])
    parser.add_argument("--seconds", type=float, default=240.0, help="no launch begins later")
    given = parser.parse_args()
    ends = time.monotonic() + given.seconds
    results: dict[str, Any] = {"versions": versions()}
    for name, work in works(small=given.small).items():
        if given.work is not None and name not in given.work:
            continue
        if time.monotonic() > ends:
            results[name] = {"error": "no time left"}
            continue
        results[name] = explained(work, small=given.small, in_time=lambda: time.monotonic() < ends)
    sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
