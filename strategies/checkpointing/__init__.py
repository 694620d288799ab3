"""Activation checkpointing: stores the input of a block and recomputes the rest in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.strategies.base import (
    AS_IS,
    AUTO,
    ByHand,
    Level,
    Memory,
    Number,
    Root,
    ScriptPart,
    Setting,
    Strategy,
    Training,
    Undo,
)
from autofit.strategies.inspection.blocks import repeated_blocks
from autofit.strategies.inspection.heads import share_of_logits
from autofit.strategies.inspection.own_checkpointing import has_switch, uses_own_switch
from autofit.strategies.support.block_levels import ALL, count, most_blocks

UNKNOWN_SHARE = 0.5
"""Share of the blocks for a number of blocks, where the number of all blocks is not known."""

INPUT_HOOKS = ("_require_grads_hooks", "_require_grads_hook")
"""Attributes of a Hugging Face model with the handles of its embedding hooks."""
PLAIN = """
from functools import partial

from torch.utils.checkpoint import checkpoint

# A Hugging Face model does it by itself: model.gradient_checkpointing_enable()
# Norms in a block that keep statistics of the batches count each of them twice so.
for block in blocks[:COUNT]:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
"""


class Checkpointing(Strategy):
    """Non-reentrant checkpointing of the repeated blocks (Chen et al., 2016).

    Besides the levels listed, every positive integer is a level: the number of blocks, counted from
    the model's input. Backward begins at the output. The last blocks have freed their activations
    before the first of these blocks runs again, so the peak is lowest. A search uses ``auto`` and
    stores the number that it finds.

    Hugging Face models use their own checkpointing, which also keeps the key-value cache from
    being written twice. In other models each block runs through ``torch.utils.checkpoint``. The
    random draws are repeated, so the gradients are the same.
    """

    name = "checkpointing"
    summary = "keeps a block's input and recomputes its activations in backward"
    source = "https://arxiv.org/abs/1604.06174"
    lowers = frozenset({Memory.ACTIVATIONS})
    replays = True
    number = Number.BLOCKS
    levels = (
        Level(name=AS_IS, summary="as the script has it", ordered=True),
        Level(
            name=AUTO,
            summary="as many blocks as the budget needs, found inside one launch",
            slowdown=1.12,
            keeps=0.55,
            ordered=True,  # its trial finds a number, from no block to all
        ),
        Level(name=ALL, summary="every block", slowdown=1.25, keeps=0.15, ordered=True),
    )

    def numbered(self, name: str) -> Level:
        """Return the level of a number of blocks."""
        return replace(self.level(AUTO), name=name, summary=f"the first {name} blocks")

    def leaner_levels(self, level: str, facts: Facts) -> tuple[str, ...]:
        """Return a number halfway between ``level`` and all blocks, then all blocks.

        If less than a third of the blocks is left, all blocks are the only fallback.
        """
        if level == ALL:
            return ()
        if not (blocks := most_blocks(facts)):
            return (ALL,)
        now = 0 if level == AUTO else count(level, blocks)
        halfway = (now + blocks + 1) // 2
        return (str(halfway), ALL) if 3 * (blocks - now) > blocks > halfway else (ALL,)

    def extent(self, level: str, facts: Facts) -> float:
        """Return the share of the blocks that run again under ``level``."""
        if level in (AS_IS, ALL):
            return float(level == ALL)
        blocks = most_blocks(facts)
        return count(level, blocks) / blocks if blocks and level != AUTO else UNKNOWN_SHARE

    def expected_share(self, level: str, facts: Facts) -> float:
        """The logits remain, whichever blocks are recomputed."""
        logits = share_of_logits(facts) or 0.0
        freed = self.extent(level, facts) * (1.0 - self.level(ALL).keeps)
        return logits + (1.0 - logits) * (1.0 - freed)

    def expected_slowdown(self, level: str, facts: Facts) -> float:
        """Each block that runs again takes its share of the time."""
        return 1.0 + self.extent(level, facts) * (self.level(ALL).slowdown - 1.0)

    def describe(self, level: str) -> str:
        """Return ``"checkpointing"``, or ``"checkpointing 7 blocks"``."""
        if level.isdecimal():
            return f"{self.name} {level} block{'s' * (int(level) != 1)}"
        return self.name if level == ALL else f"{self.name} {level}"

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The model needs repeated blocks, and the script must not checkpoint."""
        if not facts.roots:
            return None
        if any(root.checkpointing for root in facts.roots):
            return "the script checkpoints already"
        if not any(root.blocks for root in facts.roots):
            return "the model has no repeated blocks"
        if any(r.norms_again and (r.transformers or r.compiled) for r in facts.roots):
            return "BatchNorm would update its statistics twice"
        if level == AUTO and most_blocks(facts) < 2:
            return "the model has one block: all is the same"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Checkpoint the blocks; ``auto`` has no number yet.

        A Hugging Face model has its own method.
        """
        if level == AUTO:
            return None
        some = "" if level == ALL else f"[:{level}]"
        which = "repeated" if level == ALL else f"first {level} repeated"
        return ByHand(
            setting=f"for the {which} blocks: block.forward = functools.partial("
            "torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)",
            part=ScriptPart.MODEL,
            prepare=PLAIN.replace("[:COUNT]", some),
            blocks=True,
        )

    def setting(self, level: str, form: str, training: Training) -> Setting | None:
        """Return all blocks in Accelerate's FSDP, and in a Trainer with or without FSDP."""
        if level != ALL:
            return None
        if form == "accelerate" and training.fsdp:
            return Setting(fields={"fsdp_config": {"fsdp_activation_checkpointing": True}})
        if form == "trainer" and training.fsdp:
            return Setting(fields={"fsdp_config": {"activation_checkpointing": True}})
        if form == "trainer":
            own = {"use_reentrant": False}
            name = "gradient_checkpointing"
            return Setting(fields={name: True, f"{name}_kwargs": own})
        return None

    def statements(
        self, level: str, model: str, blocks: str | None, training: Training
    ) -> Sequence[str] | None:
        """Checkpoint the first blocks, or all by the model's own method."""
        if level == ALL and any(root.transformers for root in training.facts.roots):
            return (f"{model}.gradient_checkpointing_enable()",)
        if blocks is None or not (level == ALL or level.isdecimal()):
            return ()
        some = "" if level == ALL else f"[:{level}]"
        return (
            "import functools",
            "import torch.utils.checkpoint",
            f"for block in {model}.{blocks}{some}:",
            "    block.forward = functools.partial(",
            "        torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False",
            "    )",
        )

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Checkpoint all blocks, or the first of them. A number has replaced ``auto`` before."""
        if level == AUTO:
            raise Refused("only a search can use auto: give a number of blocks")
        module = root.module
        blocks = repeated_blocks(module)
        if uses_own_switch(module, blocks):
            return _switch_on(module, level, blocks)
        blocks = blocks[: count(level, len(blocks))]
        if not blocks:
            return None  # another root of this script has the blocks
        if any(type(each).__name__ == "SyncBatchNorm" for b in blocks for each in b.modules()):
            raise Refused(
                "SyncBatchNorm communicates between ranks, and checkpointing would repeat this"
            )
        if root.hides(blocks):
            return _in_graph(blocks)
        from autofit.strategies.checkpointing.recompute import wrapper

        undos = [root.around_call(block, wrapper(block)) for block in blocks]

        def undo() -> None:
            for take_back in undos:
                take_back()

        return undo


def _in_graph(blocks: Sequence[Any]) -> Undo:
    """Checkpoint by the blocks' ``forward``, which code compiled by the script calls."""
    from torch.utils.checkpoint import checkpoint

    before = [(block, vars(block).get("forward")) for block in blocks]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def undo() -> None:
        for block, own in before:
            del block.forward
            if own is not None:
                block.forward = own

    return undo


