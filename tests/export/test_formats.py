"""The formats, read back by what will read them: json, tomllib, a shell."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.analysis.result import Result
from autofit.exceptions import UsageError
from autofit.export import FORMATS, lost, render
from autofit.export.load import load_plan
from autofit.plan import Plan
from autofit.strategies import NAMES, get
from autofit.worker.records.trials import Script, Verdict

pytestmark = pytest.mark.quick
MakeResult = Callable[..., Result]
PLAN = Plan.of({"precision": "bf16", "checkpointing": "all", "micro_batch": "8"})

KEYS = {
    "plan",
    "samples_per_second",
    "samples_per_second_spread",
    "step_seconds",
    "peak_bytes",
    "peak_reserved_bytes",
    "peak_allocated_bytes",
    "rank_peak_bytes",
    "confirmed",
    "budget_bytes",
    "effective_batch",
    "micro_batch",
    "fidelity",
    "baseline",
    "step_variation",
    "trials",
    "launches",
    "launches_out_of_memory",
    "search_seconds",
    "seconds_by_phase",
    "study",
    "script",
    "ranks",
    "devices",
    "hardware",
    "versions",
}


def test_the_json_contract(make_result: MakeResult) -> None:
    found = json.loads(render("json", make_result(PLAN)))
    assert set(found) == KEYS
    assert set(found["plan"]) == set(NAMES)
    assert found["plan"]["micro_batch"] == "8"
    assert found["step_seconds"] == 0.75
    assert found["samples_per_second"] == pytest.approx(16 / 0.75)
    assert found["peak_bytes"] == 2 << 30
    assert found["peak_reserved_bytes"] == 3 << 29
    assert found["peak_allocated_bytes"] == 1 << 30
    assert found["fidelity"] == "rounding"
    assert found["seconds_by_phase"] == {"import": 12.5, "first batch": 0.5}
    assert found["baseline"] == {"verdict": "out_of_memory"}


def test_a_measured_baseline_has_the_same_fields(make_result: MakeResult) -> None:
    now = make_result(PLAN).measurement
    result = make_result(PLAN, baseline=now, baseline_verdict=Verdict.MEASURED)
    found = json.loads(render("json", result))["baseline"]
    only = {"trials", "launches", "launches_out_of_memory", "search_seconds", "study", "script"}
    only |= {"ranks", "devices", "confirmed", "step_variation", "seconds_by_phase"}
    same = KEYS - only - {"baseline", "hardware", "versions"}
    assert set(found) == same | {"verdict"}
    assert set(found["plan"].values()) == {"as_is"}


def test_toml_says_what_json_says(make_result: MakeResult) -> None:
    baseline = make_result(PLAN).measurement
    result = make_result(PLAN, baseline=baseline, baseline_verdict=Verdict.MEASURED)
    as_json = json.loads(render("json", result))
    assert tomllib.loads(render("toml", result)) == _without_null(as_json)


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return value


def test_a_shell_reads_env(make_result: MakeResult, tmp_path: Path) -> None:
    file = tmp_path / "plan.env"
    file.write_text(render("env", make_result(PLAN)))
    done = subprocess.run(
        ["sh", "-c", f'set -a; . {file}; set +a; printf %s "$AUTOFIT_PLAN"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "precision=bf16,checkpointing=all,micro_batch=8"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("plan", [PLAN, Plan()], ids=["changed", "neutral"])
def test_every_format_ends_in_one_newline(
    form: str, plan: Plan, make_result: MakeResult, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    script = Script(target="train.py", cwd=str(tmp_path))
    text = render(form, make_result(plan, script=script), partial=True)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("form", ["json", "toml"])
@pytest.mark.parametrize("plan", [PLAN, Plan()], ids=["changed", "neutral"])
def test_a_plan_comes_back(form: str, plan: Plan, make_result: MakeResult, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    file.write_text(render(form, make_result(plan)), encoding="utf-8")
    assert load_plan(file) == plan


def test_ranks_of_the_plan_are_started_by_autofit(make_result: MakeResult) -> None:
    """torchrun cannot start copies of a script that trains as one process."""
    result = make_result(Plan.of({"precision": "bf16", "ranks": "2"}))
    started = render("torchrun", result).splitlines()
    assert started[-1].startswith("exec autofit run --plan autofit-plan.json train.py -- --name")
    assert any("It also starts the ranks" in line for line in started)
    assert "2 x NVIDIA H200" in started[1]


@pytest.mark.parametrize("form", ["json", "toml", "env", "torchrun"])
def test_autofits_own_formats_carry_every_plan(form: str, make_result: MakeResult) -> None:
    everything = Plan.of({name: get(name).levels[-1].name for name in NAMES})
    assert lost(form, make_result(everything)) == ()


def test_a_plan_that_a_format_cannot_carry_is_refused(make_result: MakeResult) -> None:
    result = make_result(Plan.of({"precision": "bf16", "checkpointing": "3", "loss": "chunked"}))
    with pytest.raises(UsageError) as refused:
        render("trainer", result)
    assert str(refused.value) == (
        "--format trainer cannot carry checkpointing 3 (by hand: for the first 3 repeated blocks:"
        " block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward,"
        " use_reentrant=False), before Trainer(model=...)), loss chunked (by hand:"
        " TrainingArguments(use_liger_kernel=True), if liger-kernel is installed and knows the"
        " model; liger_kernel_config chooses its kernels); add --partial to leave that out, or"
        " choose --format torchrun, which carries every plan"
    )
    text = render("trainer", result, partial=True)
    assert "# Carried: precision bf16.\n" in text
    assert "has no setting for it: loss chunked" in text


def test_env_holds_the_whole_plan(make_result: MakeResult) -> None:
    plan = Plan.of({"precision": "bf16", "micro_batch": "8", "allocator": "expandable"})
    lines = dict(line.split("=", 1) for line in render("env", make_result(plan)).splitlines())
    levels = dict(pair.split("=") for pair in shlex.split(lines["AUTOFIT_PLAN"])[0].split(","))
    assert Plan.of(levels) == plan
    assert shlex.split(lines["PYTORCH_ALLOC_CONF"]) == ["expandable_segments:True"]
