"""Six plans for a script, by real steps in one process: what a search is measured against.

    python benchmarks/best_of_six.py --memory 24GiB [--eager] SCRIPT [-- ARGS]

bf16 and fused with: the whole batch, a half of it at a time, all blocks checkpointed; and each of
these with regional compile, unless ``--eager`` is given. A script with autocast of its own gets
them without bf16. Nothing is verified. Each line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from autofit.plan import Plan
from autofit.units import parse_size
from autofit.worker.launch.launcher import Control, launch
from autofit.worker.records.trials import (
    Answer,
    Asking,
    LaunchRequest,
    Learned,
    Script,
    Stage,
    TrialReport,
)

SECONDS = 500.0


def six(batch: int, *, rounds: bool) -> list[Plan]:
    """Return the plans for calls of ``batch`` samples; ``rounds``: the script enters autocast."""
    base = {"optimizer": "fused"} | ({} if rounds else {"precision": "bf16"})
    ways: tuple[dict[str, str], ...] = (
        {},
        {"micro_batch": str(max(1, batch // 2))},
        {"checkpointing": "all"},
    )
    plans = [Plan.of({**base, **way}) for way in ways]
    return [*plans, *(plan.replace(compile="regional") for plan in plans)]


def main() -> None:
    """Measure the plans, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", type=parse_size, required=True)
    parser.add_argument("--own-autocast", action="store_true")
    parser.add_argument("--eager", action="store_true", help="only the plans without compile")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    words = given.arguments[1:] if given.arguments[:1] == ["--"] else given.arguments
    script = Script(target=os.path.abspath(given.script), args=tuple(words), cwd=os.getcwd())
    request = LaunchRequest(
        script=script,
        plans=(Plan(),),
        device="cuda",
        budget=given.memory,
        timeout=SECONDS,
        converses=True,
        waits=True,
    )
    control, asked, batch = Control(), False, 1
    for event in launch(request, control=control):
        if isinstance(event, Learned):
            batch = event.facts.batch or 1
        elif isinstance(event, Asking):
            plans = () if asked else tuple(six(batch, rounds=given.own_autocast))
            plans = plans[: len(plans) // 2] if given.eager else plans
            control.answer(Answer(plans=plans, stage=Stage.STEPS, timeout=SECONDS))
            asked = True
        elif isinstance(event, TrialReport):
            found = event.measurement
            line: dict[str, str | float] = {
                "plan": str(event.plan),
                "verdict": str(event.verdict),
                "why": event.reason,
            }
            if found is not None:
                line |= {
                    "samples_per_second": round(found.samples_per_second, 2),
                    "peak_gib": round(found.peak_device / 2**30, 2),
                }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    sys.stderr.write(f"samples in a call: {batch}\n")


if __name__ == "__main__":
    main()
