"""Every style of training loop is the same training under a plan, or is refused for its reason.

The scripts in this folder know nothing of autofit. Each is run by plain Python and under plans that
split its batch in four, checkpoint its blocks, and do both: the same parameters after its 20 steps,
the same lines printed, or a refusal before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from tests.scripts._runner import (
    HERE,
    TOLERANCE,
    Asked,
    Runs,
    assert_same_state,
    assert_same_text,
)

PLANS = {
    "split": {"micro_batch": "4"},
    "checkpointing": {"checkpointing": "all"},
    "both": {"micro_batch": "4", "checkpointing": "all"},
}
"""The batch is 16 in every script."""

NO_BLOCKS = "the model has no repeated blocks"
OWN_UPDATE = "the script calls torch.autograd.grad on the model's parameters"
PAIRS = (
    "the model returns a number that its parts' outputs do not add up to, neither by samples nor by"
    " a count of its labels"
)
CREATE_GRAPH = "the script differentiates gradients (create_graph) through the model"
FLOAT32_LOSS = (
    "transformers computes the loss of a causal model in float32, whatever the weights are"
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """A script, and what becomes of it under each plan."""

    script: str
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Plan to the reason why it is refused; under the others the training is the same."""
    tolerance: float = TOLERANCE
    why: str = ""
    """Why the tolerance is another."""
    notices: Mapping[str, str] = field(default_factory=dict)
    """Plan to what is said on standard error where a part of the plan cannot be kept."""
    quick: tuple[str, ...] = ()
    """Plans that ``make test`` looks at."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Plan to what is wrong there, to be mended."""
    clock: str | None = None
    """What the script prints that depends on the time it took."""
    ranks: int = 1
    stderr: bool = True
    """Whether standard error is compared too: not where transformers says there that it does not
    cache while it checkpoints."""


BOTH = ("both",)
SPLIT = ("split",)


def split_refused(reason: str) -> dict[str, str]:
    return {"split": reason, "both": reason}


STYLES = [
    Style(script="plain_loop.py"),
    Style(script="loader.py"),
    Style(script="loss_inside.py", quick=BOTH),
    Style(script="several_losses.py"),
    Style(script="heads_apart.py", quick=SPLIT),
    Style(script="two_backwards.py"),
    Style(script="gan.py", quick=BOTH),
    Style(script="accumulation.py", quick=BOTH),
    Style(
        script="autocast_bf16.py",
        tolerance=0.05,
        why="products in bf16 are rounded to 8 bits, in another order for each size of the batch",
    ),
    Style(script="grad_scaler.py"),
    Style(script="clip_norm.py"),
    Style(script="clip_value.py"),
    Style(script="warmup.py"),
    Style(script="epoch_scheduler.py"),
    Style(script="plateau.py"),
    Style(script="closure.py"),
    Style(script="lbfgs.py"),
    Style(script="ema.py"),
    Style(script="iterable.py"),
    Style(script="dict_batch.py"),
    Style(script="tuple_batch.py"),
    Style(script="dataclass_batch.py"),
    Style(script="batch_encoding.py"),
    Style(script="padded.py"),
    Style(script="padded_inside.py", quick=BOTH),
    Style(script="rows_per_sample.py"),
    Style(script="batch_second.py"),
    Style(
        script="recurrent_state.py",  # the first call alone has no state
        refusals=dict.fromkeys(("checkpointing", "both"), NO_BLOCKS),
        notices={"split": "a batch runs in one piece: the model raises RuntimeError for a part"},
    ),
    Style(
        script="batch_norm.py",
        quick=("checkpointing",),
        refusals={
            "split": "BatchNorm in training mode: a split batch has other statistics",
            "both": "BatchNorm",
        },
    ),
    Style(script="contrastive.py", refusals=split_refused(PAIRS), quick=SPLIT),
    Style(script="contrastive_outside.py"),
    Style(script="evaluation.py", quick=BOTH),
    Style(
        script="hf_trainer.py",
        quick=BOTH,
        clock=r"'\w+_(?:runtime|per_second)': '[^']*'",
    ),
    Style(
        script="hf_causal.py",
        tolerance=1e-6,
        why=FLOAT32_LOSS,
        stderr=False,
    ),
    Style(
        script="hf_checkpointing.py",
        tolerance=1e-6,
        why=FLOAT32_LOSS,
        stderr=False,
        refusals=dict.fromkeys(("checkpointing", "both"), "the script checkpoints already"),
    ),
    Style(script="accelerate_prepare.py"),
    Style(script="accelerate_accumulate.py", quick=BOTH),
    Style(script="lightning_trainer.py", quick=BOTH),
    Style(script="fabric.py"),
    Style(script="compiled.py"),
    Style(script="own_checkpointing.py"),
    Style(
        script="own_checkpointing_reentrant.py",
        refusals=dict.fromkeys(PLANS, "checkpoints with use_reentrant=True"),
    ),
    Style(script="ddp.py", ranks=2),
    Style(script="packaged"),
    Style(script="resume.py"),
    Style(script="frozen.py"),
    Style(script="gradient_penalty.py", refusals=split_refused(CREATE_GRAPH)),
    Style(script="own_update.py", refusals=split_refused(OWN_UPDATE)),
    Style(script="no_optimizer.py"),
    Style(
        script="no_blocks.py",
        refusals=dict.fromkeys(("checkpointing", "both"), NO_BLOCKS),
    ),
    Style(script="writes.py"),
]

