"""Launch lines: what each launcher's own parser makes of them, and what is said of the rest."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.analysis.result import Result
from autofit.cli import main
from autofit.cli.search import _options
from autofit.exceptions import UsageError
from autofit.launch_lines import Launch, span, understand
from autofit.launch_lines.parse import LaunchLine, read_accelerate, read_torchrun
from autofit.running.run import as_searched
from autofit.view.summary import lines
from autofit.worker.records.trials import Script

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
use_cpu: false
"""
PLAIN = Launch(script=Script(target="train.py", cwd="/project"))


@pytest.fixture(autouse=True)
def no_default_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tester's own defaults for ``accelerate launch`` stay out of it."""
    monkeypatch.setattr("accelerate.commands.launch.default_config_file", str(tmp_path / "none"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def launched() -> Callable[[int | None], Launch]:
    """Return what makes a launch line that sets up so many ranks."""
    return lambda ranks: Launch(script=PLAIN.script, ranks=ranks)


# --- torchrun ---------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "ranks", "target", "module", "args"),
    [
        ("--nproc-per-node 2 train.py --lr 1", 2, "train.py", False, ("--lr", "1")),
        ("--nproc_per_node=8 --standalone train.py", 8, "train.py", False, ()),
        ("--nnodes 1 --nproc-per-node 2 -m pkg.train -x", 2, "pkg.train", True, ("-x",)),
        ("--nnodes=1:1 train.py --nproc-per-node 4", 1, "train.py", False, None),
    ],
)
def test_torchrun(
    line: str, ranks: int, target: str, module: bool, args: tuple[str, ...] | None
) -> None:
    found = read_torchrun(line.split())
    args = ("--nproc-per-node", "4") if args is None else args
    assert (found.ranks, found.target, found.module, found.args) == (ranks, target, module, args)
    assert found.lines == ()
    assert found.environment == {"TORCHELASTIC_RUN_ID": "autofit"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nnodes 2 train.py", "--nnodes 2: autofit runs all ranks on one host"),
        ("--nnodes 1:4 train.py", "--nnodes 1:4: the number of ranks may not change"),
        (
            "--nnodes many train.py",
            "--nnodes many: it is neither a number nor MIN:MAX; use --nnodes 1",
        ),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0: give 1 or more"),
        ("--nproc-per-node lots train.py", "--nproc-per-node lots: Unsupported"),
        ("--no-python ./train", "--no-python: autofit runs only Python scripts"),
    ],
)
def test_what_torchrun_does_and_autofit_does_not(line: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_torchrun(line.split())
    assert str(error.value).startswith(said)


@pytest.mark.quick
def test_options_of_torchrun_that_are_not_used_are_named() -> None:
    line = "--rdzv-backend c10d --rdzv-endpoint localhost:0 --max-restarts 3 --tee 3 train.py"
    restarts, meeting, rest = read_torchrun(line.split()).lines
    assert restarts.startswith("--max-restarts: not used, `autofit run` restarts a script only")
    assert meeting.startswith(
        "--rdzv-backend, --rdzv-endpoint: not used, autofit connects the ranks"
    )
    assert rest == "--tee: not used, autofit starts the ranks itself"


# --- accelerate -------------------------------------------------------------------------------


def accelerate(line: str) -> LaunchLine:
    return read_accelerate(shlex.split(line))


@pytest.mark.quick
def test_accelerate_sets_what_its_launcher_would() -> None:
    found = accelerate("--multi_gpu --num_processes 2 --mixed_precision bf16 train.py --x 1")
    assert (found.ranks, found.target, found.args, found.lines) == (2, "train.py", ("--x", "1"), ())
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert found.environment["OMP_NUM_THREADS"] == "1"
    ours = {"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "PATH", "HOME"}
    assert not ours & set(found.environment)


@pytest.mark.quick
def test_accelerate_with_fsdp() -> None:
    wrap = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    found = accelerate(f"--use_fsdp --fsdp_version 2 {wrap} --num_processes 2 -m pkg.train")
    assert (found.ranks, found.target, found.module) == (2, "pkg.train", True)
    assert found.environment["ACCELERATE_USE_FSDP"] == "true"
    assert found.environment["FSDP_VERSION"] == "2"
    assert found.environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


@pytest.mark.quick
def test_accelerate_with_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.chdir(tmp_path)
    found = accelerate("--use_deepspeed --zero_stage 3 --num_processes 2 train.py")
    assert found.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert found.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert found.environment["PYTHONPATH"] == f"/mine:{tmp_path}"


@pytest.mark.quick
def test_accelerate_on_the_cpu_gets_the_ranks_its_line_names() -> None:
    found = accelerate("--cpu --num_processes 2 train.py")
    assert (found.ranks, found.environment["ACCELERATE_USE_CPU"]) == (2, "True")
    (line,) = found.lines
    assert "accelerate launch would start one process" in line
    assert "autofit starts 2 ranks" in line


@pytest.mark.quick
def test_accelerates_config_file_counts(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    found = accelerate(f"--config_file {config} train.py")
    assert found.ranks == 4
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert found.environment["FSDP_VERSION"] == "2"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--num_machines 2 --num_processes 2 --multi_gpu train.py",
            "--num-machines 2: autofit runs",
        ),
        ("--tpu train.py", "--tpu: autofit does not support it"),
        ("--no_python train", "--no-python: autofit does not support it"),
        ("--cpu --use_fsdp train.py", "accelerate launch: You can only use one of"),
        ("--config_file none.yaml train.py", "accelerate launch: "),
    ],
)
def test_what_accelerate_does_and_autofit_does_not(line: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        accelerate(line)
    assert str(error.value).startswith(said)


@pytest.mark.quick
def test_options_of_accelerate_that_are_not_used_are_named() -> None:
    line = "--multi_gpu --num_processes 2 --main_process_port 29501 --gpu_ids 0,1 train.py"
    cards, meeting = accelerate(line).lines
    assert cards.startswith("--gpu-ids: not used, --gpus sets the number")
    assert meeting.startswith("--main-process-port: not used, autofit connects the ranks")


# --- whole lines ------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("python train.py --lr 1", Script(target="train.py", args=("--lr", "1"), cwd="/project")),
        ("python3 -m pkg x", Script(target="pkg", module=True, args=("x",), cwd="/project")),
        (
            "/usr/bin/python3.12 -u train.py",
            Script(target="train.py", cwd="/project", environment=(("PYTHONUNBUFFERED", "1"),)),
        ),
        (
            "python -O -W ignore -Werror::UserWarning -X faulthandler -Xdev -m pkg -u",
            Script(
                target="pkg",
                module=True,
                args=("-u",),
                cwd="/project",
                environment=(
                    ("PYTHONDEVMODE", "1"),
                    ("PYTHONFAULTHANDLER", "1"),
                    ("PYTHONOPTIMIZE", "1"),
                    ("PYTHONWARNINGS", "ignore,error::UserWarning"),
                ),
            ),
        ),
    ],
)
def test_python_is_no_launcher(line: str, script: Script) -> None:
    found = understand(line.split(), "/project")
    assert (found.script, found.ranks) == (script, None)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "deepspeed train.py",
            "'deepspeed' is no launcher: autofit understands python, torchrun and accel",
        ),
        ("accelerate config", "'accelerate config' starts no training: "),
        (
            "python -u -I train.py",
            "python -I: autofit starts Python itself and supports only -u, -B, ",
        ),
        ("python -X importtime train.py", "python -X: autofit starts Python itself"),
        ("python -W", "python -W: autofit starts Python itself"),
        ("python", "'python' names no script: add its path, or -m MODULE"),
        ("python -m torch.distributed.launch train.py", "python -m torch.distributed.launch is"),
    ],
)
def test_a_line_that_is_none(line: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        understand(line.split(), "/project")
    assert str(error.value).startswith(said)


@pytest.mark.quick
def test_a_run_adds_its_own_options_of_python_to_what_was_searched() -> None:
    searched = replace(PLAIN.script, launcher=("torchrun",), environment=(("A", "1"), ("B", "1")))
    own = replace(PLAIN.script, environment=(("B", "2"), ("PYTHONUNBUFFERED", "1")))
    environment = (("A", "1"), ("B", "2"), ("PYTHONUNBUFFERED", "1"))
    assert as_searched(own, searched) == replace(searched, environment=environment)
    assert as_searched(PLAIN.script, searched) == searched
    assert as_searched(searched, own) == searched


@pytest.mark.quick
def test_a_run_is_under_the_options_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text('{"plan": {}}')
    shown = "sys.warnoptions, sys.flags.optimize, sys.stdout.write_through, sys.argv"
    Path("train.py").write_text(f"import sys\nassert False\nprint({shown})\n")
    line = ["python", "-u", "-O", "-W", "ignore", "train.py", "-O"]
    assert main(["run", "--plan", "plan.json", "--", *line]) == 0
    assert capfd.readouterr().out == "['ignore'] 1 True ['train.py', '-O']\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "args"),
    [
        ("torchrun --nproc-per-node 2", "train.py --lr 1"),
        ("python -m torch.distributed.run --nproc-per-node 2", "train.py -- x"),
        ("accelerate launch --num_processes 2 --mixed_precision bf16", "train.py"),
        ("accelerate-launch --num_processes=2", "train.py train.py"),
        ("python -u -m accelerate.commands.launch --num_processes 2 -m", "train"),
    ],
)
def test_a_launch_line_is_read_in_a_process_of_its_own(
    start: str, args: str, tmp_path: Path
) -> None:
    found = understand([*start.split(), *args.split()], str(tmp_path))
    assert found.ranks == 2
    assert found.script.launcher == tuple(start.split())
    assert str(found.script) == f"{start} {args}".replace("-- x", "x")
    if "accelerate" in start:
        assert dict(found.script.environment)["OMP_NUM_THREADS"] == "1"
    if "-u" in start.split():
        assert dict(found.script.environment)["PYTHONUNBUFFERED"] == "1"
    again = understand([*found.script.launcher, found.script.target, *found.script.args], ".")
    assert again.script.args == found.script.args


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --bogus 2 train.py", "torchrun: unrecognized arguments: --bogus"),
        ("torchrun --help", "torchrun: the line only prints the help"),
        ("torchrun", "torchrun: the following arguments are required: training_script"),
        ("accelerate launch", "accelerate launch: the following arguments are required: training"),
        ("torchrun --nproc-per-node 2 none.py", "there is no script 'none.py'"),
    ],
)
def test_a_mistake_in_a_launch_line_is_one_clear_line(
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", "--", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"autofit: {said}")
    assert error.count("\n") == 1


@pytest.mark.quick
@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_a_launcher_is_no_script(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "-m", module, "--", "train.py"]) == 2
    assert capsys.readouterr().err.startswith(f"autofit: -m {module} is a launcher, not a script: ")


