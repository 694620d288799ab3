"""torch.compile for the repeated blocks or the whole root; or the blocks as CUDA graphs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from autofit.exceptions import Refused
from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Forward,
    Level,
    Memory,
    Root,
    ScriptPart,
    Setting,
    Strategy,
    Training,
    Undo,
)
from autofit.strategies.inspection.blocks import repeated_blocks
from autofit.strategies.inspection.heads import WIDE
from autofit.strategies.support.block_levels import ALL, count

SETTINGS: dict[str, Any] = {"options": {"fallback_random": True}}
"""Options of ``torch.compile``. Inductor's own random numbers would give other dropout masks
than PyTorch's. Then gradients could not be compared, and a chunk could not be recomputed."""

WHOLE = ("full", "budget")
"""Levels that compile the root itself."""
GRAPHS = "graphs"
ALL_CHECKPOINTED = "every block is checkpointed, and a checkpointed block cannot be a CUDA graph"

SETUP, SETUP_OF_BLOCK = 5.0, 2.1
"""Seconds to compile a whole model, and for each of its blocks: ViT-L, BERT-L, GPT-2 XL, ResNet-152
on an H200."""

LOGIT = 1300.0
"""Time that a plain step spends on a logit, relative to a parameter: GPT-2 medium and XL on an
H100. The whole model's graph fuses it with the loss."""
MOST_LOGITS = 0.3
"""Largest share of the step time that the logits are expected to take."""

KEEPS = 0.8
"""Share of the activations that fused kernels leave: 0.46 in GPT-2 XL, 0.94 in BERT-L, 0.99 in
ViT-L, in bf16 on an H100 or H200."""

BUDGET = 0.5
"""Share of the activations to keep: 0 is the graph's inputs only, 1 is the fastest choice."""

GRAPHS_A_BLOCK = 4
"""Graphs for each block: with and without gradients, in training and evaluation. Blocks of one
class share torch's limit."""

MOST_SECONDS = 80.0
"""Seconds that a trial may take to compile."""
PLAIN = (bool, int, float, str, tuple)
"""Types of the attributes by which torch may compile a block anew."""

TRITON = (7, 0)
"""The first CUDA compute capability that Triton supports."""

COMPILERS = ("torch._dynamo.exc", "torch._inductor.exc", "torch._functorch")
"""Modules of the compiler's own exceptions."""
UNSUPPORTED = ("non-empty donated buffers", "does not currently support double backward")
"""Texts of RuntimeErrors for operations that compiled code does not support."""

AGAIN = ("create_graph", "retain_graph")
"""Words of a script that differentiates a graph twice, perhaps late in its training."""
DIFFERENTIATED_AGAIN = (
    "the script has create_graph or retain_graph, and compiled code can be differentiated only once"
)


OTHER_DRAWS = "ompiled dropout draws Inductor's own random numbers."


def _in_accelerate(*, regional: bool) -> Setting:
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": regional}
    return Setting(fields={"dynamo_config": dynamo}, notes=(f"C{OTHER_DRAWS}",))


