"""Memory shrinks in the middle of a real run: it goes on in smaller pieces, the same training.

The scripts know nothing of it: a small library, preloaded beside the meter's shim, lowers the cap
when a script first prints of a step (``_shrink.c``). What fails then is torch's own allocator.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scripts._runner import (
    HERE,
    TOLERANCE,
    Asked,
    Runs,
    assert_same_state,
    assert_same_text,
)

BATCH = "256"
"""Large enough that a step's peak is the activations' and not the optimizer's."""
PLAN = {"micro_batch": "128"}
PART = "0.8"
"""Of what a step needs with 128 samples at a time: less than that, more than 64 need."""
SAID = re.compile(
    r"autofit: out of memory in (forward|backward) with 128 samples at a time, "
    r"[\d.]+ \w+ requested; continuing with smaller parts of the batch"
)
# Not here: scripts whose peak is not the model's (LBFGS's history, a loss over all pairs of the
# batch or all of its logits), and transformers' Trainer, which was not seen to reach this cap.
QUICK = ("loss_inside.py",)
STYLES = (
    "accumulation.py",
    "plain_loop.py",
    "loader.py",
    "several_losses.py",
    "two_backwards.py",
    "gan.py",
    "grad_scaler.py",
    "clip_norm.py",
    "clip_value.py",
    "warmup.py",
    "epoch_scheduler.py",
    "plateau.py",
    "closure.py",
    "ema.py",
    "iterable.py",
    "dict_batch.py",
    "tuple_batch.py",
    "batch_encoding.py",
    "padded.py",
    "padded_inside.py",
    "batch_second.py",
    "accelerate_accumulate.py",
    "lightning_trainer.py",
    "fabric.py",
)


@pytest.fixture(scope="module")
def shrinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("shrink") / "shrink.so"
    flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-ldl"]
    subprocess.run([compiler, str(HERE / "_shrink.c"), "-o", str(library), *flags], check=True)
    return library


@dataclass(frozen=True)
class Rescue:
    """A style whose memory shrinks in mid-run."""

    script: str

    @property
    def plain(self) -> Asked:
        return Asked(script=self.script, arguments=("--batch-size", BATCH))

    def tuned(self, library: Path) -> Asked:
        return Asked(
            script=self.script,
            arguments=("--batch-size", BATCH),
            levels=tuple(PLAN.items()),
            memory="1GiB",
            environment=(
                ("LD_PRELOAD", str(library)),
                ("SHRINK_TO", PART),
                ("PYTHONUNBUFFERED", "1"),
            ),
        )


def rescues() -> Iterator[object]:
    for script in (*QUICK, *STYLES):
        mark = pytest.mark.quick if script in QUICK else pytest.mark.full
        yield pytest.param(Rescue(script), id=script.removesuffix(".py"), marks=mark)


@pytest.mark.parametrize("rescue", rescues())
def test_the_run_goes_on_smaller(runs: Runs, shrinking: Path, rescue: Rescue) -> None:
    runs.ahead([rescue.plain, rescue.tuned(shrinking)])
    plain, tuned = runs.of(rescue.plain), runs.of(rescue.tuned(shrinking))
    assert plain.code == 0, plain.errors
    assert tuned.code == 0, tuned.errors
    (said,) = tuned.said
    assert SAID.fullmatch(said), said
    assert_same_text(tuned.output, plain.output, TOLERANCE)
    assert_same_state(tuned.state, plain.state, TOLERANCE)
