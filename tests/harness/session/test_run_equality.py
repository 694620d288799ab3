"""The tuned run is the same training: where the plain script dies of its cap, its losses come out.

Equal to fp32 rounding: within ``FP32`` relative over the first steps, before training amplifies
the order of sums. In float64 the same differences are within ``FP64`` over 20 steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.told import ours

FP32 = 2e-6
"""Largest relative difference of a loss; the largest seen was 8e-8 (3e-16 in float64)."""
FP64 = 1e-9

Losses = list[float]


@dataclass(frozen=True)
class Setting:
    """A size of ``char_lm``, and a cap in which it does not fit."""

    arguments: tuple[str, ...]
    cap: str
    micro_batch: str
    """A micro-batch that fits."""


SMALL = Setting(
    ("--layers", "2", "--width", "64", "--heads", "4", "--context", "64", "--batch-size", "16"),
    cap="12MiB",
    micro_batch="4",
)
DEFAULT = Setting((), cap="200MiB", micro_batch="8")


@dataclass(frozen=True)
class Trainer:
    """Runs ``examples/char_lm.py`` in fresh processes."""

    script: Path
    folder: Path

    def plain(self, arguments: Sequence[str], cap: str | None = None) -> tuple[int, str, Losses]:
        """Run it by itself; return exit code, standard error, losses."""
        capped = [sys.executable, "-m", "autofit.worker.cap", cap, "--"] if cap else []
        return self._run([*capped, sys.executable, str(self.script)], arguments)

    def tuned(
        self, levels: dict[str, str], cap: str, arguments: Sequence[str]
    ) -> tuple[int, str, Losses]:
        """Run it under a plan and a cap with ``autofit run``."""
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"plan": levels}))
        storage = f"sqlite:///{self.folder / 'autofit.db'}"
        run = [sys.executable, "-m", "autofit", "run", "--plan", str(plan), "--memory", cap]
        return self._run([*run, "--storage", storage, str(self.script), "--"], arguments)

    def _run(self, command: list[str], arguments: Sequence[str]) -> tuple[int, str, Losses]:
        losses = self.folder / "losses.txt"
        losses.unlink(missing_ok=True)
        done = subprocess.run(
            [*command, *arguments, "--losses", str(losses)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        lines = losses.read_text().split() if losses.exists() else []
        return done.returncode, done.stderr, [float(line) for line in lines]


@pytest.fixture
def trainer(root: Path, tmp_path: Path) -> Trainer:
    return Trainer(root / "examples" / "char_lm.py", tmp_path)


def assert_dies_of_the_cap(trainer: Trainer, setting: Setting, arguments: Sequence[str]) -> None:
    code, errors, losses = trainer.plain(arguments, setting.cap)
    assert code == 1
    assert "DefaultCPUAllocator: can't allocate memory" in errors
    assert len(losses) < 2  # at the latest when the optimizer has made its state


def assert_equal(found: Losses, expected: Losses, tolerance: float, steps: int) -> None:
    assert len(found) == len(expected) == steps
    differences = [abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True)]
    assert max(differences) <= tolerance, f"largest relative difference: {max(differences):.1e}"


def assert_same_training(
    trainer: Trainer,
    setting: Setting,
    plans: Sequence[dict[str, str]],
    extra: Sequence[str],
    tolerance: float,
    *,
    cap: str | None = None,
) -> None:
    """Train plainly, under the cap (which kills it), and under each plan and the cap."""
    arguments = [*setting.arguments, *extra]
    steps = int(arguments[arguments.index("--steps") + 1])
    capped = Setting(setting.arguments, cap or setting.cap, setting.micro_batch)
    assert_dies_of_the_cap(trainer, capped, arguments)
    code, _, expected = trainer.plain(arguments)
    assert code == 0
    for levels in plans:
        code, errors, found = trainer.tuned(levels, capped.cap, arguments)
        assert code == 0, errors
        assert "out of memory" not in errors
        assert_equal(found, expected, tolerance, steps)


def plans_of(setting: Setting) -> list[dict[str, str]]:
    return [
        {"micro_batch": setting.micro_batch},
        {"checkpointing": "all"},
        {"micro_batch": setting.micro_batch, "checkpointing": "2"},
    ]


@pytest.mark.full  # test_search.py has this of a smaller script
def test_a_plan_trains_the_same_where_the_plain_script_dies(trainer: Trainer) -> None:
    plans = [{"micro_batch": SMALL.micro_batch}]
    assert_same_training(trainer, SMALL, plans, ["--steps", "4"], FP32)


@pytest.mark.full
@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_every_exact_plan_trains_the_same(trainer: Trainer, accumulation: str) -> None:
    extra = ["--steps", "4", "--accumulation", accumulation]
    assert_same_training(trainer, SMALL, plans_of(SMALL), extra, FP32)


@pytest.mark.full
@pytest.mark.parametrize(("accumulation", "cap"), [("1", "18MiB"), ("2", "24MiB")])
def test_in_double_precision_over_twenty_steps(
    trainer: Trainer, accumulation: str, cap: str
) -> None:
    extra = ["--steps", "20", "--dtype", "float64", "--accumulation", accumulation]
    assert_same_training(trainer, SMALL, plans_of(SMALL), extra, FP64, cap=cap)


@pytest.mark.full
def test_the_example_at_its_own_size(trainer: Trainer) -> None:
    assert_same_training(trainer, DEFAULT, plans_of(DEFAULT), ["--steps", "3"], FP32)


def rescue(
    trainer: Trainer, setting: Setting, whole: str, extra: Sequence[str]
) -> tuple[Losses, Losses, list[str]]:
    """Run under a plan that takes the whole batch, where it does not fit.

    Returns its losses, the plain run's, and what ``autofit run`` said.
    """
    arguments = [*setting.arguments, *extra]
    _, _, expected = trainer.plain(arguments)
    code, errors, found = trainer.tuned({"micro_batch": whole}, setting.cap, arguments)
    assert code == 0, errors
    assert all(line.startswith("autofit: ") for line in errors.splitlines()), errors
    return found, expected, ours(errors)


def assert_goes_on_smaller(said: list[str], sizes: Sequence[int]) -> None:
    """One line for each event: where it was, with how many samples, what comes next."""
    assert len(said) == len(sizes)
    for line, size in zip(said, sizes, strict=True):
        assert f"out of memory in forward with {size} samples at a time" in line
        assert line.endswith("continuing with smaller parts of the batch")


@pytest.mark.quick
@pytest.mark.full
def test_a_run_that_runs_out_of_memory_goes_on_smaller(trainer: Trainer) -> None:
    found, expected, said = rescue(trainer, SMALL, "16", ["--steps", "3"])
    assert_equal(found, expected, FP32, 3)
    assert_goes_on_smaller(said, [16])


@pytest.mark.full
@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_rescue_in_double_precision(trainer: Trainer, accumulation: str) -> None:
    extra = ["--steps", "20", "--dtype", "float64", "--accumulation", accumulation]
    found, expected, said = rescue(trainer, SMALL, "16", extra)
    assert_equal(found, expected, FP64, 20)
    assert_goes_on_smaller(said, [16, 8])


@pytest.mark.full
def test_rescue_of_the_example_at_its_own_size(trainer: Trainer) -> None:
    found, expected, said = rescue(trainer, DEFAULT, "32", ["--steps", "3"])
    assert_equal(found, expected, FP32, 3)
    assert_goes_on_smaller(said, [32])


@pytest.mark.full
def test_the_plan_as_is_changes_no_bit(trainer: Trainer) -> None:
    arguments = [*SMALL.arguments, "--steps", "3", "--dropout", "0.1"]
    _, _, expected = trainer.plain(arguments)
    code, errors, found = trainer.tuned({}, "4GiB", arguments)
    assert (code, errors) == (0, "")
    assert found == expected


@pytest.mark.quick
@pytest.mark.full
def test_the_plan_as_is_survives_what_the_plain_script_dies_of(trainer: Trainer) -> None:
    arguments = [*SMALL.arguments, "--steps", "3"]
    assert_dies_of_the_cap(trainer, SMALL, arguments)
    _, _, expected = trainer.plain(arguments)
    code, errors, found = trainer.tuned({}, SMALL.cap, arguments)
    assert code == 0, errors
    assert_equal(found, expected, FP32, 3)
    assert_goes_on_smaller(errors.splitlines(), [16])
