"""Images in channels-last memory format, which a GPU's convolutions need."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

from autofit.facts import Facts
from autofit.strategies.base import AS_IS, ByHand, Fidelity, Level, Root, ScriptPart, Strategy, Undo
from autofit.strategies.compile import WHOLE

OTHERWISE = "view size is not compatible with input tensor's size and stride"


class MemoryFormat(Strategy):
    """Images enter the model in channels last: NHWC in memory, NCHW for indexing.

    Tensor cores need the channels of a pixel side by side. For other layouts cuDNN makes copies
    around each convolution. Convolutions, norms, activations and pooling keep the layout of
    their input, so converting the inputs of the model is enough. Weights and checkpoints stay
    as they are.

    Outputs and evaluation have the script's own layout.
    """

    name = "memory_format"
    summary = "pictures laid out as a GPU's convolutions want them (channels last)"
    source = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
    levels = (
        Level(name=AS_IS, summary="as the script has it"),
        Level(
            name="channels_last",
            summary="the channels of a pixel side by side",
            slowdown=0.6,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"channels last"``."""
        return level.replace("_", " ")

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Exact in float32 without dropout, whose masks are drawn in the order of memory.

        In lower precision the rounding depends on the order of a sum.
        """
        if facts is None:
            return Fidelity.EXACT
        if facts.rounds:
            return Fidelity.ROUNDING
        return Fidelity.REDRAW if any(root.dropout for root in facts.roots) else Fidelity.EXACT

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The model needs convolutions, and the script must not compile it."""
        if not facts.roots:
            return None
        if any(root.compiled for root in facts.roots):
            return "the script compiles its model, and the compiler chooses the memory format"
        if not any(root.convolves for root in facts.roots):
            return "the model has no convolutions that gain from it"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """In one graph the compiler chooses the memory format."""
        if levels.get("compile") in WHOLE:
            return "the compiler chooses the memory format of one graph better"
        return None

    def fault(self, error: BaseException) -> str | None:
        """``view`` fails on an image in another memory format."""
        if isinstance(error, RuntimeError) and OTHERWISE in str(error):
            return "the script calls view() on images, and this memory format needs reshape()"
        return None

    def by_hand(self, level: str) -> ByHand:
        """Convert the model, as is usual, and its inputs."""
        return ByHand(
            setting="convert the model and each batch by .to(memory_format=torch.channels_last)",
            part=ScriptPart.MODEL,
            prepare="model.to(memory_format=torch.channels_last)\n"
            "# and each batch: pictures = pictures.to(memory_format=torch.channels_last)",
        )

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Convert the inputs of a root with convolutions, and convert its outputs back."""
        from autofit.strategies.inspection.convolutions import around, convolutions

        ndims = [ndim for ndim, count in convolutions(root.module).items() if count]
        known = ref(root.module)

        def training() -> bool:
            module = known()
            return module is not None and bool(module.training)

        if not ndims:
            return None
        return root.around_forward(lambda forward: around(forward, ndims, training))
