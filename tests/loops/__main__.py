"""Runs many random loops under random plans: ``python -m tests.loops --count 2000``.

Each block of loops has a number, and a file keeps the next one, so that every run brings new
loops. A loop that fails is shrunk, and written to a folder together with its plan.
``python -m tests.loops --again FILE`` runs such a file again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from autofit.plan import Plan
from tests.loops.drawing import SIZES, Loop, drawn, over
from tests.loops.judging import Kind, Outcome, under_plan
from tests.loops.nursery import ROOT, Ended, Job, Nursery
from tests.loops.writing import write

CACHE = ROOT / ".cache" / "loops"
UNDER = "# under "
"""Begins the line of a failing source that holds its plan as JSON."""


@dataclass
class Bench:
    """Runs loops, and keeps what plain Python made of them."""

    nursery: Nursery
    plain: dict[str, Ended] = field(default_factory=dict)

    def outcome(self, loop: Loop) -> Outcome:
        """Run a loop under its plan."""
        source = write(loop.recipe)
        if source not in self.plain:
            self.plain = {source: self.nursery.run(Job(source=source))}
        plain = self.plain[source]
        return under_plan(self.nursery, source, loop.plan, plain=plain, draws=loop.recipe.draws)

    def shrunk(self, loop: Loop, outcome: Outcome) -> tuple[Loop, Outcome]:
        """Return the plainest loop found that fails in the same way."""
        smaller = chain(loop.guesses(), loop.smaller())
        while (each := next(smaller, None)) is not None:
            found = self.outcome(each)
            if found.group == outcome.group:
                loop, outcome, smaller = each, found, chain(each.smaller())
        return loop, outcome


@dataclass
class Tally:
    """What became of all loops."""

    kinds: Counter[str] = field(default_factory=Counter)
    levels: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[str]] = field(default_factory=dict)
    """The loops of each class of failures."""
    least: dict[str, tuple[Loop, str]] = field(default_factory=dict)
    """The plainest loop of each class, and its group."""

    def known(self, loop: Loop, outcome: Outcome) -> str | None:
        """Return a class whose plainest loop is contained in ``loop``, which fails as it does."""
        for name, (small, group) in self.least.items():
            if group == outcome.group and small.within(loop):
                return name
        return None

    def add(self, loop: Loop, outcome: Outcome) -> None:
        """Count a loop."""
        self.kinds[outcome.kind] += 1
        for name, _ in loop.plan.changes or (("as it is", ""),):
            self.levels.setdefault(name, Counter())[outcome.kind] += 1
        if outcome.kind is Kind.REFUSED:
            self.refusals[re.sub(r"[\d.]+e[+-]\d+|\d+", "#", outcome.detail)] += 1

    def __str__(self) -> str:
        lines = [", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())]
        for name, kinds in sorted(self.levels.items()):
            told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            lines.append(f"  {name:20} {told}")
        lines += ["refused:"] if self.refusals else []
        lines += [f"  {count:4} {reason}" for reason, count in self.refusals.most_common(15)]
        lines += ["failed:"] if self.classes else []
        for name, found in sorted(self.classes.items(), key=lambda each: -len(each[1])):
            lines.append(f"  {len(found):4} {name}")
        return "\n".join(lines)


def _class_of(loop: Loop, outcome: Outcome) -> str:
    levels = ", ".join(name for name, _ in loop.plan.changes) or "as it is"
    features = [f"{n}={choice}" for n, choice in loop.recipe.changes if n not in SIZES]
    return f"{outcome.group} | {levels} | {', '.join(features)}"


def _keep(folder: Path, name: str, loop: Loop, outcome: Outcome) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (re.sub(r"\W+", "-", name)[:120] + ".py")
    path.write_text(
        f"# {outcome.kind}: {outcome.detail}\n# {loop}; its trial: {outcome.trial}\n"
        f"{UNDER}{json.dumps(dict(loop.plan.changes))} {int(loop.recipe.draws)}\n"
        + write(loop.recipe)
    )
    return path


def _found(
    loop: Loop, outcome: Outcome, bench: Bench, tally: Tally, options: argparse.Namespace
) -> str:
    """Shrink and keep a loop that fails in a way not seen so far; return its class."""
    if options.shrink:
        loop, outcome = bench.shrunk(loop, outcome)
    name = _class_of(loop, outcome)
    if name not in tally.least:
        tally.least[name] = loop, outcome.group
        print(f"{name}\n    {outcome.detail}; its trial: {outcome.trial}", flush=True)
        _keep(options.folder, name, loop, outcome)
    return name


def _again(path: Path) -> int:
    source = path.read_text()
    (line,) = (each for each in source.splitlines() if each.startswith(UNDER))
    levels, draws = line.removeprefix(UNDER).rsplit(" ", 1)
    with Nursery() as nursery:
        outcome = under_plan(nursery, source, Plan.of(json.loads(levels)), draws=draws == "1")
    print(f"{outcome.kind}: {outcome.detail}\nits trial: {outcome.trial}")
    return int(outcome.kind.bad)


def _run(options: argparse.Namespace) -> int:
    marker = CACHE / "next"
    number = options.block
    if number is None:
        number = int(marker.read_text()) if marker.exists() else 0
    tally, done, started = Tally(), 0, time.monotonic()
    with Nursery() as nursery:
        bench = Bench(nursery)
        while done < options.count and time.monotonic() - started < options.seconds:
            block = drawn(number)[: options.count - done]
            for loop in over(options.ranks, block) if options.ranks > 1 else block:
                done += 1
                outcome = bench.outcome(loop)
                tally.add(loop, outcome)
                if outcome.kind.bad:
                    name = tally.known(loop, outcome) or _found(
                        loop, outcome, bench, tally, options
                    )
                    tally.classes.setdefault(name, []).append(str(loop))
            number += 1
            if options.block is None:
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.write_text(str(number))
            took = time.monotonic() - started
            print(f"{done} loops, {took:.0f} s: {str(tally).splitlines()[0]}", flush=True)
    print(tally)
    return int(bool(tally.classes))


def main() -> int:
    """Return 1 if a loop has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=200, help="loops to run")
    parser.add_argument("--block", type=int, help="first block; the next new one if not given")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share each loop")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as long")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    parser.add_argument("--folder", type=Path, default=CACHE / "failures")
    parser.add_argument("--again", type=Path, help="a source kept in that folder: run it alone")
    options = parser.parse_args()
    return _again(options.again) if options.again else _run(options)


if __name__ == "__main__":
    raise SystemExit(main())
