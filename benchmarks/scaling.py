"""What the cost model expects of more cards than were measured: a simulation, not a measurement.

    python benchmarks/scaling.py > benchmarks/results/scaling.md

The model is fitted to one measured run of ``examples/decoder_lm.py`` on H200s, and predicts the
others. Where they were measured too (``cards.md``), the table has both figures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from grid import EXAMPLES, command_line

from autofit.analysis.cost_model import CostModel
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.space.static_memory import Static
from autofit.storage import Owner, Purpose, State, TrialRecord
from autofit.units import format_size
from autofit.worker.records.trials import Measurement, TrialReport, Verdict

sys.path.insert(0, str(EXAMPLES))
from decoder_lm import PRESETS, build_model

GIB = 1 << 30
BUDGET = 132 * GIB
"""Of one H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run."""

    preset: str
    plan: Plan
    rate: float
    """Samples a second."""
    peak: int
    """Bytes on each card."""
    others: dict[str, float]
    """Samples a second of other runs on two cards, by sharding."""


FAST = Plan.of({"precision": "bf16", "optimizer": "fused"})
SAVED = FAST.replace(checkpointing="all", ranks="2", sharding="full")
RUNS = (
    Run(
        preset="1.1b",
        plan=FAST,
        rate=24.5,
        peak=round(107.7 * GIB),
        others={"as_is": 43.1, "zero2": 42.6},
    ),
    Run(preset="7b", plan=SAVED, rate=7.41, peak=round(76.8 * GIB), others={}),
)


def facts(preset: str) -> Facts:
    """Return the facts of the decoder of this size, whose weights are float32."""
    sizes = PRESETS[preset]
    parameters = sum(each.numel() for each in build_model(sizes, "meta").parameters())
    root = RootFacts(
        name="LlamaForCausalLM",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        trainable=parameters,
        dtype="float32",
        batch=sizes.batch_size,
        blocks=sizes.layers,
        transformers=True,
    )
    return Facts(roots=(root,), optimizers=("AdamW",), stepped=True, gradients_read=True)


def trial(run: Run, batch: int) -> TrialRecord:
    """Return the run as a finished trial, which the model is fitted to."""
    figures = Measurement(
        micro_batch=run.plan.samples(batch),
        effective_batch=batch,
        step_seconds=(batch / run.rate,) * 5,
        peak_allocated=run.peak,
        peak_reserved=run.peak,
        peak_device=run.peak,
    )
    report = TrialReport(
        index=0, plan=run.plan, verdict=Verdict.MEASURED, best=run.plan, measurements=(figures,)
    )
    return TrialRecord(
        id=1,
        study="simulated",
        number=0,
        purpose=Purpose.SEARCH,
        state=State.FINISHED,
        plan=run.plan,
        launch=0,
        owner=Owner.current(),
        budget=BUDGET,
        versions={},
        created=datetime.now(UTC),
        report=report,
    )


def rows(run: Run) -> list[str]:
    """Return the rows of a table: the measured run, then what is expected of others."""
    known, batch = facts(run.preset), PRESETS[run.preset].batch_size
    model = CostModel((trial(run, batch),), known, BUDGET, cuda=True, link="nvlink")
    found = [f"| {run.preset} | {run.plan} | measured | {run.rate:.1f} | {_gib(run.peak)} |"]
    for ranks in (2, 4, 8):
        shardings = ("as_is", "zero1", "zero2") if run.preset == "1.1b" else ()
        for sharding in (*shardings, "full", *(("hybrid",) if ranks > 2 else ())):
            plan = run.plan.replace(ranks=str(ranks), sharding=sharding)
            if plan == run.plan:
                continue
            seconds, peak = model.predict(plan, batch // ranks)
            measured = run.others.get(sharding) if ranks == 2 else None
            rate = f"{batch / seconds:.1f}" + (f" (measured: {measured})" if measured else "")
            found.append(f"| {run.preset} | {plan} | simulated | {rate} | {_gib(peak)} |")
    return found


def large(preset: str, ranks: int) -> str:
    """Return a row of a model that needs all cards: its weights, gradients and state on each."""
    plan = Plan.of({"weights": "bf16_master", "checkpointing": "all"})
    plan = plan.replace(ranks=str(ranks), sharding="full")
    return f"| {preset} | {ranks} | {plan} | {_gib(Static.of(facts(preset)).under(plan))} |"


def _gib(size: float) -> str:
    return format_size(round(size))


def main() -> None:
    """Print both tables."""
    torch.set_default_device("meta")
    lines = [
        "# Four and eight cards, simulated",
        "",
        f"Written by `{command_line()}`. Only the figures marked *measured* were measured, on",
        "H200s. The cost model is fitted to the measured row of each model, and predicts others.",
        "Four H100s made 68.4 samples/s with `ranks 4`, and 66.1 with `zero1` (`cards.md`).",
        "Both are faster than predicted: the model expects too much time for sending.",
        "",
        "| model | plan | | samples/s | peak of a card |",
        "|---|---|---|---|---|",
        *(row for run in RUNS for row in rows(run)),
        "",
        "Models that need all cards. Activations and what is gathered come on top.",
        "",
        "| model | cards | plan | weights, gradients and optimizer state on each card |",
        "|---|---|---|---|",
        large("13b", 4),
        large("30b", 8),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
