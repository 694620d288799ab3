"""Pairs of changed levels, on two of the examples, in real launches: a fixed part of them all.

``test_pairs.py`` tries every one in the process of the tests.

Each is left out before a launch, with its reason, or measured, once it has been proven beside
the plain model; or a strategy refuses it there, and says why.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.space.pairs import LevelPair, pairs
from autofit.strategies import Facts, Strategy
from autofit.strategies.compile import Compile
from autofit.worker import meter
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchRequest,
    Learned,
    Script,
    TrialReport,
    Verdict,
)

ONE_IN = {"cpu": 40, "cuda": 12}
"""Of so many pairs one is launched: each that starts otherwise takes a process of its own."""
SCRIPTS = {
    "decoder_lm.py": ("--preset", "tiny", "--steps", "1000"),
    "image_classifier.py": ("--preset", "tiny", "--epochs", "100"),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_pair_runs_or_is_refused_with_its_reason(
    script: str, device: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = meter.hardware(device)
    if device == "cpu":  # where a search would not compile, though it can be done
        monkeypatch.setattr(Compile, "unavailable", Strategy.unavailable)
    facts = learned(script, device, root)
    possible: dict[Plan, Plan] = {}
    for plan in map(plan_of, chosen(device)):
        reasons = (left_out(s, plan, hardware, facts) for s, _ in plan)
        reason = clash(plan) or next(filter(None, reasons), None)
        if reason is None:
            possible[plan] = plan.fixed
        else:
            assert reason.isprintable()
    seen: dict[Plan, TrialReport] = {}
    for fixed in dict.fromkeys(possible.values()):
        waiting = [plan for plan in possible if possible[plan] == fixed]
        while waiting:
            reports = list(reported(script, waiting, device, root))
            assert reports, "a launch says something of its first plan"
            seen |= {report.plan: report for report in reports}
            waiting = [plan for plan in waiting if plan not in seen]
    for plan, report in seen.items():
        assert report.verdict in (Verdict.MEASURED, Verdict.REFUSED), f"{plan}: {report}"
        assert report.verdict is Verdict.MEASURED or report.reason, plan
    assert len(seen) == len(possible)
    measured = {plan for plan, report in seen.items() if report.verdict is Verdict.MEASURED}
    assert any(plan["compile"] == "regional" for plan in measured)


def chosen(device: str) -> list[LevelPair]:
    """Return the pairs that are launched: the same each time, whatever joins the catalogue."""
    named = {"+".join((*pair.one, *pair.other)): pair for pair in pairs()}
    part = [p for name, p in named.items() if zlib.crc32(name.encode()) % ONE_IN[device] == 0]
    compiled = {"precision+bf16+compile+regional", "micro_batch+auto+compile+regional"}
    return [*dict.fromkeys([*part, *(named[name] for name in compiled)])]


def plan_of(pair: LevelPair) -> Plan:
    """Return the plan of a pair, with numbers in place of ``auto``."""
    return pair.plan.sized(4, "2")


def left_out(strategy: Strategy, plan: Plan, hardware: meter.Hardware, facts: Facts) -> str | None:
    level = plan[strategy.name]
    return strategy.unavailable(level, hardware) or strategy.inapplicable(level, facts)


def request_of(script: str, plans: list[Plan], device: str, root: Path) -> LaunchRequest:
    return LaunchRequest(
        script=Script(
            target=str(root / "examples" / script),
            args=SCRIPTS[script],
            cwd=str(root),
        ),
        plans=tuple(plans),
        device=device,
        budget=6 << 30,
        timeout=1800,
        steps=2,
    )


def learned(script: str, device: str, root: Path) -> Facts:
    """Return what a first launch learns."""
    facts = Facts()
    for event in launch(request_of(script, [Plan()], device, root)):
        if isinstance(event, Learned):
            facts = event.facts
    return facts


def reported(script: str, plans: list[Plan], device: str, root: Path) -> Iterator[TrialReport]:
    for event in launch(request_of(script, plans, device, root)):
        if isinstance(event, TrialReport):
            yield event
        if isinstance(event, LaunchEnded):
            print(event.output[-2000:])
