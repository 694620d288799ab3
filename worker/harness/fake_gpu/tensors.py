"""Tensors without memory that say they are on a GPU: torch's ``FakeTensorMode``, extended.

torch's own mode gives each operation's result its shape, type and device. This one adds three
things. It tells an allocator of each storage on the GPU. It works in a torch that was built without
CUDA. And it knows numbers: the result of an operation is computed for real where it is small and
all inputs are known; what depends on other numbers gets a guess, which is counted.

Several private parts of torch are used. torch has no public way to keep a backward pass from asking
a driver that does not exist for streams; ``tests/harness/fake_gpu`` runs one.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from autofit.worker.harness.fake_gpu.allocator import CachingAllocator
from autofit.worker.harness.fake_gpu.attention import HALF
from autofit.worker.harness.torch_state import frames
from autofit.worker.records.inspection import Work

GPU = torch.device("cuda", 0)
TO_CPP = torch.device("lazy")
"""The device that torch's C++ code is told in place of the GPU.

For a GPU, its autograd engine asks the driver for streams. For a lazy device it does not, and no
script uses one. Python code sees the GPU.
"""
GUARD_OF_CUDA, GUARD_OF_OURS = 1, 20
"""Indices of device types, ``DeviceType`` in ``c10/core/DeviceType.h``."""
KNOWN = 1 << 16
"""Most elements of a tensor whose numbers are computed."""
GUESSED = 1 << 26
"""Most elements of a tensor from whose shape a guess is made."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear"}
"""Operations of cuBLAS."""
aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
NUMBER = aten._local_scalar_dense.default
CONVOLUTION = aten.convolution.default
SAME_TENSOR = {aten.eq.Tensor: True, aten.ne.Tensor: False}
"""How ``isnan`` and ``isfinite`` ask: no number is ``nan``, so each equals itself."""
INFINITE = {aten.eq.Scalar: False, aten.ne.Scalar: True}
FINITE = {aten.isnan.default: False, aten.isinf.default: False}
SCALING = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
"""Operations of a gradient scaler, for which all gradients are finite."""
Place = tuple[str, int]


class FakeMode(FakeTensorMode):
    """While it is active, tensors have no memory, and storages on the GPU are counted."""

    avoid_device_init = True
    """``torch.tensor`` must not ask the driver. torch asks whether there is a GPU instead."""

    def __init__(self, allocator: CachingAllocator, workspace: int) -> None:
        """``workspace``: bytes that cuBLAS keeps from the first matrix product on."""
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.guesses: Counter[Place | None] = Counter()
        """How often each line of the user's code has read a number that is not known."""
        self.decisions: Counter[Place | None] = Counter()
        """Those that were used as a condition."""
        self.work = Work()
        """What the GPU had to do since this was set."""
        self.tries_kernels = False
        """Whether a convolution has run under ``cudnn.benchmark``."""
        self.autocast = False
        """Whether the script is inside CUDA's autocast."""
        self._allocator = allocator
        self._workspace = workspace
        self._kept: object = None
        self._depth = 0
        self._storages: set[int] = set()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation."""
        kwargs = dict(kwargs or {})
        if func is DEVICE:
            return self._device(args[0])
        if kwargs.get("device") is not None and kwargs["device"].type == TO_CPP.type:
            kwargs["device"] = GPU
        if self._depth:  # a part of an operation: it has no memory of its own
            return super().dispatch(func, types, args, kwargs)
        kwargs.pop("pin_memory", None)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        real = tensors and not any(isinstance(each, FakeTensor) for each in tensors)
        on_gpu = kwargs.get("device") is not None and kwargs["device"].type == GPU.type
        if real and not on_gpu:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in SCALING:
            return args[0] if name.startswith("_amp_update") else None
        self._depth += 1
        try:
            output = self._output(func, types, args, kwargs, tensors)
        finally:
            self._depth -= 1
        self._count(name, output)
        if tensors and not func.is_view and any(t.device.type == GPU.type for t in tensors):
            self._work(func, args, kwargs, tensors, output)
        return output

    def _device(self, tensor: FakeTensor) -> torch.device:
        """Answer C++ code that asks for a device. Only autocast must hear that it is a GPU."""
        if tensor.fake_device.type != GPU.type:
            return tensor.fake_device
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded("AutocastCUDA")
        return tensor.fake_device if self.autocast and excluded else TO_CPP

    # --- numbers -----------------------------------------------------------------------------

    def _output(
        self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
    ) -> Any:
        if func is NUMBER:
            return self._number(args[0])
        if func is aten.index.Tensor:
            args = (args[0], [self._without_mask(each) for each in args[1]], *args[2:])
        known = [_known(each) for each in tensors]
        all_known = all(each is not None for each in known)
        try:
            output = super().dispatch(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if not all_known:
                self._guess(decides=False)
            return self._as_fake(_computed(func, args, kwargs, guess=True), tensors)
        fakes = [each for each in tree_leaves(output) if isinstance(each, FakeTensor)]
        small = bool(fakes) and all(each.numel() <= KNOWN for each in fakes)
        numbers = None
        if all_known and small and not torch.is_inference_mode_enabled():
            numbers = _computed(func, args, kwargs)
        if numbers is None and len(fakes) == 1:
            numbers = _finite(func, args, fakes[0])
        if numbers is not None:
            for fake, number in zip(tree_leaves(output), tree_leaves(numbers), strict=False):
                if isinstance(fake, FakeTensor):
                    vars(fake)["known"] = number
        elif func._schema.is_mutable:
            for each in fakes:
                vars(each).pop("known", None)
        return output

    def _number(self, tensor: torch.Tensor) -> bool | int | float:
        """Return the number of a tensor with one element, or a guess."""
        known = _known(tensor)
        if known is None:
            self._guess(decides=tensor.dtype == torch.bool)
            with _disable_current_modes():
                known = torch.ones((), dtype=tensor.dtype)
        found: bool | int | float = known.item()
        return found

    def _guess(self, *, decides: bool) -> None:
        line = _users_line()
        self.guesses[line] += 1
        if decides:
            self.decisions[line] += 1

    def _without_mask(self, index: torch.Tensor | None) -> torch.Tensor | None:
        """Return indices in the place of a mask. If it is not known, it selects all elements."""
        if index is None or index.dtype != torch.bool:
            return index
        known = _known(index)
        if known is None:
            self._guess(decides=False)
        selected = index.numel() if known is None else int(known.count_nonzero())
        with self:
            whole = torch.empty(index.ndim, selected, dtype=torch.int64, device=index.device)
        return whole if index.ndim == 1 else torch.empty_like(whole[0])

    def _as_fake(self, output: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Return tensors without memory in the shape of ``output``, where the inputs are."""
        device = next((t.device for t in tensors if isinstance(t, FakeTensor)), GPU)

        def fake(real: torch.Tensor) -> torch.Tensor:
            with self:  # torch leaves the mode while it handles an operation
                made = torch.empty(real.shape, dtype=real.dtype, device=device)
            vars(made)["known"] = real
            return made

        return tree_map_only(torch.Tensor, fake, output)

    # --- memory ------------------------------------------------------------------------------

    def _count(self, name: str, output: Any) -> None:
        """Tell the allocator of new storages on the GPU, and of cuBLAS's workspace."""
        made = [
            each
            for each in tree_leaves(output)
            if isinstance(each, FakeTensor) and each.fake_device.type == GPU.type
        ]
        if not made:
            return
        for each in made:
            self.hold(each)
        if name in PRODUCTS and self._kept is None:
            self._kept = self._allocator.allocate(self._workspace)

    def _work(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], output: Any
    ) -> None:
        """Count what the kernel of an operation has to do."""
        if func is CONVOLUTION and torch.backends.cudnn.benchmark:
            self.tries_kernels = True
        work = replace(self.work, launches=self.work.launches + 1)
        made = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            moved = sum(each.nbytes for each in (*tensors, *made))
            self.work = replace(work, traffic=work.traffic + moved)
            return
        operations = formula(*args, **kwargs, out_val=output)
        if any(each.dtype in HALF for each in made):
            self.work = replace(work, half_products=work.half_products + operations)
        else:
            self.work = replace(work, products=work.products + operations)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor on the GPU until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages or not storage.nbytes():
            return
        block = self._allocator.allocate(storage.nbytes())
        self._storages.add(key)

        def free() -> None:
            self._storages.discard(key)
            self._allocator.give_back(block)

        weakref.finalize(storage, free).atexit = False


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the numbers of ``tensor``; ``None`` if they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    constant: torch.Tensor | None = vars(tensor).get("known")
    return tensor.constant if constant is None else constant


