"""``autofit history`` on a real store: it lists, shows, compares and deletes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autofit.cli import main
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, StudyKey, StudyRecord
from autofit.strategies import Hardware
from autofit.tuning.optuna_study import Dashboard
from autofit.worker.records.trials import OutOfMemory, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

GIB = 1 << 30
H200 = Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 * GIB)
BF16 = Plan.of({"precision": "bf16"})
FUSED = Plan.of({"optimizer": "fused", "precision": "bf16"})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The default store of an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    (tmp_path / "train.py").write_text("pass\n")
    with Store("autofit.db") as store:
        yield store


def opened(store: Store, **changed: object) -> StudyRecord:
    script = Script(target="train.py", args=("--lr", "1"), cwd=str(Path.cwd()))
    asked: dict[str, object] = {"memory": 24 * GIB, "gpus": 1, "gpu": H200.name, **changed}
    return store.open_study(
        StudyKey.of(script, allow="rounding", **asked),  # type: ignore[arg-type]
        script=script,
        hardware=H200,
        budget=24 * GIB,
        versions={},
    )


def add(
    store: Store, study: StudyRecord, report: TrialReport, purpose: Purpose = Purpose.SEARCH
) -> None:
    launch = store.next_launch(study)
    (trial,) = store.add_trials(
        study, [report.plan], launch=launch, owner=Owner.current(), purpose=purpose
    )
    store.finish(trial, report)


@pytest.fixture
def study(store: Store, measured: Callable[..., TrialReport]) -> StudyRecord:
    """A study with a plan that does not fit, a refused one, a slow one and the confirmed best."""
    study = opened(store)
    short = OutOfMemory(phase="backward", message="no memory", requested=2 * GIB)
    report = TrialReport(index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short)
    add(store, study, report)
    reason = "the gradients differ [bold]by 3 %[/bold]\x1b[2J"
    refused = Plan.of({"attention": "sdpa"})
    add(store, study, TrialReport(index=0, plan=refused, verdict=Verdict.REFUSED, reason=reason))
    add(store, study, measured(BF16, 10.0, 20.0))
    add(store, study, measured(FUSED, 15.0, 18.0))
    confirmed = replace(measured(FUSED, 14.0, 18.0), seconds_by_phase=(("check", 2.0),))
    add(store, study, confirmed, Purpose.CONFIRM)
    return study


def test_the_list_names_each_study(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    other = opened(store, memory=None)
    failed = opened(store, memory=2 * GIB)
    add(store, failed, TrialReport(index=0, plan=Plan(), verdict=Verdict.SCRIPT_FAILED))
    short = opened(store, memory=GIB)
    add(store, short, TrialReport(index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY))
    assert main(["history"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6, "a head, a line, and a row for each study"
    (row,) = [line for line in printed if line.startswith(study.id)]
    for text in ("train.py --lr 1", "NVIDIA H200", "24.0 GiB", "  4  ", str(FUSED), "14.0"):
        assert text in row
    for each, said in (
        (other, "nothing measured"),
        (failed, "the script failed"),
        (short, "no plan fits"),
    ):
        (row,) = [line for line in printed if line.startswith(each.id)]
        assert said in row


def test_an_empty_store_says_what_to_do(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    assert "autofit search" in capsys.readouterr().out
    assert main(["history", "show"]) == 2
    assert "autofit search" in capsys.readouterr().err


def test_the_list_as_json(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["study"] == study.id
    assert found["script"]["args"] == ["--lr", "1"]
    assert found["best"]["plan"] == FUSED.levels
    assert found["best"]["samples_per_second"] == pytest.approx(14.0)
    assert (found["trials"], found["best"]["trial"]) == (4, 4)


@pytest.mark.parametrize("length", [1, 4, 8])
def test_a_study_is_named_by_its_beginning(
    store: Store, study: StudyRecord, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "show", study.id[:length]]) == 0
    printed = capsys.readouterr().out
    assert f"study {study.id}: train.py --lr 1" in printed
    assert "out of memory in backward (2.0 GiB requested)" in printed
    assert "refused: the gradients differ [bold]by 3 %[/bold]\\x1b[2J" in printed
    (best,) = [line for line in printed.splitlines() if "<- best" in line]
    assert best.startswith("4 ")
    assert "confirmation run: fits" in best


def versus(printed: str) -> list[str]:
    """Return the column ``vs now`` of a printed study."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    return [cells[3] for cells in rows if cells[0].isdecimal()]


def test_speeds_are_compared_as_the_table_of_the_search_compares_them(
    store: Store,
    study: StudyRecord,
    measured: Callable[..., TrialReport],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["history", "show"]) == 0
    assert versus(capsys.readouterr().out) == ["-", "-", "new", "+50 %", "+40 %"]
    fitting = opened(store, memory=None)
    add(store, fitting, measured(Plan(), 10.0, 20.0))
    add(store, fitting, measured(BF16, 15.0, 20.0))
    add(store, fitting, measured(BF16, 6.0, 20.0), Purpose.CONFIRM)
    assert main(["history", "show", fitting.id]) == 0
    assert versus(capsys.readouterr().out) == ["now", "+50 %", "-40 %"]
    add(store, fitting, measured(Plan(), 4.0, 20.0), Purpose.CONFIRM)
    assert main(["history", "show", fitting.id]) == 0
    assert versus(capsys.readouterr().out) == ["now", "+50 %", "+50 %", "now"]


