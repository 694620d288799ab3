"""The scripts under fused optimizers: whatever drives the step leads to the same training."""

from __future__ import annotations

import pytest

from tests.scripts._runner import TOLERANCE, Asked, Runs, assert_same_state, assert_same_text

PLAN = {"optimizer": "fused"}
SAME = {
    "accelerate_accumulate.py": 1,
    "accelerate_prepare.py": 1,
    "accumulation.py": 1,
    "closure.py": 1,
    "compiled.py": 1,
    "ddp.py": 2,
    "ema.py": 1,
    "epoch_scheduler.py": 1,
    "fabric.py": 1,
    "frozen.py": 1,
    "gan.py": 1,
    "grad_scaler.py": 1,
    "hf_trainer.py": 1,
    "lightning_trainer.py": 1,
    "plain_loop.py": 1,
    "plateau.py": 1,
    "resume.py": 1,
    "tuple_batch.py": 1,
    "warmup.py": 1,
}
"""Script to its ranks."""
REFUSED = {
    "iterable.py": "RMSprop has no fused implementation",
    "lbfgs.py": "LBFGS has no fused implementation",
}
CLOCKS = {"hf_trainer.py": r"'\w+_(?:runtime|per_second)': '[^']*'"}
"""What a script prints that depends on the time it took."""


class Comparison:
    """A script and the two runs that are compared; started ahead by the ``runs`` fixture."""

    def __init__(self, script: str, ranks: int) -> None:
        self.plain = Asked(script=script, ranks=ranks)
        self.tuned = self.plain.under(PLAN)


COMPARISONS = [
    pytest.param(Comparison(script, ranks), id=script.removesuffix(".py"))
    for script, ranks in SAME.items()
]


@pytest.mark.full
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_a_fused_step_is_the_script_s_own(runs: Runs, comparison: Comparison) -> None:
    plain, tuned = runs.of(comparison.plain), runs.of(comparison.tuned)
    assert plain.code == 0, plain.errors
    assert tuned.code == 0, tuned.errors
    assert tuned.said == []
    clock = CLOCKS.get(comparison.plain.script)
    assert_same_text(tuned.output, plain.output, TOLERANCE, clock)
    assert_same_state(tuned.state, plain.state, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(("script", "reason"), REFUSED.items())
def test_an_optimizer_without_such_kernels_is_refused(runs: Runs, script: str, reason: str) -> None:
    done = runs.of(Asked(script=script).under(PLAN))
    assert done.code == 0, done.errors  # it goes on as the script has it
    (said,) = done.said
    assert " cannot be used here: " in said
    assert reason in said
