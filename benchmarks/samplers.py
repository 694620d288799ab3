"""How many device seconds samplers need to find a plan within 5 % of the best of a recorded grid.

    python benchmarks/samplers.py [--seeds N] [--gp-seeds N] [--work vit64 ...] [--out FOLDER]

Needs no GPU: ``recorded.py`` replays the measurements in ``results/grids/``. Each sampler searches
each grid under each budget, once a seed. All samplers get the same levels, begin with the script as
it is, and pay the same seconds. The seed sets the noise of the measurements, and the draws of
Optuna's samplers. Its GP takes part if SciPy is installed. Writes ``samplers.json`` and
``samplers.md``. Takes four minutes on two cores; with ``--seeds 80``, two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from recorded import (
    NOISE,
    STARTUP,
    WORKS,
    Grid,
    Replay,
    best,
    expectations,
    finished,
    load_all,
)

from autofit.analysis.acquisition import Prospect, choose, prospects
from autofit.analysis.candidates import AskingLaunch, SearchSnapshot, Situation
from autofit.analysis.pruning import waits_for_unsized
from autofit.plan import Plan
from autofit.space.catalogue import Space
from autofit.strategies import AS_IS, AUTO, NAMES
from autofit.tuning.optuna_study import choices_of, study_of
from autofit.tuning.sampler import AutofitSampler
from autofit.tuning.starts import FixedStarts
from autofit.units import format_size
from autofit.worker.records.trials import HORIZON

RESULTS = Path(__file__).resolve().parent / "results"
ENOUGH = 0.95
"""Share of the speed of the best plan at which a search has succeeded."""
FIRST = 4
"""Random trials of TPE and GP. Their default of 10 would leave little to choose on these grids."""
SEEDS = 10
"""Seeds that a process searches before it takes more work."""


class RecordedPlans(AutofitSampler):
    """autofit's sampler, offered the plans of a grid in place of those that a search combines.

    It skips no plan by rule, because such rules rest on figures of these very works. It does not
    stop either; ``stopped`` tells whether a search would have ended.
    """

    def __init__(self, grid: Grid) -> None:
        """Create a sampler that expects of each level what other works measured."""
        self._grid = grid
        self.stopped = False
        super().__init__(expectations=expected_of(grid))

    def choose(self, state: SearchSnapshot, launch: AskingLaunch | None) -> Prospect | None:
        """Return the choice among the plans of the grid that were not tried."""
        if state.level_sets is not None and not state.fits:
            return None
        tried = {trial.plan for trial in state.finished}
        left = [plan for plan in self._grid.distinct if plan not in tried]
        waiting = tuple(p for p in left if waits_for_unsized(p, state.finished))
        situation = Situation(
            state=replace(state, running=frozenset()),
            candidates=tuple(p for p in left if p not in waiting),
            waiting=waiting,
            finished=state.finished,
            fixed=launch.fixed if launch is not None else None,
            expectations=self._expectations,
        )
        chosen = choose(situation)
        if chosen is None and launch is None:
            self.stopped = True
            chosen = next(iter(prospects(situation)), None)
        return chosen


@cache
def expected_of(grid: Grid) -> dict[tuple[str, str], tuple[float, float]]:
    """Return what other works let one expect of the levels of a grid."""
    return expectations(grid, grids())


def _with_auto(sampler: BaseSampler) -> BaseSampler:
    """Return ``sampler`` for plans that find their micro-batch size: all but the first one."""
    return optuna.samplers.PartialFixedSampler({"micro_batch": AUTO}, sampler)


SAMPLERS: dict[str, Callable[[Grid, int], RecordedPlans | BaseSampler]] = {
    "autofit": lambda grid, seed: RecordedPlans(grid),
    "TPE": lambda grid, seed: _with_auto(
        optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST)
    ),
    "GP": lambda grid, seed: _with_auto(
        optuna.samplers.GPSampler(seed=seed, n_startup_trials=FIRST)
    ),
    "random": lambda grid, seed: _with_auto(optuna.samplers.RandomSampler(seed=seed)),
}
"""Each makes a sampler for a grid and a seed."""


@dataclass(frozen=True, slots=True)
class Search:
    """One search, up to the first plan that is fast enough."""

    grid: str
    budget: str
    sampler: str
    seed: int
    seconds: float
    """Device seconds."""
    launches: int
    alone: bool
    """Whether the sampler found a plan with ``ENOUGH`` of the best speed before it stopped.

    Only autofit's sampler stops. The search then goes on with what it expects the most of."""
    plans: tuple[str, ...]
    """The measured plans, in order."""


