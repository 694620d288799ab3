"""What can go wrong in a search: one clear line each, an exit code, and what is stored."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyRecord, TrialRecord
from autofit.tuning import messages
from autofit.worker.records.trials import OutOfMemory, TrialReport, Verdict

pytestmark = pytest.mark.usefixtures("ray_host")

STEP = "    optimizer.step()\n"
Write = Callable[..., Path]
Trials = Callable[..., tuple[TrialRecord, ...]]
Captured = pytest.CaptureFixture[str]


def python_prints(path: Path) -> str:
    """What Python itself writes to standard error when it runs the script."""
    done = subprocess.run([sys.executable, path.name], cwd=path.parent, capture_output=True)
    return done.stderr.decode()


def study(folder: Path) -> StudyRecord:
    with Store(str(folder / "autofit.db"), create=False) as store:
        return store.studies()[0]


def last_line(captured: Captured) -> str:
    """The last line of standard error, which is also all of it but for a traceback."""
    return captured.readouterr().err.splitlines()[-1]


def fails_with(captured: Captured, line: str) -> None:
    assert captured.readouterr().err == f"autofit: {line}\n"


class TestABugInTheLoop:
    """The fault of the script, whichever plan runs when it shows."""

    @pytest.mark.full
    def test_at_once(self, script: Write, trials: Trials, capsys: Captured) -> None:
        path = script(STEP, STEP + "    print(los)\n")
        assert main(["search", "train.py"]) == 1
        line = "autofit: train.py: NameError: name 'los' is not defined\n"
        assert capsys.readouterr().err == python_prints(path) + line
        (trial,) = trials(path.parent)
        assert (trial.plan, trial.verdict) == (Plan(), Verdict.SCRIPT_FAILED)
        assert study(path.parent).launches == 1
        assert main(["best", "train.py"]) == 2
        fails_with(capsys, "no plan is stored for train.py: run `autofit search` first")

    @pytest.mark.quick
    @pytest.mark.full
    def test_after_the_neutral_plan_was_measured(
        self, script: Write, trials: Trials, capsys: Captured
    ) -> None:
        path = script(STEP, STEP + "    if step == 4:\n        print(los)\n")
        assert main(["search", "train.py"]) == 1
        line = "autofit: train.py: NameError: name 'los' is not defined\n"
        assert capsys.readouterr().err == python_prints(path) + line
        assert Verdict.SCRIPT_FAILED in {trial.verdict for trial in trials(path.parent)}
        assert trials(path.parent, State.RUNNING) == ()
        assert study(path.parent).launches == 2, "the second runs it without a plan"
        assert main(["best", "train.py"]) == 2

    @pytest.mark.full
    def test_where_the_neutral_plan_never_gets(
        self, script: Write, trials: Trials, capsys: Captured
    ) -> None:
        path = script(STEP, STEP + "    print(los)\n")
        assert main(["search", "train.py", "--memory", "6MiB", "--allow", "exact"]) == 1
        line = "autofit: train.py: NameError: name 'los' is not defined\n"
        assert capsys.readouterr().err == python_prints(path) + line
        verdicts = [trial.verdict for trial in trials(path.parent)]
        assert verdicts[0] is Verdict.OUT_OF_MEMORY
        assert verdicts[-1] is Verdict.SCRIPT_FAILED
        assert Verdict.MEASURED not in verdicts

    @pytest.mark.full
    def test_mended_elsewhere_the_same_command_begins_anew(
        self, script: Write, trials: Trials, capsys: Captured
    ) -> None:
        path = script("import argparse\n", "import argparse\n\nimport settings\n")
        (path.parent / "settings.py").write_text("broken = los\n")
        assert main(["search", "train.py", "--trials", "1"]) == 1
        assert "settings.py" in capsys.readouterr().err
        (path.parent / "settings.py").write_text("")
        assert main(["search", "train.py", "--trials", "1"]) == 0
        assert {trial.verdict for trial in trials(path.parent)} == {Verdict.MEASURED}


BREAKS_CHECKPOINTING = """
import os

if "AUTOFIT_EVENTS_FD" in os.environ:
    from autofit.strategies import checkpointing

    def broken(module):
        raise RuntimeError("a bug in a strategy")

    checkpointing.repeated_blocks = broken
