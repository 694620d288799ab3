"""A whole search, as a person runs it, and what can be done with what it found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from autofit.cli import main
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, TrialRecord
from autofit.worker.records.trials import Verdict

Command = Callable[..., subprocess.CompletedProcess[str]]
Trials = Callable[..., tuple[TrialRecord, ...]]


def losses(printed: str) -> list[float]:
    """The losses the script printed."""
    lines = [line for line in printed.splitlines() if line.startswith("loss ")]
    return [float(line.split()[1]) for line in lines]


@pytest.fixture(scope="module")
def searched(
    command: Command,
    budget: int,
    tiny: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a search under that budget, at full precision, and how it ended."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "train.py").write_text(tiny)
    asked = ["--memory", str(budget), "--allow", "exact", "--json"]
    return folder, command("search", "train.py", *asked, cwd=folder)


@pytest.mark.usefixtures("ray_host")
class TestInARayThatRunsAlready:
    """Several searches of one process, each a guest."""

    @pytest.mark.quick
    @pytest.mark.full
    def test_a_search_that_fits(
        self, script: Callable[..., Path], trials: Trials, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = script().parent
        started = time.monotonic()
        assert main(["search", "train.py"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert "study" in printed[0]
        assert any(line.startswith("train.py: Net, 51 K parameters, 6 blocks") for line in printed)
        found = trials(folder)
        assert found[0].plan.neutral
        assert [t for t in found if t.verdict is not Verdict.MEASURED] == []
        assert found[-1].purpose is Purpose.CONFIRM
        searched = [trial for trial in found if trial.purpose is Purpose.SEARCH]
        assert len({trial.plan for trial in searched}) == len(searched)
        fastest = max(searched, key=lambda t: t.measurement.samples_per_second)  # type: ignore[union-attr]
        assert fastest.report is not None
        confirmed = [trial for trial in found if trial.purpose is Purpose.CONFIRM]
        assert confirmed[0].plan == fastest.report.best

        # The same command again: all is known, nothing is launched, Ray is not even looked for.
        assert main(["search", "train.py", "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert trials(folder) == found
        assert (again["trials"], again["launches"]) == (
            len(searched),
            len(confirmed) + len({t.launch for t in searched}),
        )

        # One launch for all that can be undone in it, and the seconds are counted once.
        assert len(searched) > 1
        assert {trial.launch for trial in searched} == {0}
        assert 1 < again["search_seconds"] < time.monotonic() - started

        # Afresh, with a single trial: the old study is kept.
        assert main(["search", "train.py", "--fresh", "--trials", "1"]) == 0
        said = capsys.readouterr().out
        assert "The search ended by --trials 1. Not tried: " in said
        assert "may be faster by about " in said
        assert [trial.plan for trial in trials(folder)] == [Plan(), Plan()]
        with Store(str(folder / "autofit.db")) as store:
            new, old = store.studies()
            assert store.trials(old, state=State.FINISHED) == found
            assert new.id == f"{old.id}-2"

    @pytest.mark.full
    def test_tpe_takes_the_place_of_the_sampler(
        self, script: Callable[..., Path], trials: Trials
    ) -> None:
        folder = script().parent
        assert main(["search", "train.py", "--sampler", "tpe"]) == 0
        found = trials(folder)
        assert len([trial for trial in found if trial.purpose is Purpose.SEARCH]) > 3
        assert found[-1].purpose is Purpose.CONFIRM
        with Store(str(folder / "autofit.db")) as store:
            (summary,) = optuna.get_all_study_summaries(optuna.storages.RDBStorage(store.url))
        assert summary.study_name.startswith("train.py, whole device")
        assert summary.best_trial is not None
        assert set(summary.best_trial.params) >= {"precision", "checkpointing", "micro_batch"}

    @pytest.mark.parametrize(
        ("options", "changed"),
        [
            (["--only", "precision"], {"precision"}),
            (["--allow", "exact", "--only", "precision"], set()),
        ],
        ids=["only", "allow"],
    )
    @pytest.mark.full
    def test_only_what_is_asked_for_is_tried(
        self,
        script: Callable[..., Path],
        trials: Trials,
        options: list[str],
        changed: set[str],
    ) -> None:
        folder = script().parent
        assert main(["search", "train.py", "--trials", "3", *options]) == 0
        tried = {name for trial in trials(folder) for name, _ in trial.plan.changes}
        assert tried == changed

    @pytest.mark.full
    def test_what_is_left_out_is_not_tried(
        self, script: Callable[..., Path], trials: Trials
    ) -> None:
        folder, left_out = script().parent, {"precision", "checkpointing", "optimizer"}
        options = [each for name in sorted(left_out) for each in ("--without", name)]
        assert main(["search", "train.py", "--trials", "3", *options]) == 0
        tried = {name for trial in trials(folder) for name, _ in trial.plan.changes}
        assert "micro_batch" in tried
        assert tried.isdisjoint(left_out)

    @pytest.mark.full
    def test_time_that_is_up_ends_the_search_and_keeps_what_it_has(
        self, script: Callable[..., Path], trials: Trials, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = script(
            "    optimizer.step()\n", "    optimizer.step()\n    __import__('time').sleep(0.5)\n"
        ).parent
        assert main(["search", "train.py", "--timeout", "15s"]) == 0
        found = trials(folder)
        assert found[0].verdict is Verdict.MEASURED
        assert Verdict.TIMED_OUT not in {trial.verdict for trial in found}
        no_time = "--timeout left no time to measure the plan again" in capsys.readouterr().out
        assert (found[-1].purpose is Purpose.CONFIRM) is not no_time
        assert len(found) < 7


@pytest.mark.quick
def test_a_dry_run_starts_nothing_and_leaves_nothing(
    script: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = script().parent
    monkeypatch.setattr("autofit.tuning.local_slots.Pool", None)
    assert main(["search", "train.py", "--dry-run"]) == 0
    assert "  0  as it is\n" in capsys.readouterr().out
    assert main(["search", "train.py", "--dry-run", "--json", "--only", "precision"]) == 0
    preview = json.loads(capsys.readouterr().out)
    assert [plan["precision"] for plan in preview["plans"]] == ["as_is", "bf16"]
    assert {reason["level"] for reason in preview["left_out"]} >= {"tf32", "fp16"}
    assert [path.name for path in folder.iterdir()] == ["train.py"]


class TestTooLargeAsItIs:
    """A budget, found by a first run, under which the plain script dies and a plan saves it."""

    @pytest.mark.quick
    def test_a_plan_fits_where_the_script_does_not(
        self, searched: tuple[Path, subprocess.CompletedProcess[str]], budget: int, trials: Trials
    ) -> None:
        folder, done = searched
        assert done.returncode == 0, done.stderr
        assert ", 6 blocks, SGD, " in done.stderr, "the first process saw the optimizer made"
        best: dict[str, Any] = json.loads(done.stdout)
        assert best["baseline"] == {"verdict": "out_of_memory"}
        assert best["plan"]["precision"] == "as_is"
        assert best["peak_bytes"] <= best["budget_bytes"] == budget
        assert best["launches_out_of_memory"] == 1
        assert best["search_seconds"] < 120
        by_phase = best["seconds_by_phase"]
        assert sum(by_phase.values()) == pytest.approx(best["search_seconds"], rel=0.1)
        assert {"import", "check", "confirm", "Ray"} <= by_phase.keys()
        assert trials(folder)[0].verdict is Verdict.OUT_OF_MEMORY
        assert "out of memory in forward" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.quick
    def test_it_is_exported_as_it_was_found(
        self, searched: tuple[Path, subprocess.CompletedProcess[str]], command: Command
    ) -> None:
        folder, done = searched
        told = json.loads(done.stdout)
        shown = command("best", "train.py", "--format", "json", cwd=folder)
        exported = json.loads(shown.stdout)
        assert exported == told
        assert Plan.of(exported["plan"]).levels == exported["plan"]
        assert shown.stderr == f"study {told['study']}: train.py\n"

    @pytest.mark.quick
    def test_it_trains_the_same(
        self,
        searched: tuple[Path, subprocess.CompletedProcess[str]],
        budget: int,
        command: Command,
    ) -> None:
        folder, _ = searched
        plain = [sys.executable, "train.py", "--steps", "12"]
        free = subprocess.run(plain, cwd=folder, capture_output=True, text=True, check=True)
        cap = [sys.executable, "-m", "autofit.worker.cap", str(budget), "--", *plain]
        dead = subprocess.run(cap, cwd=folder, capture_output=True, text=True)
        assert dead.returncode == 1
        assert "DefaultCPUAllocator: can't allocate memory" in dead.stderr
        saved = command("run", "train.py", "--", "--steps", "12", cwd=folder)
        assert saved.returncode == 0, saved.stderr
        (study,) = saved.stderr.splitlines()  # and nothing is verified again
        assert "searched with arguments (none)" in study
        assert losses(saved.stdout) == pytest.approx(losses(free.stdout), rel=1e-5)
        assert len(losses(free.stdout)) == 12

    @pytest.mark.quick
    def test_the_same_command_launches_nothing_again(
        self,
        searched: tuple[Path, subprocess.CompletedProcess[str]],
        budget: int,
        command: Command,
        trials: Trials,
    ) -> None:
        folder, done = searched
        before = trials(folder, None)
        asked = ["--memory", str(budget), "--allow", "exact", "--json"]
        again = command("search", "train.py", *asked, cwd=folder)
        assert trials(folder, None) == before
        first, second = json.loads(done.stdout), json.loads(again.stdout)
        assert second.pop("search_seconds") >= first.pop("search_seconds")
        assert second.pop("seconds_by_phase")["import"] == first.pop("seconds_by_phase")["import"]
        assert first == second
