"""How far the cost model's peaks of plans that were not run yet are from the peaks measured later.

    python benchmarks/predictions.py STORE ...   # of searches that ran
    python benchmarks/predictions.py             # of searches replayed on the recorded grids

For each trial of a search, in order, the model is fitted to the trials before it. It then predicts
the peak of each measured size. The first trial is left out: no trial precedes it. Writes a
table to the standard output: errors are absolute, as shares of the measured peak.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
import samplers
from recorded import Grid

from autofit.analysis.candidates import SearchSnapshot
from autofit.analysis.cost_model import CostModel
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, TrialRecord
from autofit.strategies import Facts

SEEDS = 3
"""Searches of each grid under each budget."""


@dataclass(frozen=True, slots=True)
class Error:
    """The error of one predicted peak."""

    search: str
    plan: Plan
    measured: int
    """Bytes."""
    error: float
    """Predicted over measured bytes, less one."""


def errors(
    search: str,
    before: Sequence[TrialRecord],
    trial: TrialRecord,
    facts: Facts | None,
    *,
    cuda: bool,
    expectations: Mapping[tuple[str, str], tuple[float, float]] | None = None,
) -> Iterator[Error]:
    """Yield the error at each size of ``trial``, as predicted from the trials ``before``."""
    if trial.report is None or not any(each.measurement for each in before):
        return
    model = CostModel(before, facts, trial.budget, cuda=cuda, expectations=expectations)
    sizes = {each.plan(trial.plan): each for each in trial.report.measurements}
    for plan, each in sizes.items():
        _, peak = model.predict(plan, each.micro_batch)
        yield Error(search, plan, each.peak_device, peak / each.peak_device - 1.0)


def of_store(url: str) -> Iterator[Error]:
    """Yield the errors of all searches in a store."""
    with Store(url, create=False) as store:
        for study in store.studies():
            found = store.trials(study, state=State.FINISHED, purpose=Purpose.SEARCH)
            cuda = study.hardware.device == "cuda"
            for index, trial in enumerate(found):
                before = found[:index]
                yield from errors(study.script.target, before, trial, study.facts, cuda=cuda)


def of_grids() -> list[Error]:
    """Return the errors of searches replayed on the recorded grids."""
    found = list[Error]()
    for name, grid in samplers.grids().items():
        for budget in grid.budgets:

            def read(
                state: SearchSnapshot, search: str = f"{name}, {budget}", of: Grid = grid
            ) -> None:
                expected = samplers.expected_of(of)
                for index, trial in enumerate(state.finished):
                    before = state.finished[:index]
                    found.extend(
                        errors(search, before, trial, state.facts, cuda=True, expectations=expected)
                    )

            for seed in range(SEEDS):
                samplers.search(name, budget, "autofit", seed, read=read)
    return found


def table(found: Sequence[Error]) -> str:
    """Return a table: errors of each search, and of all."""
    lines = ["| search | peaks | median | 95th percentile |", "|---|---|---|---|"]
    for name in (*dict.fromkeys(each.search for each in found), "all"):
        own = np.abs([each.error for each in found if name in (each.search, "all")])
        lines.append(
            f"| {name} | {len(own)} | {np.median(own):.1%} | {np.quantile(own, 0.95):.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", nargs="*", help="a path or URL")
    given = parser.parse_args().store
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sys.stdout.write(
        table([each for url in given for each in of_store(url)] if given else of_grids()) + "\n"
    )


if __name__ == "__main__":
    main()