def _computed(func: Any, args: Any, kwargs: Any, *, guess: bool = False) -> Any:
    """Return the result of an operation on the CPU; ``None`` if it fails.

    ``guess``: compute with ones where numbers are not known, and raise what it raises.
    """

    def number(tensor: torch.Tensor) -> torch.Tensor:
        known = _known(tensor)
        if known is None:
            if tensor.numel() > GUESSED:
                raise ValueError(f"too many numbers to guess: {tensor.numel()}")
            known = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        return known

    with _disable_current_modes(), torch.no_grad():
        try:
            real_args, real_kwargs = tree_map_only(torch.Tensor, number, (args, kwargs))
            if "device" in real_kwargs:
                real_kwargs["device"] = torch.device("cpu")
            return func(*real_args, **real_kwargs)
        except Exception:
            if guess:
                raise
            return None


def _finite(func: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    """Return the answer where an operation asks whether numbers are finite: training goes well."""
    answer = FINITE.get(func)
    if func in SAME_TENSOR and args[0] is args[1]:
        answer = SAME_TENSOR[func]
    elif func in INFINITE and isinstance(args[1], float) and math.isinf(args[1]):
        answer = INFINITE[func]
    if answer is None:
        return None
    with _disable_current_modes():
        return torch.tensor(answer).expand(output.shape)


def _users_line() -> Place | None:
    """Return the innermost running line of the user's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frames.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


class _Guard(torch._C._acc.DeviceGuard):
    """Stands for the driver where C++ code asks for the current device."""

    def type_(self) -> Any:
        """Return CUDA."""
        return torch._C._autograd.DeviceType.CUDA


def without_driver() -> None:
    """Let torch's C++ code accept devices of CUDA without asking a driver.

    torch has a registry of a guard for each type of device. A guard of ours, made by Python code,
    takes the place of CUDA's.
    """
    guard = _Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    library = ctypes.CDLL(os.path.join(folder, "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * (GUARD_OF_OURS + 1)).in_dll(library, name)
    registry[GUARD_OF_CUDA], registry[GUARD_OF_OURS] = registry[GUARD_OF_OURS], None
    vars(torch)["_autofit_guard"] = guard  # torch does not keep it alive
    torch.autograd.set_multithreading_enabled(False)  # the GPU's thread would need a driver
