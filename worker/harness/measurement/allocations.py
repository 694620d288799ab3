"""Follows every tensor of a process: who made it, when it was freed, and each operation's peak.

``AllocationLog`` is a dispatch mode of torch. It sees the storages that operations return, and weak
references tell when they are freed. The allocator's own counters give the peak of each operation.
So the sizes at a peak add up to what the allocator had given out: the part that no tensor explains
is a difference of two measured numbers.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from autofit.facts import HOST
from autofit.strategies.base import Undo
from autofit.worker.harness.torch_state import frames
from autofit.worker.harness.torch_state.undo import together
from autofit.worker.meter import Meter, accelerator

PRODUCTS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "convolution",
        "_convolution",
        "matmul",
        "linear",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
    }
)
"""Operations whose results autocast computes in 16 bits."""
FULL = frozenset(
    {
        "native_layer_norm",
        "_fused_rms_norm",
        "native_group_norm",
        "_softmax",
        "_log_softmax",
        "nll_loss_forward",
        "exp",
        "log",
        "log2",
        "log10",
        "log1p",
        "pow",
        "prod",
        "sum",
        "cumsum",
        "norm",
        "linalg_vector_norm",
        "rsqrt",
        "reciprocal",
        "softplus",
        "mse_loss",
        "smooth_l1_loss",
    }
)
"""Operations that autocast on a GPU computes in float32. On the CPU, most keep the input's type."""
FULL_ON_CPU = frozenset(
    {"_log_softmax", "_softmax", "nll_loss_forward", "mse_loss", "smooth_l1_loss", "huber_loss"}
)
"""Those in float32 on the CPU too: ``cross_entropy`` is two of them.

Autocast leaves a softmax alone there. But attention asks for float32: ``transformers`` in eager
mode, and torch's ``scaled_dot_product_attention`` where no fused kernel applies.
"""
PRODUCTS_BACKWARD = frozenset(
    {
        "convolution_backward",
        "linear_backward",
        *(f"{name}_backward" for name in PRODUCTS if name.startswith("_scaled")),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)
"""Operations that compute gradients of products and are not products by name."""
SCALAR = 8
"""Bytes of a number, whose type does not change that of a result."""
Line = tuple[str, int]
"""File and line number."""
TORCH = os.path.dirname(torch.__file__) + os.sep
"""The folder of torch, whose own lines say little: nearly all tensors are made in them."""


class Lines(NamedTuple):
    """The lines that were running when a tensor was made."""

    users: Line | None = None
    """The innermost line of the user's own code."""
    library: Line | None = None
    """The innermost line of a package below it, torch left out."""


class Allocator(NamedTuple):
    """The counters of torch's allocator on the device. Sizes are bytes."""

    given_out: Callable[[], tuple[int, int, int]]
    """Returns what is given out now, the most since ``reset``, and what rounding up adds to it."""
    reset: Callable[[], None]
    """Sets the peak to the present use."""


@dataclass(slots=True, eq=False)
class Allocation:
    """One storage."""

    size: int
    """Bytes."""
    born: int
    """Index of the operation that returned it."""
    step: int
    """Optimizer steps taken before."""
    phase: str
    operation: str
    lines: Lines
    """The lines that were running."""
    module: str
    width: int
    """Size of the last dimension."""
    is_float: bool
    """Whether it holds float32 numbers."""
    lowered: bool = False
    """Whether autocast would compute it in 16 bits. Of optimizer state: whether 8-bit optimizers
    would quantize it."""
    uses: list[int] = field(default_factory=list)
    """Indices of the operations that read it, while they are measured; views do not count."""
    returned: bool = False
    """Whether a root returned it."""
    block: int = -1
    """Index of the repeated block whose forward made it, and -1 outside all blocks."""
    of_block: bool = False
    """Whether that block returned it."""
    died: int | None = None
    """Index of the last operation before it was freed; ``None`` while it exists."""
    role: str = ""
    """``"weights"``, ``"gradients"`` or ``"optimizer state"``, once that is known."""
    key: int = 0
    """Address of torch's storage object."""

    def exists_at(self, index: int) -> bool:
        """Return whether it exists while operation ``index`` runs."""
        return self.born <= index and (self.died is None or self.died >= index)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation with the highest peak of its phase so far."""

    index: int
    name: str
    phase: str
    step: int
    peak: int
    before: int
    """Bytes given out before it began."""
    rounding: int


def allocator_of(meter: Meter) -> Allocator | None:
    """Return the allocator of the meter's device; ``None`` if it has not started yet."""
    if meter.device == HOST:  # its meter counts what was requested, by every use of libc10
        return Allocator(lambda: (meter.current(), meter.peak().allocated, 0), meter.reset)
    if not accelerator.started():
        return None
    return Allocator(accelerator.given_out, accelerator.reset_peak)


@dataclass(slots=True)
class Executed:
    """An operation that was measured."""

    name: str
    phase: str
    peak: int
    """Most bytes that the allocator had given out, from its begin to that of the next one."""
    block: int
    """Index of the repeated block whose forward was running, and -1 outside all blocks."""


class Modules:
    """Tells the path of the module whose forward is running, for each thread."""

    def __init__(self, on_return: Callable[[nn.Module, Any], None]) -> None:
        """``on_return``: is called with a module and what its forward has returned."""
        self._on_return = on_return
        self._running: dict[int, list[nn.Module]] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def learn(self, root: nn.Module) -> None:
        """Learn the paths of the modules of a root."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(root).__name__)

    def name_of(self, module: nn.Module) -> str:
        """Return the path of ``module``, or its class if it belongs to no root."""
        return self._names.get(module) or type(module).__name__

    def enclosing(self) -> list[nn.Module]:
        """Return the running modules of this thread, the outermost first."""
        return self._running.get(threading.get_ident(), [])

    def running(self) -> str:
        """Return the path of the innermost running module; empty outside all modules."""
        stack = self._running.get(threading.get_ident())
        return self.name_of(stack[-1]) if stack else ""

    def attach(self) -> Undo:
        """Follow all calls of modules until the undo."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        return together(self._running.clear, after.remove, before.remove)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.setdefault(threading.get_ident(), []).append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._running.get(threading.get_ident(), [])
        while stack and stack.pop() is not module:
            pass
        self._on_return(module, output)


class AllocationLog(TorchDispatchMode):
    """Follows the storages of one device from ``attach`` to ``detach``."""

    def __init__(
        self, device: str, phase: Callable[[], str], allocator: Callable[[], Allocator | None]
    ) -> None:
        """``phase``: tells what the script does now. ``allocator``: ``None`` until it exists."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = Modules(self._returned)
        self.step = 0
        """Optimizer steps taken so far."""
        self.lines = Lines()
        """The lines that started backward: other threads have no frames of the user."""
        self.peaks: dict[str, Operation] = {}
        """The operation with the highest peak of each phase, since ``measure`` was called."""
        self.executed: dict[int, Executed] = {}
        """Each operation since ``measure`` was called, by its index."""
        self.failed: Operation | None = None
        """The last operation that raised an error."""
        self.now = 0
        """Index of the present operation."""
        self._device = device
        self._apart = device != HOST
        self._phase = phase
        self._find_allocator = allocator
        self._allocator: Allocator | None = None
        self._measures = False
        self._living: dict[int, Allocation] = {}
        """Keyed by the address of torch's storage object."""
        self._references: dict[int, weakref.ref[Any]] = {}
        self._ended: list[Allocation] = []
        """Freed ones, since the last peak that they may be part of."""
        self._blocks: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._pid = os.getpid()
        self._stop: Undo | None = None

    # --- from outside ----------------------------------------------------------------------

    def attach(self) -> None:
        """Follow all operations of this thread, and of the backward passes that it starts."""
        self._stop = self.modules.attach()
        self.__enter__()  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Follow nothing any more; what was noted stays.

        A mode that the script has entered since and not left yet lies on top of this one, which
        then stays attached and does nothing.
        """
        self._measures = False
        if self._stop is None:
            return
        self._stop()
        self._stop = None
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def measure(self) -> None:
        """Measure the peak of each operation from now on; forget earlier peaks."""
        self.peaks.clear()
        self.executed.clear()
        self._ended.clear()
        self._allocator = self._allocator or self._find_allocator()
        self._measures = self._allocator is not None
        if self._allocator is not None:
            self._allocator.reset()

    def mark(self, tensor: object, role: str, module: str, *, quantized: bool = False) -> None:
        """Note what a tensor is for; one that is not known yet is followed from now on.

        ``quantized``: whether an 8-bit optimizer would replace it.
        """
        if not isinstance(tensor, torch.Tensor):
            return
        found = self._allocation(tensor)
        if found is not None:
            found.role, found.module = role, module
            found.lowered |= quantized

    def learn_blocks(self, blocks: Sequence[nn.Module]) -> None:
        """Note which modules are repeated blocks, in the order of their forward."""
        for block in blocks:
            self._blocks.setdefault(block, len(self._blocks))

    def mark_returned(self, output: object) -> None:
        """Note what a root has returned."""
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and (found := self._allocation(each)) is not None:
                found.returned = True

    def note_failure(self, operation: str = "") -> None:
        """Note that an operation, or the script, has raised an error."""
        held = self._total()
        self.failed = Operation(self.now, operation, self._phase(), self.step, held, held, 0)

    def all(self) -> list[Allocation]:
        """Return what existed since ``measure`` was called."""
        return [*self.existing(), *self._ended]

    def existing(self) -> list[Allocation]:
        """Return what exists now."""
        return list(self._living.values())

    def at(self, index: int) -> list[Allocation]:
        """Return what existed while operation ``index`` ran; it was measured."""
        return [each for each in (*self.existing(), *self._ended) if each.exists_at(index)]

    # --- operations ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stop is None or os.getpid() != self._pid or func.namespace == "prim":
            return func(*args, **kwargs)  # ``prim``: fake tensors are asked for their device
        before = self._before()
        self.now += 1
        try:
            output = func(*args, **kwargs)
        except Exception:
            self.note_failure(func.overloadpacket.__name__)
            raise
        name = func.overloadpacket.__name__
        self._note(name, args, kwargs, output)
        if self._measures and self._allocator is not None:
            self._compare(name, before, self._allocator.given_out())
        return output

    def _total(self) -> int:
        return sum(each.size for each in self.existing())

    def _before(self) -> int:
        """Count a peak since the last operation; return what is given out now."""
        if not self._measures or self._allocator is None:
            return 0
        counters = self._allocator.given_out()
        held = counters[0]
        self._compare("", held, counters)
        self._allocator.reset()
        return held

    def _compare(self, name: str, before: int, counters: tuple[int, int, int]) -> None:
        _, peak, rounding = counters
        phase = self._phase()
        if name:
            self.executed[self.now] = Executed(name, phase, peak, self._block())
        elif (last := self.executed.get(self.now)) is not None:
            last.peak = max(last.peak, peak)
        highest = self.peaks.get(phase)
        if highest is None or peak > highest.peak:
            self.peaks[phase] = Operation(
                self.now, name, phase, self.step, peak, min(before, peak), rounding
            )

    def _note(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Note the storages of an operation."""
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        inputs = [found for each in given if (found := self._allocation(each)) is not None]
        made = [
            self._allocation(each, name, inputs)
            for each in tree_leaves(output)
            if isinstance(each, torch.Tensor)
        ]
        if self._measures:
            seen = set() if name.endswith("_") else {id(each) for each in made}
            for found in inputs:
                if id(found) not in seen:  # views return the storage that they are given
                    seen.add(id(found))
                    found.uses.append(self.now)

    def _returned(self, module: nn.Module, output: object) -> None:
        """Note what a repeated block has returned."""
        index = self._blocks.get(module)
        if index is None or not self._measures:
            return
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and (found := self._allocation(each)) is not None:
                found.of_block |= found.block == index

    def _block(self) -> int:
        """Return the index of the repeated block whose forward is running."""
        if not self._measures:
            return -1
        running = self.modules.enclosing()
        return next((self._blocks[each] for each in running if each in self._blocks), -1)

    def _allocation(
        self, tensor: torch.Tensor, name: str = "", inputs: Sequence[Allocation] = ()
    ) -> Allocation | None:
        """Return what is known of a tensor's storage; ``None`` for that of another device.

        Memory that torch's allocator did not give out does not count: that of NumPy, for instance.
        """
        if tensor.device.type != self._device or tensor.layout is not torch.strided:
            return None
        if is_traceable_wrapper_subclass(tensor):  # it has no memory; the tensors inside have
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._living.get(key)
        if known is not None:
            size = storage.nbytes()
            if size != known.size:  # resized, as FSDP does to free memory
                known.size = size
            return known
        if not storage.resizable() or (not self._apart and storage.is_shared()):
            return None
        made = Allocation(
            size=storage.nbytes(),
            born=self.now,
            step=self.step,
            phase=self._phase(),
            operation=name,
            lines=self._running_lines(),
            module=self.modules.running(),
            width=int(tensor.shape[-1]) if tensor.ndim else 1,
            is_float=tensor.dtype == torch.float32,
            lowered=_lowered(name, tensor, inputs, FULL if self._apart else FULL_ON_CPU),
            block=self._block(),
            key=key,
        )
        self._living[key] = made
        self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
        return made

    def _running_lines(self) -> Lines:
        """Return the lines that are running; in a thread of backward, those that started it."""
        found = present_lines()
        if found.users is not None:
            return found
        return Lines(self.lines.users, found.library or self.lines.library)

    def _freed(self, key: int) -> None:
        found = self._living.pop(key, None)
        self._references.pop(key, None)
        if found is not None:
            found.died = self.now
            if self._measures:
                self._ended.append(found)


def _lowered(
    name: str, tensor: torch.Tensor, inputs: Sequence[Allocation], full: frozenset[str]
) -> bool:
    """Return whether autocast would compute a tensor in 16 bits.

    The results of matrix products are in 16 bits, and so are those of elementwise operations whose
    inputs all are. Type promotion makes the others float32; norms take weights of any type.

    ``full``: operations whose results are float32.
    """
    if tensor.dtype != torch.float32 or name in full or name in backward_of(full):
        return False
    if name in PRODUCTS or name in PRODUCTS_BACKWARD:
        return True
    norm = "norm" in name
    tensors = [
        each
        for each in inputs
        if each.is_float and each.size > SCALAR and not (norm and (each.role or each.width == 1))
    ]
    return bool(tensors) and all(each.lowered for each in tensors)


@cache
def backward_of(names: frozenset[str]) -> frozenset[str]:
    """Return the operations that compute the gradients of operations."""
    found = {f"{name.removesuffix('_forward')}_backward" for name in names}
    return frozenset({*found, *(f"{name}_backward_data" for name in names)})


def present_lines() -> Lines:
    """Return the lines that this thread runs now."""
    library = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code):
            return Lines((frame.f_code.co_filename, frame.f_lineno), library)
        if library is None and _is_of_package(frame.f_code):
            library = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return Lines(None, library)


@cache
def _is_users(code: CodeType) -> bool:
    return frames.is_users(code.co_filename)


@cache
def _is_of_package(code: CodeType) -> bool:
    name = code.co_filename
    return frames.is_of_package(name) and not name.startswith(TORCH)
