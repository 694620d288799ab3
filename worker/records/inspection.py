"""The records of an inspection: what held a process's memory, by kind, module and source line.

Imports no torch. A launch with an ``Inspection`` sends one ``Inspected`` event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's own code, or of a package."""

    line: str
    """File and line number: ``"train.py:41"``, or ``"transformers/trainer.py:4127"``."""
    source: str = ""
    """The text of the line."""


class TensorKind(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    """Parameters and buffers of the models that the script trains."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    """Tensors of a forward pass that backward needs."""
    TEMPORARY = "temporary"
    """Tensors that are freed within the same phase of the step."""
    OTHER = "other tensors"
    """Batches, other models, and whatever else the script holds."""
    WORKSPACE = "workspace"
    """Memory that the running kernel allocated for itself."""
    LIBRARIES = "libraries"
    """Memory of torch's allocator that belongs to no tensor, such as cuBLAS's workspace."""
    ROUNDING = "rounding"
    """Ends of the allocator's blocks that no tensor uses."""
    CACHE = "cache"
    """Free memory that torch's allocator holds."""
    CONTEXT = "context"
    """Memory of the process outside torch's allocator: CUDA context, libraries, NCCL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What an inspection measures beside the first step."""

    steps: int = 2
    """Optimizer steps in which every tensor is followed, after the first step."""
    plain: int = 2
    """Optimizer steps after them in which nothing is followed; they give peak and speed."""
    snapshot: bool = False
    """Whether to record PyTorch's memory snapshot; on an accelerator only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of one kind that one line of code made in one module."""

    kind: TensorKind
    size: int
    """Bytes."""
    count: int = 1
    """Number of tensors."""
    module: str = ""
    """Path of the module, such as ``"encoder.layers.3"``; empty outside the model."""
    place: SourceLine | None = None
    """The line of the user's own code that made them, if known."""
    library: SourceLine | None = None
    """The innermost line of a package that ran below it, torch left out, if one did."""
    operation: str = ""
    """The operation of torch that made the largest of them."""


class Life(NamedTuple):
    """One tensor's memory in a step. Operations count from the first one of the step."""

    size: int
    """Bytes."""
    start: int
    """The operation that made it, or 0 if it existed before."""
    end: int
    """The last operation before it was freed."""
    used: int
    """The last operation of the forward pass that read it."""
    wanted: int
    """The first operation of backward that reads it; beyond the step if none does."""
    kind: str
    """``TensorKind.WEIGHTS``, ``GRADIENTS``, ``OPTIMIZER_STATE``, or ``OTHER`` if it is from before
    this step; empty for tensors of the step itself."""
    block: int
    """Index of the repeated block whose forward made it, and -1 outside all blocks."""
    of_block: bool
    """Whether that block returned it."""
    returned: bool
    """Whether the model returned it."""
    wide: bool
    """Whether its last dimension is that of the model's head."""
    quantized: bool
    """Whether an 8-bit optimizer would replace it."""
    of_weight: bool = False
    """Whether it is a copy of a weight or of its gradient, which does not grow with the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All tensors of one optimizer step, operation by operation."""

    lives: tuple[Life, ...]
    lowered: tuple[Life, ...]
    """The same under bf16 autocast."""
    peaks: tuple[int, ...]
    """Bytes that the allocator had given out at most during each operation; 0 if unknown."""
    forward: tuple[int, ...]
    """The operations of the forward pass, the loss included."""
    backward: tuple[int, ...]
    """The operations of backward."""
    blocks: tuple[str, ...]
    """Paths of the repeated blocks in the order of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """The peak of one phase of a step."""

    phase: str
    """``"forward"``, ``"backward"``, ``"optimizer step"`` or ``"outside the model"``."""
    peak: int
    """Bytes that torch's allocator had given out."""
    parts: tuple[Part, ...]
    """All that held them; the sizes add up to ``peak``."""
    operation: str = ""
    """The operation that was running."""

    def of(self, *kinds: TensorKind) -> int:
        """Return the bytes of some kinds."""
        return sum(part.size for part in self.parts if part.kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Tensors, or the nodes of a graph, that grow in number with every step."""

    size: int
    """Bytes a step."""
    count: int
    """Tensors a step; 0 if only nodes of a graph are left."""
    made: SourceLine | None
    """The line of the user's code that makes them."""
    operation: str
    module: str = ""
    """The module that makes them; empty outside the model."""
    holder: str = ""
    """What keeps them: ``"the list losses"``; empty if unknown."""
    held_at: SourceLine | None = None
    """The line that puts them there, if it was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSteps:
    """Figures of the steps in which nothing was followed."""

    allocated: int
    """Most bytes that tensors held."""
    reserved: int
    """Most bytes that torch's allocator held."""
    device: int
    """Most bytes that the process occupied on the device."""
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a GPU has to do in one optimizer step."""

    products: float = 0.0
    """Floating-point operations of matrix products, convolutions and attention in float32."""
    half_products: float = 0.0
    """Those in 16 bits."""
    traffic: float = 0.0
    """Bytes that the other operations read and write."""
    launches: int = 0
    """Kernels that the host launches, each operation counted once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A line that reads numbers which a fake GPU does not know."""

    place: SourceLine | None
    """The line of the user's own code, if known."""
    count: int
    """How often it did."""
    decides: bool
    """Whether it was a condition: the script may take another path on a real GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """The result of an inspection."""

    moments: tuple[PeakMoment, ...]
    """One for each phase, the highest peak first."""
    plain: PlainSteps | None
    """``None`` if the script ended, or memory ran out, before those steps."""
    steps: int
    """Followed steps."""
    timeline: Timeline | None = None
    """The last followed step; ``None`` if no whole step was followed."""
    growths: tuple[Growth, ...] = ()
    """Leaks, the largest first."""
    snapshot: bytes | None = None
    """PyTorch's memory snapshot as ``memory_viz`` reads it."""
    uncompiled: bool = False
    """Whether the script compiles a model, which ran uncompiled."""
    requested: int | None = None
    """Bytes that the allocation requested that failed; ``None`` if none did."""
    work: Work | None = None
    """Of the last followed step on a fake GPU."""
    guesses: tuple[Guess, ...] = ()
    """The numbers that a fake GPU did not know, the most frequent first."""
    tries_kernels: bool = False
    """Whether ``cudnn.benchmark`` would try kernels on a GPU that is not here: their workspaces are
    not known."""
