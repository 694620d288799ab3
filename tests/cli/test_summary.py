"""The closing lines, and that the commands in them are commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import click
import pytest

from autofit.analysis.result import Result
from autofit.cli import cli
from autofit.plan import Plan
from autofit.strategies import Fidelity
from autofit.view.summary import SAME, lines
from autofit.worker.records.trials import Measurement, Script, Verdict

pytestmark = pytest.mark.quick
MakeResult = Callable[..., Result]


def test_a_script_that_did_not_fit(make_result: MakeResult) -> None:
    assert "\n".join(lines(make_result())) == (
        "20.3 ±0.0 samples/s in 23.1 of 24.0 GiB: bf16, micro 8\n"
        "As it is, the script does not fit; the plan trains in lower precision, and was compared"
        " with the script by gradients alone.\n"
        "At the peak: tensors 23.1, cached by torch's allocator 0.0, "
        "outside it (CUDA, libraries) 0.0 GiB.\n"
        "6 trials in 6 launches, memory ran out in 1 of these, 1 min 52 s; study 3f9c0000.\n"
        "   autofit run train.py -- --epochs 3                    train with this plan\n"
        "   autofit best train.py --format json -- --epochs 3     export this plan\n"
        "   autofit best train.py --format python -- --epochs 3   show it as PyTorch code"
    )


def test_the_phases_that_took_a_second_are_listed(make_result: MakeResult) -> None:
    known = {"import": 12.4, "observe": 0.6, "confirm": 29.0, "check": 0.9, "other": 1.1}
    result = make_result(seconds_by_phase=tuple(known.items()))
    assert any(
        "1 min 52 s (import 12 s, steps 30 s, other 1 s); " in each for each in lines(result)
    )


def test_a_result_is_printed_in_one_line(make_result: MakeResult) -> None:
    assert str(make_result()) == "20.3 samples/s in 23.1 GiB of 24.0 GiB: bf16, micro 8"


def test_a_script_that_fitted(make_result: MakeResult, measure: Callable[..., Measurement]) -> None:
    result = make_result(baseline=measure(10.0, 20.0), baseline_verdict=Verdict.MEASURED)
    assert lines(result)[1] == (
        "2.03 ±0.06 times as fast as the script as it is (10.0 ±0.0 samples/s in 20.0 GiB), "
        "with 15 % more memory; the same training in lower precision."
    )


@pytest.mark.parametrize(("spread", "faster"), [(0.02, True), (0.2, False)])
def test_a_plan_is_faster_only_beyond_the_spread(
    make_result: MakeResult, measure: Callable[..., Measurement], spread: float, faster: bool
) -> None:
    result = make_result(
        measurement=measure(12.0, 23.1, spread),
        baseline=measure(10.0, 20.0, spread),
        baseline_verdict=Verdict.MEASURED,
    )
    start = "1.20 ±0.04 times as fast as" if spread < 0.1 else "About as fast as"
    assert lines(result)[1].startswith(f"{start} the script as it is (10.0 ±")
    assert faster == ("times" in lines(result)[1])


def test_a_noisy_machine_is_said_to_be_one(make_result: MakeResult) -> None:
    assert not any("vary" in line for line in lines(make_result(variation=0.03)))
    (said,) = (line for line in lines(make_result(variation=0.231)) if "vary" in line)
    assert said == (
        "The step times vary by 23 %: another process may be using this machine. "
        "Differences smaller than that mean nothing."
    )


def test_the_longest_summary_has_ten_lines(
    make_result: MakeResult, measure: Callable[..., Measurement]
) -> None:
    elsewhere = Plan.of({"precision": "bf16", "ranks": "2"}), measure(10.0, 20.0)
    spent = (("import", 12.4), ("other", 1.1))
    result = make_result(elsewhere=elsewhere, variation=0.2, seconds_by_phase=spent)
    assert len(lines(result)) <= 10


def test_nothing_better(make_result: MakeResult) -> None:
    assert "nothing to change" in lines(make_result(plan=Plan(), fidelity="exact"))[1]


def test_a_baseline_that_ended_otherwise(make_result: MakeResult) -> None:
    said = lines(make_result(baseline_verdict=Verdict.TIMED_OUT))[1]
    assert said.startswith("As it is, the script was not measured (timed out); ")


def test_every_fidelity_has_words() -> None:
    assert set(SAME) == {str(each) for each in Fidelity}


@pytest.mark.parametrize("module", [False, True])
def test_the_commands_shown_parse(make_result: MakeResult, module: bool) -> None:
    script = Script(target="my train", module=module, args=("--name", "a b"), cwd="/project")
    said = lines(make_result(script=script), storage="sqlite:///a b.db")
    commands = [line.strip().split("   ")[0] for line in said if line.startswith("   ")]
    assert len(commands) == 3
    for command in commands:
        program, name, *rest = shlex.split(command)
        parsed = cli.get_command(click.Context(cli), name)
        assert program == "autofit"
        assert parsed is not None
        params = parsed.make_context(name, rest).params
        assert params["module" if module else "script"] == "my train"
        assert params["storage"] == "sqlite:///a b.db"


@pytest.mark.parametrize(
    ("ranks", "other", "said"),
    [
        (
            {"ranks": "2"},
            {},
            "It uses 2 GPUs, which is 2.03 ±0.06 times as fast as the fastest plan on 1 GPU"
            " (10.0 ±0.0 samples/s: bf16).",
        ),
        (
            {},
            {"ranks": "2"},
            "It uses 1 GPU: the fastest plan on 2 GPUs reaches 10.0 ±0.0 samples/s"
            " (bf16, 2 ranks).",
        ),
    ],
    ids=["spread", "not spread"],
)
def test_what_more_gpus_gain_is_said(
    make_result: MakeResult,
    measure: Callable[..., Measurement],
    ranks: dict[str, str],
    other: dict[str, str],
    said: str,
) -> None:
    plan = Plan.of({"precision": "bf16", **ranks})
    elsewhere = Plan.of({"precision": "bf16", **other}), measure(10.0, 20.0)
    assert lines(make_result(plan=plan, elsewhere=elsewhere))[2] == said
    assert not any(line.startswith("It uses") for line in lines(make_result(plan=plan)))
