"""The scripts of this folder, and what becomes of each under plans that change its batch or blocks.

``python -m tests.scripts._styles`` writes them into ``docs/explanation/compatibility.md``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.scripts._runner import HERE, TOLERANCE

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
NOT_LINEAR = "the model changes gradients in its backward by their size"
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
    redraws: bool = False
    """A split draws other random numbers, so only the words that are printed are the same."""
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
            "split": "BatchNorm in training mode: the statistics of a split batch differ",
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
    Style(
        script="reports/background_images.py",
        quick=SPLIT,
        notices={"split": "a batch runs in one piece", "both": "a batch runs in one piece"},
    ),
    Style(script="reports/clipped_hidden.py", refusals=split_refused(NOT_LINEAR), quick=SPLIT),
    Style(script="reports/dpo_adapter.py", quick=SPLIT),
    Style(
        script="reports/gradient_filter.py",
        refusals=split_refused("the gradients of a split batch differ"),
        quick=SPLIT,
    ),
    Style(
        script="reports/key_queue.py",
        refusals={
            **split_refused("the model keeps a part of its forward"),
            "checkpointing": "other gradients at a second time without the plan",
        },
    ),
    Style(script="reports/layer_jitter.py", redraws=True),
    Style(script="reports/loss_balancer.py", quick=SPLIT),
    Style(
        script="reports/mixed_styles.py",
        refusals=split_refused("for some of the numbers that it draws"),
        quick=SPLIT,
    ),
    Style(
        script="reports/prefix_tuning.py",
        refusals={
            **split_refused("the model returns a DynamicCache, whose tensors cannot be joined"),
            "checkpointing": "the script fails under it: RuntimeError",
        },
    ),
    Style(
        script="reports/recurrent_policy.py",
        refusals=split_refused("the model raises RuntimeError for a part of the batch"),
    ),
    Style(
        script="reports/reversible.py",
        refusals={"checkpointing": "the gradients differ", "both": "the gradients differ"},
    ),
    Style(script="reports/skip_not_finite.py"),
    Style(
        script="reports/spiking.py",
        refusals={
            "split": "the model keeps a part of its forward",
            "checkpointing": "would change differently under the plan",
            "both": "changes in its backward",
        },
    ),
    Style(script="reports/stochastic_depth.py", redraws=True, quick=("checkpointing",)),
    Style(
        script="reports/vlm_pictures.py",
        refusals=split_refused("a call fails under it, and not without it"),
        tolerance=1e-9,
    ),
    Style(
        script="reports/wav2vec_ctc.py",
        refusals=split_refused("it draws with Python or NumPy"),
        tolerance=1e-5,
        why="the model computes in float32",
    ),
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

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "compatibility.md"
BEGIN, END = "<!-- the table of tests/scripts/_styles.py -->", "<!-- its end -->"
SOURCE = "Source: "


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", "", *_lines(), "", f"{END}{after}"])


def _lines() -> Iterator[str]:
    alike = [style for style in STYLES if not (style.refusals or style.notices or style.redraws)]
    yield from (f"- {_row(style)}" for style in alike)
    yield from ("", "| the script | batch split | blocks checkpointed |", "|---|---|---|")
    for style in STYLES:
        if style not in alike:
            both = (_outcome(style, plan) for plan in ("split", "checkpointing"))
            yield f"| {_row(style)} | {' | '.join(both)} |"


def _row(style: Style) -> str:
    does, source = described(style.script)
    return does + (f" ([report]({source}))" if source else "")


def described(script: str) -> tuple[str, str]:
    """Return what a script does, from its docstring, and the address of its report, if any."""
    path = HERE / script
    path = path / "__main__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    does, _, source = text.partition(SOURCE)
    first = " ".join(does.split("\n\n")[0].split())
    return first.rstrip(".").replace("|", "\\|"), source.split()[0] if source else ""


def _outcome(style: Style, plan: str) -> str:
    if (reason := style.refusals.get(plan)) is not None:
        return f"refused: {reason}"
    drawn = style.redraws and plan == "split"
    same = "the same training with other random draws" if drawn else "the same training"
    return style.notices.get(plan, same)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
