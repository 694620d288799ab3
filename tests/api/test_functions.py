"""``autofit.search``, ``best`` and ``run``: the parameters of the command line, and a study."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autofit
from autofit.api import scripts
from autofit.api.study import Study
from autofit.cli import cli
from autofit.exceptions import NothingFits, UsageError
from autofit.flags import ValueKind, default_of, flags_of
from autofit.plan import Plan
from autofit.storage import Owner, Store, StudyRecord, default_url
from autofit.tuning.options import SearchOptions
from tests.report.stored import BF16, FUSED, GIB, add, figures, measured

SCRIPT_OF_A_CALL = ["script", "args", "module", "cwd"]
TRAIN = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(32, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.quick
def test_a_search_has_the_options_of_the_command_line() -> None:
    found = parameters(autofit.search)
    options = {each.name: (each, flag) for each, flag in flags_of(SearchOptions)}
    of_a_service = ("server", "shared", "priority", "deadline")
    assert [*found] == [*SCRIPT_OF_A_CALL, *options, *of_a_service, "quiet"]
    for name, (each, flag) in options.items():
        default = found[name].default
        if flag.kind is ValueKind.STRATEGIES:
            assert default == ()
        elif name != "storage":  # a URL in the record, a path or None here
            assert str(default) == str(default_of(each)), name


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "left_out"),
    [("best", {"form", "output", "partial"}), ("run", set()), ("explain", {"as_json"})],
)
def test_best_and_run_have_the_options_of_the_command_line(name: str, left_out: set[str]) -> None:
    command = cli.get_command(autofit_context(), name)
    assert command is not None
    options = {flag.name for flag in command.params if flag.name not in ("script", "module")}
    renamed = {"resume": "resume_arg", "ranks": "gpus_per_trial"}
    expected = {renamed.get(str(each), each) for each in options} - left_out
    assert {*parameters(getattr(autofit, name))} == {*SCRIPT_OF_A_CALL, "quiet", *expected}


def autofit_context() -> Any:
    import click

    return click.Context(cli)


@pytest.mark.quick
def test_each_parameter_is_documented() -> None:
    for function in (autofit.search, autofit.best, autofit.run, autofit.explain):
        documented = inspect.getdoc(function) or ""
        assert all(f"\n    {name}: " in documented for name in parameters(function))


@pytest.mark.quick
def test_a_wrong_value_starts_nothing(study: StudyRecord, script: str) -> None:
    before = sorted(Path.cwd().iterdir())
    for given, said in (
        ({"memory": "banana"}, "memory='banana': 'banana' is not a size"),
        ({"only": "precision", "without": ["precision"]}, "drop one"),
        ({"args": "--lr 1"}, r"write a list of words, such as \['--lr', '1'\]"),
        ({"gpus": 1, "gpus_per_trial": 2}, "give --gpus 2 or more"),
    ):
        with pytest.raises(UsageError, match=said):
            autofit.search(script, **given)
    with pytest.raises(UsageError, match=r"there is no script 'none\.py'"):
        autofit.search("none.py")
    with pytest.raises(UsageError, match="'banana' is no launcher"):
        autofit.search(["banana", "train.py"])
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.quick
def test_a_script_may_be_a_path_a_module_or_a_launch_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()

    def launch(script: Any, *args: str, module: bool = False) -> Any:
        return scripts.launch(script, args, module=module, cwd=tmp_path).script

    assert launch("train.py", "--lr", "1").args == ("--lr", "1")
    assert launch(tmp_path / "train.py").target == str(tmp_path / "train.py")
    assert launch("train", module=True).module
    assert launch(["python", "-u", "train.py"], "--lr").args == ("--lr",)
    assert launch("train.py").cwd == str(tmp_path)


@pytest.mark.quick
def test_the_best_plan(study: StudyRecord, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = autofit.best(script, ["--lr", "</script>"])
    assert (result.plan, result.study) == (FUSED, study.id)
    assert f"autofit: study {study.id}" in capsys.readouterr().err
    assert autofit.best(memory="20GiB", quiet=True).plan == FUSED
    assert autofit.best(memory=20 * GIB, storage="autofit.db", quiet=True).plan == FUSED
    assert capsys.readouterr().err == ""
    with pytest.raises(NothingFits):
        autofit.best(memory="1GiB", quiet=True)


@pytest.mark.quick
def test_a_study_holds_what_a_search_found(study: StudyRecord) -> None:
    found = Study.read(default_url(), study.id)
    assert found.best is not None
    assert found.best.plan == FUSED
    assert [trial.plan for trial in found.trials] == [Plan(), FUSED, FUSED]
    assert [point.plan for point in found.frontier] == [FUSED]
    assert found.record.budget == 24 * GIB
    assert found.report("a.html") == Path("a.html")
    assert study.id in Path("a.html").read_text()


@pytest.mark.quick
def test_a_trial_has_the_plan_that_ran(study: StudyRecord) -> None:
    proposed = Plan.of({"optimizer": "fused", "micro_batch": "auto"})
    ran = proposed.replace(micro_batch="16")
    with Store("autofit.db") as store:
        add(store, study, replace(measured(proposed, figures(9.0, 12.0)), best=ran))
        (left,) = store.add_trials(study, [BF16], launch=0, owner=Owner.current())
        store.release(left)
    *_, trial = Study.read(default_url(), study.id).trials
    assert (trial.number, trial.plan) == (3, ran)


@pytest.mark.quick
def test_a_study_shows_itself_as_a_table(study: StudyRecord) -> None:
    found = Study.read(default_url(), study.id)
    text = repr(found)
    assert f"study {study.id}: " in text
    (best,) = [line for line in text.splitlines() if "<- best" in line]
    assert "14.0" in best
    assert "+40 %" in best
    page = found._repr_html_()
    assert page.count("<tr>") == 1 + 3
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


SEARCH = """
import json
import autofit

study = autofit.search("train.py", memory="1GiB", allow="exact", trials=2, quiet={quiet})
found = study.best.plan.fidelity()
print(json.dumps([len(study.trials), study.record.budget, str(found), study.record.key.allow]))
print(autofit.run("train.py", quiet={quiet}))
"""


@pytest.mark.full
@pytest.mark.parametrize("quiet", [True, False])
def test_a_search_and_a_run(tmp_path: Path, quiet: bool) -> None:
    """A script without a guard for ``__main__``, as people write them."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "tune.py").write_text(SEARCH.format(quiet=quiet))
    ran = subprocess.run([sys.executable, "tune.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *progress, found, code = ran.stdout.splitlines()
    trials, budget, fidelity, allow = json.loads(found)
    assert trials >= 2
    assert (budget, fidelity, allow, code) == (GIB, "exact", "exact", "0")
    assert bool(progress) != quiet
    assert ("autofit: " in ran.stderr) != quiet