def _switch_on(module: Any, level: str, blocks: Sequence[Any]) -> Undo:
    """Call the model's own method, then disable checkpointing outside the first blocks."""
    flags = [vars(each).get("gradient_checkpointing") for each in module.modules()]
    handles = [
        (each, {name: vars(each).get(name) for name in INPUT_HOOKS})
        for each in module.modules()  # the model may be inside another, as PEFT's has it
        if hasattr(type(each), "disable_input_require_grads")
    ]
    settings = {"use_reentrant": False}
    if hasattr(module, "activation_checkpointing_enable"):  # transformers 5.20 renamed it
        module.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for each, before in handles:
        _drop_input_hooks(each, before)
    layers = [each for each in blocks if has_switch(each)]
    some = set(layers[: count(level, len(layers))])
    for each in filter(has_switch, module.modules()):
        each.gradient_checkpointing = each in some
    _replace_calls(module)

    def undo() -> None:
        for each, flag in zip(module.modules(), flags, strict=True):
            vars(each).pop("_gradient_checkpointing_func", None)
            if flag is None:
                vars(each).pop("gradient_checkpointing", None)
            else:
                each.gradient_checkpointing = flag

    if level != ALL and not layers:
        undo()
        raise Refused("this model's own checkpointing cannot checkpoint single blocks")
    return undo


def _replace_calls(module: Any) -> None:
    """Let the model's layers call ``recompute.Switched`` in place of torch's function."""
    from autofit.strategies.checkpointing.recompute import Switched

    for each in module.modules():
        if "_gradient_checkpointing_func" in vars(each):
            each._gradient_checkpointing_func = Switched()


def _drop_input_hooks(module: Any, before: dict[str, Any]) -> None:
    """Remove the model's new hooks on its embeddings, which cannot be pickled.

    They make the first block's inputs require gradients, which only reentrant checkpointing needs.
    ``before``: the handles that the script had set, if any.
    """
    if any(vars(module).get(name) is not handle for name, handle in before.items()):
        module.disable_input_require_grads()
    for name, handle in before.items():
        vars(module).pop(name, None)
        if handle is not None:
            setattr(module, name, handle)