ELSEWHERE = {
    "model.py": "what the others train",
    "dropout.py": "test_dropout.py",
    "dropout_by_hand.py": "test_dropout.py",
    "counted.py": "test_first_step.py",
    "dry_run.py": "test_roots.py",
    "functional.py": "test_roots.py",
    "meta.py": "test_roots.py",
    "pictures.py": "test_roots.py",
    "rate_finder.py": "test_roots.py",
    "spectral.py": "test_roots.py",
    "teacher.py": "test_roots.py",
    "tokenizer.py": "test_roots.py",
}
"""Files that are no row, and what they are for."""


@dataclass(frozen=True)
class Comparison:
    """A style under one plan."""

    style: Style
    plan: str

    @property
    def plain(self) -> Asked:
        return Asked(script=self.style.script, ranks=self.style.ranks)

    @property
    def tuned(self) -> Asked:
        return self.plain.under(PLANS[self.plan])


def comparisons() -> Iterator[object]:
    for style in STYLES:
        for plan in PLANS:
            marks = [pytest.mark.quick if plan in style.quick else pytest.mark.full]
            if plan in style.broken:
                marks.append(pytest.mark.xfail(reason=style.broken[plan], strict=True))
            name = f"{style.script.removesuffix('.py')}-{plan}"
            yield pytest.param(Comparison(style, plan), id=name, marks=marks)


@pytest.mark.parametrize("comparison", [*comparisons()])
def test_a_tuned_run_is_the_same_training(runs: Runs, comparison: Comparison) -> None:
    style = comparison.style
    plain, tuned = runs.of(comparison.plain), runs.of(comparison.tuned)
    assert plain.code == 0, plain.errors
    if (reason := style.refusals.get(comparison.plan)) is not None:
        assert tuned.code == 0, tuned.errors  # it goes on as the script has it
        (said,) = tuned.said
        assert " cannot be used here: " in said
        assert reason in said
        assert_same_text(tuned.output, plain.output, style.tolerance, style.clock)
        assert_same_state(tuned.state, plain.state, style.tolerance)
        return
    assert tuned.code == 0, tuned.errors
    assert tuned.said == []
    assert_same_text(tuned.output, plain.output, style.tolerance, style.clock)
    if (notice := style.notices.get(comparison.plan)) is not None:
        assert notice in tuned.errors
    elif style.stderr:
        assert_same_text(tuned.errors, plain.errors, style.tolerance, style.clock)
    assert_same_state(tuned.state, plain.state, style.tolerance)


@pytest.mark.quick
def test_every_script_has_a_row() -> None:
    named = {style.script for style in STYLES} | set(ELSEWHERE)
    ours = ("_", "test_", "conftest", "roots.")
    found = {path.name for path in HERE.iterdir() if not path.name.startswith(ours)}
    assert found == named


@pytest.mark.quick
def test_every_script_knows_nothing_of_autofit_and_is_short() -> None:
    for name in {style.script for style in STYLES} | set(ELSEWHERE) - {"counted.py"}:
        path = HERE / name
        for file in [path] if path.is_file() else path.glob("*.py"):
            text = file.read_text()
            assert "autofit" not in text, name
            assert len(text.splitlines()) <= 60, name


@pytest.mark.quick
def test_another_tolerance_has_its_reason() -> None:
    assert all(style.why for style in STYLES if style.tolerance != TOLERANCE)
