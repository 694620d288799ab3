"""The records of an inspection: what held a process's memory, by kind, module and source line.

Imports no torch. A launch with an ``Inspection`` sends one ``Inspected`` event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autofit.worker.records.places import Place


class Kind(StrEnum):
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
    """Whether to record PyTorch's memory snapshot; CUDA only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of one kind that one line of code made in one module."""

    kind: Kind
    size: int
    """Bytes."""
    count: int = 1
    """Number of tensors."""
    module: str = ""
    """Path of the module, such as ``"encoder.layers.3"``; empty outside the model."""
    place: Place | None = None
    """The line of the user's own code that made them, if known."""
    operation: str = ""
    """The operation of torch that made the largest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One of the model's repeated blocks at a moment."""

    name: str
    activations: int
    """Bytes of its activations, without those of its input."""
    given: int
    """Bytes of its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The peak of one phase of a step."""

    phase: str
    """``"forward"``, ``"backward"``, ``"optimizer step"`` or ``"outside the model"``."""
    peak: int
    """Bytes that torch's allocator had given out."""
    parts: tuple[Part, ...]
    """All that held them; the sizes add up to ``peak``."""
    operation: str = ""
    """The operation that was running."""
    halved: int = 0
    """Bytes that bf16 autocast would save of the activations."""
    cast: int = 0
    """Bytes of the float32 weights that autocast would copy to 16 bits until backward."""
    logits: int = 0
    """Bytes of activations and temporary tensors as wide as the model's head."""
    logit: int = 0
    """Bytes of the largest of these tensors."""
    quantized: int = 0
    """Bytes of the optimizer state that an 8-bit optimizer replaces."""
    offloaded: int = 0
    """Bytes of activations that ``activation_offload`` would move to host memory."""
    output: int = 0
    """Bytes of the model's output, which a split batch collects until backward."""
    blocks: tuple[Block, ...] = ()
    """The repeated blocks in the order of the forward pass."""

    def of(self, *kinds: Kind) -> int:
        """Return the bytes of some kinds."""
        return sum(part.size for part in self.parts if part.kind in kinds)

    @property
    def activates(self) -> bool:
        """Whether it is in forward or backward, where weights that are cast exist twice."""
        return self.phase in ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Tensors that grow in number with every step."""

    size: int
    """Bytes a step."""
    count: int
    """Tensors a step."""
    made: Place | None
    """The line of the user's code that makes them."""
    operation: str
    module: str = ""
    """The module that makes them; empty outside the model."""
    holder: str = ""
    """What keeps them: ``"the list losses"``; empty if unknown."""
    held_at: Place | None = None
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
class Inspected:
    """The result of an inspection."""

    moments: tuple[Moment, ...]
    """One for each phase, the highest peak first."""
    plain: PlainSteps | None
    """``None`` if the script ended, or memory ran out, before those steps."""
    steps: int
    """Followed steps."""
    growths: tuple[Growth, ...] = ()
    """Leaks, the largest first."""
    snapshot: bytes | None = None
    """PyTorch's memory snapshot as ``memory_viz`` reads it."""
    uncompiled: bool = False
    """Whether the script compiles a model, which ran uncompiled."""
    requested: int | None = None
    """Bytes that the allocation requested that failed; ``None`` if none did."""
