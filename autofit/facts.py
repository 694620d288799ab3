"""Facts about the script and the hardware, known before a strategy is tried. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

HOST = "cpu"
"""torch's name of the CPU, the kind of device of a machine without one that autofit knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device that a trial may use."""

    device: str
    """torch's name of its type, such as ``"cpu"`` or ``"cuda"``."""
    name: str
    """The device's name from the driver: ``"NVIDIA H200"``, ``"CPU"``."""
    total_bytes: int
    """Bytes of its memory."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` on the CPU."""
    multiprocessors: int = 0
    """Streaming multiprocessors of a card that is not here; 0 if it is."""
    cannot_compile: str | None = None
    """Why ``torch.compile`` cannot compile for it here, or ``None`` if it can."""
    devices: int = 1
    """Devices that one training may use."""
    link: str = ""
    """Its connection to the other visible GPUs: ``"nvlink"`` to each of them, or ``"pcie"`` to
    at least one. Empty if there is no other GPU, or if the driver does not report it."""

    @property
    def on_host(self) -> bool:
        """Whether it is the CPU, whose memory is the host's."""
        return self.device == HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """How fast the ranks of one machine communicate: bytes a second, for each kind of collective.

    This is the *bus bandwidth*: the bytes that each rank sends in a ring, divided by the seconds.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """

    all_reduce: float
    all_gather: float
    reduce_scatter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFacts:
    """One root: the outermost module called with gradients enabled and trainable parameters."""

    name: str
    """Its class name, unwrapped (``"GPT"`` for a ``DistributedDataParallel`` around a ``GPT``)."""
    parameters: int
    """Elements of all parameters. Shared parameters count once."""
    parameter_bytes: int
    """Bytes of all parameters and buffers. Shared ones count once. If sharded, one rank's shard."""
    trainable: int
    """Elements of the parameters that require gradients. If sharded, one rank's shard."""
    dtype: str
    """Data type of the first trainable parameter, such as ``"float32"``."""
    called: bool = True
    """The script has called it with gradients. If false, memory ran out before the call, and the
    facts come from the module alone."""
    batch: int | None = None
    """Samples in its first call with gradients; ``None`` if no tensor argument shows a batch."""
    batch_doubted: bool = False
    """``batch`` is the first dimension of the arguments, which may be time. No split was
    verified."""
    unsplittable: str = ""
    """Why its batch cannot be split, where a check has been made and found so."""
    blocks: int = 0
    """Number of repeated blocks, which checkpointing recomputes."""
    classes: int = 0
    """Outputs of its head, the widest linear layer outside the blocks; 0 without a head."""
    convolutions: int = 0
    """Number of 2-D and 3-D convolutions."""
    padding: float = 0.0
    """Share of the first batch's tokens after the last one that a mask or the labels use."""
    transformers: bool = False
    """It is a Hugging Face model with its own checkpointing method."""
    attention: str | None = None
    """Attention of a Hugging Face model (``"eager"``, ``"sdpa"``); ``None`` for others."""
    batch_norm: bool = False
    """It has a BatchNorm in training mode, so its statistics depend on the batch."""
    norms_again: bool = False
    """Checkpointing would run some of these BatchNorms again."""
    dropout: bool = False
    """It draws random numbers in training mode, such as in a dropout layer."""
    checkpointing: bool = False
    """The script itself uses activation checkpointing."""
    compiled: bool = False
    """The script itself compiles it."""

    @property
    def convolves(self) -> bool:
        """Whether it is a convolutional network. A vision transformer has one convolution only."""
        return self.convolutions > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the first launch found out about the script."""

    roots: tuple[RootFacts, ...] = ()
    optimizers: tuple[str, ...] = ()
    """Class of each optimizer that stepped, in that order. Before the first step: of the
    optimizers with parameters of the roots."""
    stepped: bool = False
    """The script has taken a step, so facts that need a whole step are known."""
    framework: str = "torch"
    """``"torch"``, ``"transformers"`` (its Trainer), ``"accelerate"``, ``"lightning"``."""
    calls_per_step: int = 1
    """Root calls with gradients in one optimizer step, from gradient accumulation."""
    autocast: bool = False
    """The script itself uses autocast."""
    scaler: bool = False
    """The script itself scales its loss."""
    autograd_grad: bool = False
    """The script calls ``torch.autograd.grad`` on parameters of a root."""
    gradients_read: bool = False
    """The script reads gradients between backward and step, to clip or log them."""
    gradients_zeroed: bool = False
    """The script zeroes gradients in place: ``zero_grad(set_to_none=False)``."""
    workers: int | None = None
    """Workers of the loader that gave the first batch; ``None`` if no loader was seen."""
    world_size: int = 1

    @property
    def parameters(self) -> int:
        """Elements of the parameters of all roots."""
        return sum(root.parameters for root in self.roots)

    @property
    def called(self) -> bool:
        """Whether the script has called a module with gradients."""
        return any(root.called for root in self.roots)

    @property
    def rounds(self) -> bool:
        """Whether the script itself computes in less than float32."""
        halves = {root.dtype for root in self.roots} - {"float32", "float64"}
        return self.autocast or bool(halves)

    @property
    def batch(self) -> int | None:
        """Samples in one call of the first root; ``None`` if unknown."""
        return self.roots[0].batch if self.roots else None

    @property
    def effective_batch(self) -> int | None:
        """Samples in one optimizer step over all ranks; ``None`` if unknown."""
        return None if self.batch is None else self.batch * self.calls_per_step * self.world_size
