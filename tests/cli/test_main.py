"""The command line as a whole: errors, exit codes, and how a script is given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from autofit._version import __version__
from autofit.cli import cli, main
from autofit.cli.script import ScriptCommand, script_argument, the_launch
from autofit.exceptions import (
    AutofitError,
    NothingFits,
    ScriptError,
    StorageError,
    UsageError,
    WorkerError,
)
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.quick
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
NameError: name 'los' is not defined
"""


@pytest.fixture
def raising() -> Iterator[Callable[[BaseException], int]]:
    """Return what runs a command that raises, through ``main``."""

    def run(error: BaseException) -> int:
        def fail() -> None:
            raise error

        cli.add_command(click.Command("fail", callback=fail))
        return main(["fail"])

    yield run
    cli.commands.pop("fail", None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ScriptError("the script failed"), 1),
        (UsageError("no"), 2),
        (NothingFits("no plan fits 10 MiB"), 3),
        (StorageError("the store is locked"), 1),
        (WorkerError("a worker broke"), 1),
        (click.UsageError("no"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_a_code(
    raising: Callable[[BaseException], int],
    capsys: pytest.CaptureFixture[str],
    error: AutofitError | click.UsageError,
    code: int,
) -> None:
    assert raising(error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    said = error.format_message() if isinstance(error, click.UsageError) else str(error)
    assert captured.err == f"autofit: {said}\n"


def test_a_script_error_shows_the_launchs_own_traceback(
    raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(ScriptError("the script failed by itself", TRACEBACK)) == 1
    assert capsys.readouterr().err == TRACEBACK + "autofit: the script failed by itself\n"


def test_an_interrupt_can_be_resumed(
    raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(KeyboardInterrupt()) == 130
    assert "run the same command again" in capsys.readouterr().err


def test_any_other_error_is_a_bug_and_stays_one(
    raising: Callable[[BaseException], int],
) -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["search"], "no script given: write its path, or -m MODULE, or its launch line after --"),
        (["run"], "no script given: write its path, or -m MODULE, or its launch line after --"),
        (["run", "--", "--lr", "1"], "no script given: write its path, or -m MODULE, or "),
        (
            ["search", "--", "banana", "a.py"],
            "'banana' is no launcher: autofit understands python, torchrun ",
        ),
        (["search", "--", "python", "none.py"], "there is no script 'none.py'"),
        (["search", "none.py"], "there is no script 'none.py'"),
        (["run", "none.py"], "there is no script 'none.py'"),
        (["best", "none.py"], "there is no script 'none.py'"),
        (["search", "."], "'.' is a folder: give the script, or -m MODULE"),
        (["search", "a.py", "-m", "a"], "give SCRIPT or -m MODULE, not both: 'a.py' and 'a'"),
        (["search", "a.py", "--memory", "banana"], "'banana' is not a size"),
        (["search", "a.py", "--timeout", "banana"], "'banana' is not a duration"),
        (["search", "a.py", "--only", "banana"], "there is no technique 'banana'; there are "),
        (["search", "a.py", "--without", "banana"], "there is no technique 'banana'; there are "),
        (["search", "a.py", "--allow", "banana"], "'exact', 'redraw', 'rounding', 'recipe'"),
        (["search", "a.py", "--epochs", "3"], "(options and arguments for the script go after --)"),
        (["search", "a.py", "30"], "(options and arguments for the script go after --)"),
        (["search", "a.py", "b"], "unexpected extra argument"),
        (["search", "a.py", "--only", "precision", "--without", "precision"], "drop one"),
        (["best", "-o", "plan.xyz"], "no format goes with 'plan.xyz': add --format "),
        (["run", "a.py", "--plan", "none.json"], "'none.json' cannot be read"),
        (["search", "a.py", "--only", "checkpoint"], "did you mean 'checkpointing'?"),
        (["search", "a.py", "--only", "eight_bit"], "it is a level of optimizer"),
        (["search", "a.py", "--without", "bf16"], "it is a level of precision and weights"),
        (["search", "a.py", "--allow", "roundng"], "did you mean 'rounding'?"),
        (["banana"], "No such command 'banana'"),
        (["serach"], "No such command 'serach'; did you mean 'search'?"),
        (["history", "shwo"], "No such command 'shwo'; did you mean 'show'?"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_clear_line(
    line: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    assert main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.startswith("autofit: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "a.py"], "a mistake leaves nothing behind"


@pytest.mark.parametrize(
    ("line", "target", "args"),
    [
        (["a.py"], "a.py", ()),
        (["a.py", "--flag", "--", "--epochs", "3"], "a.py", ("--epochs", "3")),
        (["--flag", "a.py", "--", "--flag"], "a.py", ("--flag",)),
        (["a.py", "--", "x", "--", "y"], "a.py", ("x", "--", "y")),
        (["a.py", "--"], "a.py", ()),
        (["-m", "package.module", "--", "x"], "package.module", ("x",)),
        (["--flag", "-m", "package.module"], "package.module", ()),
    ],
)
def test_how_a_script_is_given(
    line: list[str],
    target: str,
    args: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[Script, bool]] = []

    @script_argument
    @click.command(cls=ScriptCommand)
    @click.option("--flag", is_flag=True)
    def command(script: str | None, module: str | None, flag: bool) -> None:
        found.append((the_launch(script, module).script, flag))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    command.main(line, standalone_mode=False)
    expected = Script(target=target, module="-m" in line, args=args, cwd=str(tmp_path))
    before = line[: line.index("--")] if "--" in line else line
    assert found == [(expected, "--flag" in before)]


@pytest.mark.parametrize("command", [["autofit"], [sys.executable, "-m", "autofit"]])
def test_installed_and_as_a_module(command: list[str]) -> None:
    if command == ["autofit"]:
        command = [str(Path(sys.executable).with_name("autofit"))]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"autofit, version {__version__}\n"
    done = subprocess.run([*command, "search", "none.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "autofit: there is no script 'none.py'\n")


def test_every_error_has_a_code_of_the_table() -> None:
    assert {kind.exit_code for kind in AutofitError.__subclasses__()} == {1, 2, 3}