# --- over how many GPUs -----------------------------------------------------------------------


@pytest.mark.quick
def test_the_option_wins_over_the_launch_line(launched: Callable[[int | None], Launch]) -> None:
    assert span(launched(2), 4, None) == (
        2,
        ("each training has 2 ranks, as the launch line says",),
    )
    asked, (line,) = span(launched(2), 4, 4)
    assert (asked, line) == (4, "--gpus-per-trial 4 is used; the launch line says 2")
    assert span(launched(2), None, 2) == (2, ())
    assert span(PLAIN, None, None) == (None, ())
    assert span(PLAIN, None, 2) == (2, ())


@pytest.mark.quick
@pytest.mark.parametrize(("asked", "shown"), [(None, "torchrun --nproc-per-node 2 "), (4, "")])
def test_a_launch_line_is_shown_while_it_says_the_ranks(asked: int | None, shown: str) -> None:
    """With another number of ranks its commands would start as many as it names."""
    launcher = ("torchrun", "--nproc-per-node", "2")
    launch = Launch(script=replace(PLAIN.script, launcher=launcher), ranks=2)
    nothing: dict[str, Any] = {"storage": None, "only": frozenset(), "without": frozenset()}
    options = _options(launch, allow="exact", gpus=None, gpus_per_trial=asked, **nothing)
    assert options.gpus_per_trial == (asked or 2)
    assert str(options.script) == f"{shown}train.py"