@cache
def grids() -> dict[str, Grid]:
    """Return every recorded grid."""
    return load_all()


def search(
    name: str,
    budget: str,
    sampler: str,
    seed: int,
    *,
    read: Callable[[SearchSnapshot], None] = lambda state: None,
) -> Search:
    """Search one grid under one budget with one sampler; ``read`` gets the state at the end."""
    grid = grids()[name]
    replay = Replay(grid, grid.budgets[budget], seed)
    enough = ENOUGH * best(grid, replay.budget)[1]
    own = SAMPLERS[sampler](grid, seed)
    levels = {each: (AS_IS,) for each in NAMES} | {n: (*e,) for n, e in grid.levels.items()}
    state = SearchSnapshot(
        space=Space(levels=(*levels.items(),)),
        finished=(),
        facts=grid.work.facts,
        budget=replay.budget,
        cuda=True,
    )
    draw, known = random.Random(seed), list[Plan]()
    fastest, reached, alone = 0.0, False, True
    while not reached and (left := [plan for plan in grid.plans if plan not in known]):
        plan = None if fastest else _start(state, left)
        if plan is not None:
            pass  # as in every search
        elif isinstance(own, RecordedPlans):
            chosen = None if replay.fixed is None else own.choice(state, AskingLaunch(replay.fixed))
            if chosen is None:
                if replay.fixed is not None:
                    replay.end()
                chosen = own.choice(state)
            plan = chosen.plan if chosen is not None else draw.choice(left)
            alone = alone and not own.stopped
        else:
            asked = Plan.of(study_of(state, own).ask({**choices_of(state)}).params)
            plan = asked if asked in left else _nearest(asked, left, draw)
        report = replay.measure(plan).report
        known.append(plan)
        state = replace(
            state, finished=(*state.finished, finished(report, len(known), replay.budget))
        )
        found = report.measurement
        if found is not None and (speed := found.charged(HORIZON)) > fastest:
            fastest, reached = speed, grid.speed(plan, found.micro_batch) >= enough
    read(state)
    plans = (*map(str, known),)
    return Search(
        name, budget, sampler, seed, replay.seconds, replay.launches, reached and alone, plans
    )


def _start(state: SearchSnapshot, left: Sequence[Plan]) -> Plan | None:
    """Return the fixed start that is due, as in every search, while no plan fits."""
    start, _ = FixedStarts(state).due(None)
    return start if start is not None and (start.neutral or start in left) else None


def _nearest(plan: Plan, left: Sequence[Plan], draw: random.Random) -> Plan:
    """Return the plan that differs from ``plan`` in the fewest levels; of several, any."""
    levels = plan.levels
    differ = {each: sum(each[name] != level for name, level in levels.items()) for each in left}
    return draw.choice([each for each in left if differ[each] == min(differ.values())])


