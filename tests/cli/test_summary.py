"""The closing lines, and that the commands in them are commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import click
import pytest

from autofit.analysis.result import Result
from autofit.cli import cli
from autofit.cli.view.summary import SAME, lines
from autofit.plan import Plan
from autofit.strategies import Fidelity
from autofit.worker.records.trials import Measurement, Script, Verdict

pytestmark = pytest.mark.quick
MakeResult = Callable[..., Result]


def test_a_script_that_did_not_fit(make_result: MakeResult) -> None:
    assert "\n".join(lines(make_result())) == (
        "20.3 samples/s in 23.1 of 24.0 GiB: bf16, micro 8\n"
        "As it is, the script does not fit; the plan is the same training in lower precision.\n"
        "At the peak: tensors 23.1, cached by torch's allocator 0.0, "
        "outside it (CUDA, libraries) 0.0 GiB.\n"
        "6 trials in 6 launches, memory ran out in 1 of these, 1 min 52 s; study 3f9c0000.\n"
        "   autofit run train.py -- --epochs 3                    train with this plan\n"
        "   autofit best train.py --format json -- --epochs 3     export this plan\n"
        "   autofit best train.py --format python -- --epochs 3   show it as PyTorch code"
    )


def test_a_script_that_fitted(
    make_result: MakeResult, measure: Callable[[float, float], Measurement]
) -> None:
    result = make_result(baseline=measure(10.0, 20.0), baseline_verdict=Verdict.MEASURED)
    assert lines(result)[1] == (
        "2.03 times as fast as the script as it is (10.0 samples/s in 20.0 GiB); "
        "the same training in lower precision."
    )


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