@pytest.mark.quick
def test_a_launch_line_needs_the_gpus_it_names(launched: Callable[[int | None], Launch]) -> None:
    with pytest.raises(UsageError, match="--gpus 1: the launch line sets up 2 ranks"):
        span(launched(2), 1, None)
    with pytest.raises(UsageError, match="--gpus 1 --gpus-per-trial 2: give --gpus 2 or more"):
        span(PLAIN, 1, 2)


@pytest.mark.quick
def test_a_script_that_speaks_of_several_gpus_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    launch = Launch(script=Script(target="train.py", cwd=str(tmp_path)))
    script.write_text("import torch\n")
    assert span(launch, 2, None) == (None, ())
    script.write_text("accelerator = Accelerator()\n")
    ranks, (line,) = span(launch, 2, None)
    assert ranks is None
    assert "train.py mentions Accelerator" in line
    assert "add --gpus-per-trial 2" in line


@pytest.mark.quick
def test_the_commands_to_copy_launch_as_it_was_searched(make_result: Callable[..., Result]) -> None:
    script = Script(
        target="pkg.train",
        module=True,
        args=("--name", "a b"),
        cwd="/project",
        launcher=("torchrun", "--nproc-per-node", "2", "-m"),
        environment=(("OMP_NUM_THREADS", "1"),),
    )
    said = lines(make_result(script=script, ranks=2), storage="x.db")
    (run,) = [line.split("   ")[1] for line in said if "autofit run" in line]
    started = "autofit run --storage x.db -- torchrun --nproc-per-node 2 -m pkg.train"
    assert run == f"{started} --name 'a b'"
    assert str(script) == "torchrun --nproc-per-node 2 -m pkg.train --name a b"


@pytest.mark.quick
def test_a_preview_of_a_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("init_process_group()\n")
    line = ["search", "--dry-run", "--gpus", "2", "--", "python", "train.py", "--lr", "1"]
    assert main(line) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("train.py mentions init_process_group: to let it train on 2 GPUs")