# --- the command ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """Searches for one process."""

    grid: str
    budget: str
    sampler: str
    seeds: range

    def run(self) -> list[Search]:
        """Run them."""
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return [search(self.grid, self.budget, self.sampler, seed) for seed in self.seeds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one sampler needed for one grid under one budget: means over all seeds."""

    grid: str
    budget: str
    sampler: str
    seeds: int
    seconds: float
    """Device seconds."""
    launches: float
    trials: float
    alone: float
    """Share of the searches that found a plan with ``ENOUGH`` of the best speed by themselves."""

    @classmethod
    def of(cls, found: Sequence[Search]) -> Result:
        """Return the means of the searches of one grid, budget and sampler."""
        return cls(
            grid=found[0].grid,
            budget=found[0].budget,
            sampler=found[0].sampler,
            seeds=len(found),
            seconds=fmean(each.seconds for each in found),
            launches=fmean(each.launches for each in found),
            trials=fmean(len(each.plans) for each in found),
            alone=fmean(each.alone for each in found),
        )


def compare(names: Iterable[str], seeds: dict[str, int]) -> list[Result]:
    """Search each grid with each sampler of ``seeds``, as often as it says, on all cores."""
    work = [
        Chunk(name, budget, sampler, range(first, min(first + SEEDS, count)))
        for sampler, count in seeds.items()
        for name in names
        for budget in grids()[name].budgets
        for first in range(0, count, SEEDS)
    ]
    work.sort(key=lambda each: each.sampler != "GP")  # the slowest first
    found = dict[tuple[str, str, str], list[Search]]()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for each in pool.map(Chunk.run, work):
            key = each[0].grid, each[0].budget, each[0].sampler
            found.setdefault(key, []).extend(each)
    keys = ((n, b, s) for n in names for b in grids()[n].budgets for s in seeds)
    return [Result.of(found[key]) for key in keys]


def summary(results: Sequence[Result]) -> dict[str, Result]:
    """Return the means of each sampler over all grids and budgets."""
    found = dict[str, list[Result]]()
    for each in results:
        found.setdefault(each.sampler, []).append(each)
    return {
        sampler: Result(
            grid="all",
            budget="all",
            sampler=sampler,
            seeds=own[0].seeds,
            seconds=fmean(each.seconds for each in own),
            launches=fmean(each.launches for each in own),
            trials=fmean(each.trials for each in own),
            alone=fmean(each.alone for each in own),
        )
        for sampler, own in found.items()
    }


def page(document: dict[str, Any]) -> str:
    """Return the page for the results."""
    results = [Result(**each) for each in document["results"]]
    means = summary(results)
    lines = [
        "# Samplers",
        "",
        f"Written by `{document['command']}` in {document['seconds']:.0f} s.",
        "",
        "Each sampler searches the recorded grids of [`grids/`](grids/README.md).",
        f"A search ends when the fastest measured plan has {ENOUGH:.0%} of the best speed.",
        "The first table gives mean device seconds, and mean launches in brackets.",
        "The last column divides autofit's seconds by those of the better of TPE and GP.",
        "",
        "Compilation and steps cost what was recorded.",
        f"A launch costs {STARTUP:.0f} s more.",
        f"Measured times have {NOISE:.0%} noise. All samplers start with the script as it is.",
        f"TPE and GP then draw {FIRST} trials at random.",
        "If a proposal is known or was not recorded, the nearest untried plan takes its place.",
        "autofit's sampler expects of each level what works of other models measured.",
        "",
        f"| grid | budget | plans | best | {' | '.join(means)} | ratio |",
        f"|---|---|---|---|{'---|' * len(means)}---|",
    ]
    at = {(each.grid, each.budget, each.sampler): each for each in results}
    for name, budget in dict.fromkeys((each.grid, each.budget) for each in results):
        grid, own = grids()[name], {sampler: at[name, budget, sampler] for sampler in means}
        plan, speed = best(grid, grid.budgets[budget])
        lines.append(
            f"| {name} | {format_size(grid.budgets[budget])} | {len(grid.plans)} "
            f"| {plan}: {speed:.1f}/s "
            f"| {' | '.join(f'{each.seconds:.0f} ({each.launches:.1f})' for each in own.values())} "
            f"| {_ratio(own)} |"
        )
    cells = [f"**{mean.seconds:.0f} ({mean.launches:.1f})**" for mean in means.values()]
    lines += [
        f"| all | | | | {' | '.join(cells)} | **{_ratio(means)}** |",
        "",
        "Found alone: the sampler found such a plan before it would have ended the search.",
        "Only autofit's sampler ends a search. Here it then goes on.",
        "",
        "| sampler | seeds | device seconds | launches | trials | found alone |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {mean.seeds} | {mean.seconds:.0f} | {mean.launches:.1f} | {mean.trials:.1f} "
        f"| {mean.alone:.0%} |"
        for name, mean in means.items()
    ]
    return "\n".join([*lines, ""])


def _ratio(of: Mapping[str, Result]) -> str:
    """Return autofit's seconds, divided by those of the better of TPE and GP."""
    rivals = [of[name].seconds for name in ("TPE", "GP") if name in of]
    return f"{of['autofit'].seconds / min(rivals):.2f}" if rivals and "autofit" in of else ""


def main() -> None:
    """Compare the samplers and write the results."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--work", nargs="+", choices=WORKS, default=[*WORKS])
    default = [each for each in SAMPLERS if each != "GP" or find_spec("scipy")]
    parser.add_argument("--sampler", nargs="+", choices=SAMPLERS, default=default)
    parser.add_argument("--seeds", type=int, default=200, help="searches of each sampler")
    parser.add_argument(
        "--gp-seeds", type=int, default=20, help="searches of GP, which computes longest"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # NumPy and torch read it in the new processes
    seeds = {
        name: min(arguments.seeds, arguments.gp_seeds) if name == "GP" else arguments.seeds
        for name in arguments.sampler
    }
    started = time.monotonic()
    results = compare(arguments.work, seeds)
    document = {
        "command": " ".join(["python benchmarks/samplers.py", *sys.argv[1:]]),
        "seconds": time.monotonic() - started,
        "versions": {"optuna": optuna.__version__},
        "results": [asdict(each) for each in results],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "samplers.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "samplers.md").write_text(page(document))
    sys.stdout.write(page(document))


if __name__ == "__main__":
    main()
