"""What is known of the script and of the hardware before a strategy is tried. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device a trial may occupy."""

    device: str
    """``"cpu"`` or ``"cuda"``."""
    name: str
    """The model, as the driver names it: ``"NVIDIA H200"``, ``"CPU"``."""
    total_bytes: int
    """Bytes the device has."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` on the CPU."""
    cannot_compile: str | None = None
    """Why ``torch.compile`` cannot make code for it here; ``None`` where it can."""
    link: str = ""
    """How it reaches the other GPUs that are visible beside it: ``"nvlink"`` to each of them,
    ``"pcie"`` to one at least; empty where there is no other, or nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFacts:
    """One root: the outermost module called with gradients enabled and trainable parameters."""

    name: str
    """Its class, unwrapped (``"GPT"`` for a ``DistributedDataParallel`` around a ``GPT``)."""
    parameters: int
    """Elements in all parameters, shared ones once."""
    parameter_bytes: int
    """Bytes in all parameters and buffers, shared ones once; of what is sharded, one rank's."""
    trainable: int
    """Elements in the parameters that require gradients; of what is sharded, one rank's."""
    dtype: str
    """Of the first trainable parameter, ``"float32"``."""
    called: bool = True
    """It has been called with gradients; else memory ran out before, and it was looked at alone."""
    batch: int | None = None
    """Samples in its first call with gradients; ``None`` when no tensor argument shows one."""
    batch_doubted: bool = False
    """That is the first dimension of its arguments, and may be time: no split was proven."""
    blocks: int = 0
    """How many repeated blocks: the longest run of same-class children of a container."""
    classes: int = 0
    """Outputs of its head: the widest linear layer outside the blocks; 0 where there is none."""
    convolutions: int = 0
    """Convolutions of pictures that it has, in two dimensions or three."""
    padding: float = 0.0
    """Share of the first batch's tokens after the last that a sample's mask or labels name."""
    transformers: bool = False
    """A Hugging Face model that has its own checkpointing switch."""
    attention: str | None = None
    """How a Hugging Face model computes its attention (``"eager"``, ``"sdpa"``); else ``None``."""
    batch_norm: bool = False
    """Holds a BatchNorm in training mode, whose statistics depend on the batch."""
    norms_again: bool = False
    """Some of these are in what runs again under checkpointing."""
    dropout: bool = False
    """Draws random numbers in training mode (a dropout layer or rate above zero)."""
    checkpointing: bool = False
    """The script has switched activation checkpointing on by itself."""
    compiled: bool = False
    """The script has compiled it by itself."""

    @property
    def convolves(self) -> bool:
        """Whether it is a network of convolutions: a transformer has one, to cut its pictures."""
        return self.convolutions > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the first launch learned of the script."""

    roots: tuple[RootFacts, ...] = ()
    optimizers: tuple[str, ...] = ()
    """Class of each optimizer that took a step, in that order; before the first step, of those
    that hold parameters of the roots."""
    stepped: bool = False
    """A step was taken: what only a whole one shows is known."""
    framework: str = "torch"
    """``"torch"``, ``"transformers"`` (its Trainer), ``"accelerate"``, ``"lightning"``."""
    calls_per_step: int = 1
    """Root calls with gradients in one optimizer step: the script's own accumulation."""
    autocast: bool = False
    """The script enters autocast by itself."""
    scaler: bool = False
    """The script scales its loss by itself."""
    autograd_grad: bool = False
    """The script calls ``torch.autograd.grad`` on parameters of a root."""
    gradients_read: bool = False
    """The script reads gradients between a backward pass and its step: it clips or logs them."""
    gradients_zeroed: bool = False
    """The script sets gradients to zero in place: ``zero_grad(set_to_none=False)``."""
    workers: int | None = None
    """Worker processes of the loader that gave the first batch; ``None`` where none was seen."""
    world_size: int = 1

    @property
    def parameters(self) -> int:
        """Elements in the parameters of all roots."""
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
        """Samples in one call of the first root; ``None`` while unknown."""
        return self.roots[0].batch if self.roots else None

    @property
    def effective_batch(self) -> int | None:
        """Samples in one optimizer step over all ranks; ``None`` while unknown."""
        return None if self.batch is None else self.batch * self.calls_per_step * self.world_size