"""


class TestAPlanThatBreaksAGoodScript:
    """It is blamed and left out, and the search goes on."""

    @pytest.mark.full
    def test_by_an_error_in_the_strategy(
        self, script: Write, trials: Trials, budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = script().parent
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(textwrap.dedent(BREAKS_CHECKPOINTING))
        monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
        asked = ["--memory", str(budget), "--only", "checkpointing", "--only", "micro_batch"]
        assert main(["search", "train.py", *asked]) == 0
        found = trials(folder)
        refused = [trial for trial in found if trial.verdict is Verdict.REFUSED]
        assert {trial.report.blamed for trial in refused if trial.report} == {"checkpointing"}
        reason = "RuntimeError: a bug in a strategy"
        levels = [trial.plan["checkpointing"] for trial in refused]
        assert levels[0] == "auto"
        assert len(levels) == len({*levels})
        assert study(folder).left_out == tuple(("checkpointing", each, reason) for each in levels)
        assert {trial.launch for trial in found[:-1]} == {0}, "a probe ends no process"
        assert found[-1].verdict is Verdict.MEASURED
        assert found[-1].purpose is Purpose.CONFIRM

    @pytest.mark.full
    def test_by_an_error_in_the_script_itself(self, script: Write, trials: Trials) -> None:
        """No strategy is on the stack, and the neutral plan passes the place: the plan did it."""
        folder = script(
            "        return self.head",
            "        assert not torch.is_autocast_enabled('cpu'), 'full precision only'\n"
            "        return self.head",
        ).parent
        assert main(["search", "train.py", "--only", "precision"]) == 0
        found = trials(folder)
        assert [(str(t.plan), t.verdict) for t in found] == [
            ("as it is", Verdict.MEASURED),
            ("bf16", Verdict.REFUSED),
            ("as it is", Verdict.MEASURED),
        ]
        assert ("precision", "bf16", "AssertionError: full precision only") in study(
            folder
        ).left_out


@pytest.mark.parametrize(
    ("old", "new", "args", "code", "line"),
    [
        (STEP, "    pass\n", [], 1, "train.py ended without an optimizer step, "),
        pytest.param(
            *("", "", ["--", "--steps", "1"], 1, "train.py ended after 1 optimizer step: too few "),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(STEP, STEP + "    raise SystemExit(3)\n", [], 1, "train.py: exited with code 3"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "model(x)",
            "x.mean((1, 2)) * model.head.weight.sum()",
            [],
            1,
            "train.py took 60 optimizer steps, but called no torch.nn.Module ",
            marks=pytest.mark.full,
        ),
    ],
    ids=["takes no step", "takes one step", "exits with code 3", "calls no module"],
)
@pytest.mark.quick
def test_a_script_that_cannot_be_measured(
    script: Write,
    trials: Trials,
    capsys: Captured,
    old: str,
    new: str,
    args: list[str],
    code: int,
    line: str,
) -> None:
    folder = script(old, new).parent
    assert main(["search", "train.py", *args]) == code
    assert last_line(capsys).startswith(f"autofit: {line}")
    assert Verdict.MEASURED not in {trial.verdict for trial in trials(folder)}
    assert trials(folder, State.RUNNING) == ()
    assert study(folder).launches == 1


@pytest.mark.full
def test_three_steps_are_enough(script: Write, trials: Trials) -> None:
    folder = script().parent
    assert main(["search", "train.py", "--trials", "1", "--", "--steps", "3"]) == 0
    search, confirm = trials(folder)
    assert search.measurement is not None
    assert confirm.measurement is not None
    assert len(search.measurement.step_seconds) == 2


@pytest.mark.full
def test_a_script_that_hangs(
    script: Write, trials: Trials, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.tuning.history.MOST_SECONDS", 8.0)
    folder = script(STEP, STEP + "    __import__('time').sleep(1000)\n").parent
    assert main(["search", "train.py"]) == 1
    fails_with(capsys, "train.py: not done within 8 s")
    (trial,) = trials(folder)
    assert trial.verdict is Verdict.TIMED_OUT


@pytest.mark.full
def test_time_that_is_up_before_anything_was_measured(
    script: Write, trials: Trials, capsys: Captured
) -> None:
    folder = script(STEP, STEP + "    __import__('time').sleep(1000)\n").parent
    assert main(["search", "train.py", "--timeout", "6s"]) == 2
    fails_with(capsys, "no plan was measured within --timeout 6.0 s: give more time")
    assert trials(folder, None) == ()


@pytest.mark.quick
def test_nothing_fits(script: Write, trials: Trials, capsys: Captured) -> None:
    folder = script(
        "nn.Linear(16, 1)", "nn.Linear(16, 1)\n        self.big = nn.Linear(1000, 2400)"
    ).parent
    assert main(["search", "train.py", "--memory", "10MiB", "--only", "micro_batch"]) == 3
    line = last_line(capsys)
    assert line.startswith("autofit: the only plan tried does not fit in 10.0 MiB: as it is, ")
    assert "requested" in line
    assert "its weights, gradients and optimizer state alone need" in line
    assert {trial.verdict for trial in trials(folder)} == {Verdict.OUT_OF_MEMORY}
    assert len(trials(folder)) == 1  # splitting the batch lowers nothing of what there is too much


@pytest.mark.full
def test_the_model_itself_does_not_fit(script: Write, trials: Trials, capsys: Captured) -> None:
    folder = script(
        "nn.Linear(16, 1)", "nn.Linear(16, 1)\n        self.big = nn.Linear(1000, 9000)"
    ).parent
    assert main(["search", "train.py", "--memory", "10MiB"]) == 3
    assert "memory ran out before the model's first forward: " in last_line(capsys)
    (trial,) = trials(folder)
    assert trial.verdict is Verdict.OUT_OF_MEMORY


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "line"),
    [
        ("backward", "memory ran out in backward, and the script called no torch.nn.Module"),
        ("outside the model", "memory ran out before the model's first forward: 8 bytes;"),
    ],
)
def test_a_model_that_was_never_called(phase: str, line: str) -> None:
    """``model.forward(x)`` is none of its calls."""
    short = OutOfMemory(phase=phase, message="8 bytes")
    report = TrialReport(
        index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY, reason="8 bytes", out_of_memory=short
    )
    assert messages.model_too_large(report, 1 << 30).startswith(line)


@pytest.mark.full
def test_memory_that_runs_out_outside_the_model(
    script: Write, trials: Trials, capsys: Captured
) -> None:
    """No plan changes what the script itself allocates between two forwards."""
    folder = script(STEP, STEP + "    torch.ones(32 << 20)\n").parent
    assert main(["search", "train.py", "--memory", "100MiB", "--only", "micro_batch"]) == 3
    assert "out of memory in train.py:43 (`torch.ones(32 << 20)`)" in last_line(capsys)
    assert {trial.verdict for trial in trials(folder)} == {Verdict.OUT_OF_MEMORY}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["train.py", "--memory", "banana"], "banana"),
        (["train.py", "--memory", "900TiB"], "give less"),
        (["train.py", "--only", "magic"], "there is no technique 'magic'; there are "),
        (["train.py", "--without", "magic"], "there is no technique 'magic'"),
        (["train.py", "--trials", "0"], "--trials"),
        (["train.py", "--timeout", "soon"], "not a duration"),
        (["missing.py"], "there is no script 'missing.py'"),
        ([], "no script given"),
    ],
)
@pytest.mark.quick
def test_what_makes_no_sense_is_one_line_and_leaves_nothing(
    script: Write, capsys: Captured, options: list[str], said: str
) -> None:
    folder = script().parent
    assert main(["search", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("autofit: ")
    assert said in line
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize("command", ["search", "explain"])
@pytest.mark.quick
def test_what_is_not_python_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nx = = 3\n")
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True)
    assert main([command, "train.py"]) == plain.returncode == 1
    line = "autofit: train.py: SyntaxError: invalid syntax (train.py, line 2)\n"
    assert capsys.readouterr().err == plain.stderr + line
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.full
def test_two_searches_of_one_study(
    script: Write, trials: Trials, command: Callable[..., object], capsys: Captured
) -> None:
    """The second says who holds it; afresh it may go on."""
    folder = script(STEP, STEP + "    __import__('time').sleep(0.2)\n").parent
    line = [sys.executable, "-m", "autofit", "search", "train.py"]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()  # its study is open
        assert main(["search", "train.py"]) == 2
        fails_with(
            capsys,
            f"process {first.pid} on {_host()} searches this study already:"
            " wait until it ends, or open a new study with --fresh",
        )
        assert main(["search", "train.py", "--fresh", "--trials", "1"]) == 0
        first.terminate()
        first.stdout.read()
    assert [trial.plan for trial in trials(folder)] == [Plan(), Plan()]


def _host() -> str:
    import socket

    return socket.gethostname()
