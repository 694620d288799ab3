"""Figures in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.plan import Plan
from autofit.strategies import Facts, RootFacts
from autofit.tuning.notices import StudyStarted
from autofit.view import words
from autofit.worker.records.trials import (
    Measurement,
    OutOfMemory,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick
MIB = 1 << 20


@pytest.mark.parametrize(
    ("speed", "said"),
    [(0.0123, "0.012"), (9.99, "9.990"), (9.996, "10.0"), (99.94, "99.9"), (12345.6, "12346")],
)
def test_rate(speed: float, said: str) -> None:
    assert words.rate(speed) == said


def test_change() -> None:
    assert [words.change(factor) for factor in (1.131, 0.84, 2.5)] == ["+13 %", "-16 %", "+150 %"]


def test_count() -> None:
    found = [words.count(n) for n in (999, 12_345, 110_000_000, 1_100_000_000)]
    assert found == ["999", "12 K", "110.0 M", "1.10 B"]


def test_a_peak_is_told_in_the_budgets_unit() -> None:
    assert words.of_budget(24 << 30, 512 * MIB) == "0.50 of 24.0 GiB"
    assert words.of_budget(300 * MIB, 2 * MIB) == "2.0 of 300.0 MiB"
    assert words.of_budget(1000, 500) == "0.49 of 0.98 KiB"
    assert words.of_budget(24 << 30, 9 * MIB) == "0.009 of 24.0 GiB"
    assert words.of_budget(24 << 30, 100) == "<0.001 of 24.0 GiB"
    assert words.in_unit_of(24 << 30, 0) == "0.0"


def test_a_resumed_study_says_so(opened: StudyStarted) -> None:
    line = words.device_line(replace(opened, resumed=4, asked=False, allow="exact"))
    assert "budget 24.0 GiB free; allowed: exact; study 3f9c0000 (4 trials stored)" in line


def test_two_roots_and_what_is_unknown() -> None:
    script = Script(target="gan.py", cwd="/project")
    roots = tuple(
        RootFacts(name=name, parameters=1000, parameter_bytes=4000, trainable=1000, dtype="float32")
        for name in ("Generator", "Discriminator")
    )
    assert words.script_line(script, Facts(roots=roots, optimizers=("Adam", "Adam"))) == (
        "gan.py: Generator, 1 K parameters, Discriminator, 1 K parameters, Adam"
    )
    assert "2 x Generator" in words.script_line(script, Facts(roots=(roots[0], roots[0])))


def test_samples_that_may_be_time_are_told_as_such(facts: Facts) -> None:
    script = Script(target="lm.py", cwd="/project")
    doubted = replace(facts, roots=(replace(facts.roots[0], batch_doubted=True),))
    assert words.script_line(script, facts).endswith("16 samples a step (from the script)")
    line = words.script_line(script, doubted)
    assert line.endswith("16 samples a step if the first dimension is the batch")


def test_before_a_step_its_samples_are_not_known(facts: Facts) -> None:
    """Memory may have run out in the first of several calls."""
    script = Script(target="lm.py", cwd="/project")
    first = replace(facts, calls_per_step=1, stepped=False)
    assert words.script_line(script, first).endswith("8 samples a call (from the script)")
    stepped = words.script_line(script, replace(first, stepped=True))
    assert stepped.endswith("8 samples a step (from the script)")


def test_without_a_batch_rates_count_steps(facts: Facts) -> None:
    """A model that takes an object of the script's own shows no tensor with samples."""
    script = Script(target="graphs.py", cwd="/project")
    unknown = replace(facts, roots=(replace(facts.roots[0], batch=None),), stepped=False)
    assert "sample" not in words.script_line(script, unknown)
    line = words.script_line(script, replace(unknown, stepped=True))
    assert line.endswith("batch size unknown: a step counts as one sample")


def test_levels_left_out_for_one_reason_share_a_line() -> None:
    reasons = (
        ("precision", "tf32", "no tensor cores"),
        ("precision", "fp16", "no tensor cores"),
        ("micro_batch", "auto", "BatchNorm"),
    )
    assert words.left_out(reasons) == [
        "not tried: tf32, fp16: no tensor cores",
        "not tried: micro auto: BatchNorm",
    ]


def test_what_was_compiled_says_how_long_that_took(
    measure: Callable[[float, float], Measurement],
) -> None:
    measured = replace(measure(10.0, 2.0), compile_seconds=9.04)
    report = TrialReport(
        index=0, plan=Plan(), verdict=Verdict.MEASURED, measurements=(measured,), best=Plan()
    )
    assert words.verdict(report, best=True) == "fits  <- best (compile 9.0 s)"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("as_is", "fits (16 at a time without checkpointing did not fit)"),
        ("3", "fits (16 at a time with checkpointing 3 blocks did not fit)"),
    ],
)
def test_what_did_not_fit_has_both_numbers(
    level: str, said: str, measurement: Callable[..., Measurement]
) -> None:
    plan = Plan.of({"checkpointing": "auto", "micro_batch": "auto"})
    short = OutOfMemory(phase="forward", message="none", micro_batch=16, checkpointing=level)
    report = TrialReport(
        index=0,
        plan=plan,
        verdict=Verdict.MEASURED,
        measurements=(measurement(16),),
        out_of_memory=short,
    )
    assert words.verdict(report) == said