class Compile(Strategy):
    """``torch.compile`` in place, with the default mode (Ansel et al., 2024).

    Each module keeps its class, its name and its parameters (``Module.compile``), so
    checkpoints carry no prefix. ``accelerate.utils.compile_regions`` returns a new model
    instead, while the script and its optimizer hold the old one.

    Each size of a batch needs its own graph, so all chunks have one size. A search finds this
    size without compiling. If most blocks differ, each has graphs for fixed sizes only. Random
    draws are PyTorch's own. Fused kernels in half precision round less often, so the level is
    ``rounding`` if the script trains in half precision.

    Under ``budget`` the compiler chooses what backward recomputes (He and Yu, 2023;
    ``torch._functorch.config.activation_memory_budget``). Recomputed operations draw again, so
    a model with dropout would get other gradients.

    Under ``graphs`` nothing is compiled: the block's own kernels are launched at once, as a CUDA
    graph (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). That helps where the
    CPU takes longer to launch the kernels than the GPU to run them. The results are the same.
    Blocks that are checkpointed too run as they would without it.

    A script that has ``create_graph`` or ``retain_graph`` is not compiled, although it may use them
    seldom or late: then it would fail in mid-run.
    """

    name = "compile"
    summary = "fuses operations into fewer kernels (torch.compile)"
    source = "https://pytorch.org/assets/pytorch2-2.pdf"
    sized = True
    levels = (
        Level(name=AS_IS, summary="as the script has it"),
        Level(
            name="regional",
            summary="the repeated blocks, compiled once",
            slowdown=0.85,
            keeps=KEEPS,
            setup_seconds=14.0,
            settings={"accelerate": _in_accelerate(regional=True)},
            lowers=frozenset({Memory.ACTIVATIONS}),
        ),
        Level(
            name="full",
            summary="the whole model as one graph",
            slowdown=0.84,
            keeps=KEEPS,
            setup_seconds=100.0,
            contains="regional",
            settings={
                "accelerate": _in_accelerate(regional=False),
                "trainer": Setting(
                    fields={"torch_compile": True}, notes=(f"torch_compile: c{OTHER_DRAWS}",)
                ),
            },
            lowers=frozenset({Memory.ACTIVATIONS}),
        ),
        Level(
            name="budget",
            summary="the same, and half of what backward needs is made again there",
            slowdown=0.93,
            keeps=0.5,
            setup_seconds=100.0,
            contains="regional",
            refines=True,
            lowers=frozenset({Memory.ACTIVATIONS}),
        ),
        Level(
            name=GRAPHS,
            summary="the kernels of each repeated block launched at once, as a CUDA graph",
            launches=0.4,
            setup_seconds=3.0,
            refines=True,
            lowers=frozenset(),
        ),
    )

    def expected_slowdown(self, level: str, facts: Facts) -> float:
        """The whole model gains more than its blocks with convolutions, or if logits are costly."""
        expected = super().expected_slowdown(level, facts)
        if level != "full":
            return expected
        if any(root.convolves for root in facts.roots):
            return 0.55
        wide = [root for root in facts.roots if root.classes >= WIDE]
        logits = max((LOGIT * each.classes / each.parameters for each in wide), default=0.0)
        return expected * (1.0 - min(logits, MOST_LOGITS))

    def expected_setup(self, level: str, facts: Facts) -> float:
        """The whole model takes as long as its blocks one after the other."""
        blocks = max((root.blocks for root in facts.roots), default=0)
        if level in WHOLE and blocks:
            return SETUP + SETUP_OF_BLOCK * blocks
        return super().expected_setup(level, facts)

    def describe(self, level: str) -> str:
        """Return ``"regional compile"``, or ``"CUDA graphs"``."""
        return "CUDA graphs" if level == GRAPHS else f"{level} compile"

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Exact in float32. ``rounding`` if the script computes in lower precision."""
        if facts is None or level == GRAPHS:
            return self.level(level).fidelity
        return Fidelity.ROUNDING if facts.rounds else Fidelity.EXACT

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """It needs a GPU that Triton supports, and a compiler; ``graphs`` needs the GPU only."""
        if hardware.device != "cuda":
            return "a search compiles for GPUs only"
        if level == GRAPHS:
            return None
        if (hardware.capability or (0, 0)) < TRITON:
            return f"Triton needs compute capability 7.0, {hardware.name} has less"
        return hardware.cannot_compile

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The script must not compile. ``regional`` needs repeated blocks."""
        if any(root.compiled for root in facts.roots):
            return "the script compiles its model already"
        of_blocks = level in ("regional", GRAPHS)
        if of_blocks and facts.roots and not any(root.blocks for root in facts.roots):
            return "the model has no repeated blocks"
        if level == "budget" and any(root.dropout for root in facts.roots):
            return "dropout would draw other values when backward recomputes it"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """One graph has no calls of single blocks, which checkpointing needs."""
        if level == GRAPHS:
            if levels.get("checkpointing") == ALL:
                return ALL_CHECKPOINTED
            if levels.get("activation_offload", AS_IS) != AS_IS:
                return "what backward needs stays in the memory of the CUDA graphs"
            return None
        if level in WHOLE and levels.get("checkpointing", AS_IS) != AS_IS:
            return "checkpointing needs the calls of single blocks, which one graph does not have"
        return None

    def fault(self, error: BaseException) -> str | None:
        """Recognise the compiler's own errors, and operations that it does not support."""
        own = type(error).__module__.startswith(COMPILERS)
        if not own and not any(words in str(error) for words in UNSUPPORTED):
            return None
        if "FailOnRecompileLimitHit" in type(error).__name__:
            return "torch recompiled up to its limit, because shapes keep changing"
        cause = getattr(error, "inner_exception", None) or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        return f"torch.compile: {type(cause).__name__}: {lines[0] if lines else ''}"

    def by_hand(self, level: str) -> ByHand | None:
        """Compile the model or its blocks in place. CUDA graphs take more than a few lines."""
        if level == GRAPHS:
            return None
        if level == "full":
            setting = "call model.compile()"
            return ByHand(setting=setting, part=ScriptPart.MODEL, prepare="model.compile()")
        if level == "budget":
            budget = f"torch._functorch.config.activation_memory_budget = {BUDGET}"
            return ByHand(
                setting=f"set {budget} and call model.compile()",
                part=ScriptPart.MODEL,
                prepare=f"""
                import torch._functorch.config

                {budget}
                model.compile()
                """,
            )
        return ByHand(
            setting="for the repeated blocks: block.compile()",
            part=ScriptPart.MODEL,
            prepare="""
            shapes = [[p.shape for p in block.parameters()] for block in blocks]
            alike = 2 * max(map(shapes.count, shapes)) >= len(shapes)
            for block in blocks:  # in place: the checkpoint's names stay
                block.compile(dynamic=None if alike else False)
            """,
            blocks=True,
        )

    def statements(
        self, level: str, model: str, blocks: str | None, training: Training
    ) -> Sequence[str] | None:
        """Compile the blocks that the script shows."""
        if level != "regional":
            return None
        return () if blocks is None else (f"for block in {model}.{blocks}:", "    block.compile()")

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Compile the root or each of its blocks. The compiler runs in the calls that follow."""
        modules = [root.module] if level in WHOLE else repeated_blocks(root.module)
        if not modules:
            return None  # another root of this script has the blocks
        if any(each._compiled_call_impl is not None for each in root.module.modules()):
            raise Refused("the script compiles a part of the model already")
        if root.script_mentions(*AGAIN):
            raise Refused(DIFFERENTIATED_AGAIN)
        undo_size = root.one_size()
        if level == GRAPHS:
            return _record_blocks(modules, root, undo_size)
        undo_limits = _limits(len(modules), root.strict)
        undo_budget = root.around_forward(_within_budget) if level == "budget" else None
        dynamic = None if _mostly_alike(modules) else False
        for each in modules:
            _compile(each, dynamic=dynamic)
        if root.strict:
            _limit_time(modules)

        def undo() -> None:
            for each in modules:
                vars(each).pop("_compiled_call_impl", None)
            if undo_budget is not None:
                undo_budget()
            undo_limits()
            undo_size()
            _forget()

        return undo


def _record_blocks(blocks: Sequence[Any], root: Root, undo_size: Undo) -> Undo:
    """Run each block as a CUDA graph, but those that are checkpointed."""
    from autofit.strategies.compile.graphs import GraphedBlock, GraphMemory

    blocks = blocks[count(root.levels["checkpointing"], len(blocks)) :]
    if not blocks:
        undo_size()
        raise Refused(ALL_CHECKPOINTED)
    memory = GraphMemory()
    graphed = [GraphedBlock(b, memory, root.changes_of(b), root.set_aside) for b in blocks]
    pairs = zip(blocks, graphed, strict=True)
    undos = [root.around_call(block, each.around) for block, each in pairs]

    def undo() -> None:
        for take_back in (*undos, *(each.clear for each in graphed), undo_size):
            take_back()

    return undo


def _limit_time(modules: Sequence[Any]) -> None:
    """Refuse a compilation that is expected to take more than ``MOST_SECONDS``.

    Blocks of one kind share compiled code. So the first block tells how long all kinds take.
    """
    if len(modules) < 2:
        return
    kinds, begun = _kinds(modules), list[float]()

    def limited(compiled: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(begun) < 2:
                begun.append(time.monotonic())
            if len(begun) == 2:
                begun.append(0.0)
                expected = kinds * (begun[1] - begun[0])
                if expected > MOST_SECONDS:
                    text = f"compiling {kinds} kinds of blocks is expected to take {expected:.0f} s"
                    raise Refused(text, Compile.name)
            return compiled(*args, **kwargs)

        return call

    for each in modules:
        each._compiled_call_impl = limited(each._compiled_call_impl)


def _kinds(modules: Sequence[Any]) -> int:
    """Return how many kinds of blocks there are: of a class, shapes and plain attributes.

    An attribute that differs in nearly every block, such as its index, makes no kind: torch then
    compiles code for any value.
    """
    plain = [
        {name: each for name, each in vars(module).items() if isinstance(each, PLAIN)}
        for module in modules
    ]
    values = {name: {repr(each.get(name)) for each in plain} for each in plain for name in each}
    telling = [name for name, found in values.items() if 2 * len(found) <= len(modules)]
    return len(
        {
            (
                type(module),
                tuple(tuple(each.shape) for each in module.parameters()),
                tuple(repr(own.get(name)) for name in telling),
            )
            for module, own in zip(modules, plain, strict=True)
        }
    )


def _mostly_alike(modules: Sequence[Any]) -> bool:
    """Return whether at least half of the modules have parameters of the same shapes."""
    from torch.nn.parameter import is_lazy

    shapes = [[None if is_lazy(p) else p.shape for p in each.parameters()] for each in modules]
    return 2 * max(map(shapes.count, shapes)) >= len(shapes)


def _compile(module: Any, *, dynamic: bool | None) -> None:
    """Compile a module in place. ``dynamic`` is the argument of ``torch.compile``.

    Dynamo skips frames of torch itself, so it would compile nothing of a module such as
    ``Sequential``. For these ``wrap_top_frame`` adds a frame around the call.
    """
    from torch._dynamo import config

    own = type(module).__module__.startswith("torch.nn.modules.")
    with config.patch(wrap_top_frame=True) if own else nullcontext():
        module.compile(**SETTINGS, dynamic=dynamic)


def _limits(modules: int, strict: bool) -> Undo:
    """Raise torch's limit of graphs for ``modules``. With ``strict`` reaching it is an error.

    Otherwise torch warns and continues without compiling. That is right for a real run, but a trial
    would measure something else.
    """
    from torch._dynamo import config

    wanted = {"recompile_limit": max(config.recompile_limit, GRAPHS_A_BLOCK * modules)}
    if strict:
        wanted["fail_on_recompile_limit_hit"] = True
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)

    def undo() -> None:
        for name, value in before.items():
            setattr(config, name, value)

    return undo


def _within_budget(forward: Forward) -> Forward:
    """Return ``forward`` with the activation memory budget for code compiled in it."""
    from torch._functorch import config

    def call(*args: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=BUDGET):
            return forward(*args, **kwargs)

    return call


def _forget() -> None:
    """Free the compiled code, because other plans would share its limit and shapes."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