def test_the_trials_as_json(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    study = store.leave_out(study, "attention", "sdpa", "it differs")
    store.add_seconds(study, 3.5, (("Ray", 1.5),))
    assert main(["history", "show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["trial"] for each in found["all_trials"]] == [0, 1, 2, 3, 4]
    verdicts = ["out_of_memory", "refused", "measured", "measured", "measured"]
    assert [each["verdict"] for each in found["all_trials"]] == verdicts
    assert [each["figures"] is None for each in found["all_trials"]] == [True, True, *[False] * 3]
    assert found["seconds_by_phase"] == {"check": 2.0, "Ray": 1.5}
    assert [each["seconds_by_phase"] for each in found["all_trials"]][-1] == {"check": 2.0}
    assert found["left_out"] == [{"strategy": "attention", "level": "sdpa", "reason": "it differs"}]


def test_an_ambiguous_or_unknown_name_is_one_clear_line(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = store.open_study(
        study.key, script=study.script, hardware=H200, budget=1, versions={}, fresh=True
    )
    assert fresh.id == f"{study.id}-2"
    assert main(["history", "show", study.id]) == 0, "the whole identifier of one of them"
    capsys.readouterr()
    assert main(["history", "show", study.id[:3]]) == 2
    said = capsys.readouterr().err
    assert study.id in said
    assert fresh.id in said
    misspelt = f"x{study.id[1:]}"
    assert main(["history", "show", misspelt]) == 2
    said = capsys.readouterr().err
    assert f"the store has no study '{misspelt}'; did you mean '{study.id}" in said


def test_two_trials_side_by_side(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "compare", f"{study.id}/2", study.id]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1:] if line.strip()}
    assert rows["trial"] == ["2", "4", "*"]
    assert rows["precision"] == ["bf16", "bf16"]
    assert rows["optimizer"] == ["as_is", "fused", "*"]
    assert "attention" not in rows
    assert f"{study.id} against {study.id}/2: speed +40 %, peak -10 %" in printed


def test_two_trials_as_json(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "compare", f"{study.id}/2", study.id, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differing"] == {"optimizer": ["as_is", "fused"]}
    assert found["speed_ratio"] == pytest.approx(1.4)
    assert found["peak_ratio"] == pytest.approx(0.9)


def test_a_trial_without_figures_cannot_be_compared(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "compare", f"{study.id}/0", study.id]) == 0
    assert f"{study.id}/0: not measured" in capsys.readouterr().out
    assert main(["history", "compare", f"{study.id}/9", study.id]) == 2
    assert "has no trial '9'; its trials: 0 to 4" in capsys.readouterr().err


def test_a_study_is_deleted_with_its_trials_and_nothing_else(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    other = opened(store, memory=None)
    Dashboard(store, study, horizon=1)
    Dashboard(store, other, horizon=1)
    store.record_event("rescue", {}, study=study)
    store.record_event("rescue", {}, study=other)
    assert main(["history", "delete", study.id]) == 2, "no terminal to ask you"
    assert "add --yes" in capsys.readouterr().err
    assert len(store.studies()) == 2
    assert main(["history", "delete", study.id, "--yes"]) == 0
    assert f"deleted study {study.id}" in capsys.readouterr().out
    assert [each.id for each in store.studies()] == [other.id]
    assert store.trials(study) == ()
    assert [event.study for event in store.events()] == [other.id]
    (name,) = optuna.get_all_study_names(store.url)
    assert other.id in name


@pytest.mark.parametrize(("answer", "left"), [("n", 1), ("y", 0)])
def test_a_terminal_is_asked_before_a_study_is_deleted(
    store: Store, study: StudyRecord, answer: str, left: int
) -> None:
    store.close()  # it holds the study
    ours, its = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "autofit", "history", "delete", study.id]
    ran = subprocess.run(command, stdin=its, capture_output=True, text=True)
    os.close(ours)
    os.close(its)
    assert ran.returncode == 0, ran.stderr
    assert f"delete study {study.id} (train.py --lr 1; 5 trials)?" in ran.stderr
    assert ("nothing was deleted" in ran.stdout) == bool(left)
    with Store("autofit.db") as again:
        assert len(again.studies()) == left


def test_a_study_that_another_process_searches_is_not_deleted(
    store: Store, study: StudyRecord
) -> None:
    command = [sys.executable, "-m", "autofit", "history", "delete", study.id, "--yes"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert f"process {os.getpid()} on " in ran.stderr
    assert f"searches study {study.id}: stop it first" in ran.stderr
    assert len(store.studies()) == 1


def test_a_new_study_never_takes_the_name_of_another(store: Store, study: StudyRecord) -> None:
    def fresh() -> StudyRecord:
        return store.open_study(
            study.key, script=study.script, hardware=H200, budget=1, versions={}, fresh=True
        )

    second = fresh()
    store.delete_study(study)
    third = fresh()
    assert len({second.id, third.id}) == 2
    assert {each.id for each in store.studies()} == {second.id, third.id}


def test_options_of_a_command_stand_behind_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "--json", "show"]) == 2
    assert "give --json and --storage after show" in capsys.readouterr().err
