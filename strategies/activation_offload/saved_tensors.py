"""Copies the tensors that autograd saves to the host and back, while the device computes.

Each tensor is copied to pinned memory on a separate stream. It stays on the device until a few more
tensors have been saved. Then the computing stream waits for the copy, and the memory may be used
again in the order of that stream; the CPU never waits. Backward copies the next few tensors back
while it uses the present one. It needs the tensors saved last first, and these never left.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from autofit import host
from autofit.strategies.activation_offload import SMALL, WINDOW
from autofit.strategies.base import Forward
from autofit.strategies.support.memory import empty_host_cache, gapped, laid_out, on_accelerator

AHEAD = 4
"""Tensors that backward copies back in advance."""
RESERVE = 8
"""One part in so many of the host's memory is left to other processes."""
LOOK = 1.0
"""Seconds between two measurements of the free host memory."""


class HostBudget:
    """Limits the host memory in use. torch allocates pinned memory in powers of two."""

    def __init__(self) -> None:
        self._total = host.hardware().total_bytes
        self._held = self._peak = self._limit = 0
        self._looked = -math.inf

    @property
    def known(self) -> bool:
        """Whether the system reports its memory."""
        return self._total > 0

    def look(self) -> None:
        """Measure the free memory again; torch keeps the peak of earlier copies for reuse."""
        if (now := time.monotonic()) - self._looked < LOOK:
            return
        self._looked = now
        free = host.free_bytes() - self._total // RESERVE
        self._limit = self._peak + max(0, free)

    def take(self, size: int) -> int:
        """Reserve ``size`` bytes; return the bytes reserved, 0 if they do not fit."""
        rounded = 1 << (size - 1).bit_length()
        if self._held + rounded > self._limit:
            return 0
        self._held += rounded
        self._peak = max(self._peak, self._held)
        return rounded

    def give_back(self, taken: int) -> None:
        """Release bytes that ``take`` reserved."""
        self._held -= taken


class _Transfer(Protocol):
    """Copies tensors between a device and the host."""

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy ``source`` to the host; return the content and a ticket for that copy."""

    def wait_copied_out(self, ticket: Any) -> None:
        """Make later kernels wait for a copy to the host, so that they may overwrite its source."""

    def to_device(self, content: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy ``content`` to the device; return the tensor and a ticket for that copy."""

    def wait_copied_back(self, tensor: torch.Tensor, ticket: Any) -> None:
        """Make later kernels wait for a copy to the device."""


class _StreamTransfer:
    """Copies on a separate stream.

    A ticket is the copy's event and the computing stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy to pinned memory, which torch does not reuse before the copy has ended."""
        content = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return content, self._copy(content, source)

    def wait_copied_out(self, ticket: Any) -> None:
        """Return the source's memory to the stream that used it."""
        event, stream = ticket
        stream.wait_event(event)

    def to_device(self, content: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy into memory of the present stream, after the stream's earlier kernels."""
        tensor = torch.empty(content.shape, dtype=content.dtype, device=self._device)
        return tensor, self._copy(tensor, content)

    def wait_copied_back(self, tensor: torch.Tensor, ticket: Any) -> None:
        """Wait on the present stream: backward may run on another one than forward."""
        event, stream = ticket
        present = self._module.current_stream(self._device)
        present.wait_event(event)
        if present != stream:
            tensor.record_stream(present)

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> Any:
        present = self._module.current_stream(self._device)
        self._stream.wait_stream(present)
        with self._module.stream(self._stream):
            to.copy_(of, non_blocking=True)
        return self._stream.record_event(), present


class _BlockingTransfer:
    """Copies at once, for tests on a CPU; to Python's own memory, which no cap counts."""

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy at once."""
        memory = bytearray(source.numel() * source.element_size())
        return torch.frombuffer(memory, dtype=source.dtype).copy_(source), None

    def wait_copied_out(self, ticket: Any) -> None:
        """Nothing is under way."""

    def to_device(self, content: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy at once."""
        return torch.empty_like(content, device="cpu").copy_(content), None

    def wait_copied_back(self, tensor: torch.Tensor, ticket: Any) -> None:
        """Nothing is under way."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _OffloadedTensor:
    """A tensor in host memory, with all that is needed to restore it."""

    transfer: _Transfer
    host_budget: HostBudget
    taken: int
    content: torch.Tensor
    ticket: Any
    source: torch.Tensor | None
    """The original, until its copy has ended."""
    shape: torch.Size
    stride: tuple[int, ...]
    there: torch.Tensor | None = None
    """The tensor on the device, once it is copied back."""
    uses: int = 0
    """How often autograd will still use it."""

    def leave(self) -> None:
        """Drop the original."""
        if self.source is not None:
            self.transfer.wait_copied_out(self.ticket)
            self.source = None

    def load(self) -> None:
        """Start the copy to the device."""
        if self.source is None and self.there is None:
            self.there, self.ticket = self.transfer.to_device(self.content)

    def use(self) -> torch.Tensor:
        """Return the tensor."""
        self.uses -= 1
        if self.source is not None:
            return self.source.as_strided(self.shape, self.stride)
        self.load()
        assert self.there is not None
        self.transfer.wait_copied_back(self.there, self.ticket)
        tensor = self.there.as_strided(self.shape, self.stride)
        if self.uses <= 0:
            self.there = None
        return tensor

    def __del__(self) -> None:
        self.host_budget.give_back(self.taken)


class _SavedTensors:
    """The tensors that one forward pass saves."""

    def __init__(self, offload: Offload, stay: set[int]) -> None:
        """``stay``: addresses of storages that remain on the device in any case."""
        self._offload = offload
        self._stay = stay
        self._seen = self._gone = 0
        self._known: dict[Any, tuple[StorageWeakRef, ref[_OffloadedTensor]]] = {}
        """Tensors that were saved before, by address, layout, type and version."""
        self._order: list[ref[_OffloadedTensor]] = []
        self._leaving: deque[ref[_OffloadedTensor]] = deque()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Offload a tensor if that is worthwhile. Return the object that autograd stores."""
        storage = tensor.untyped_storage() if type(tensor) in PLAIN else None
        if storage is None or not self._worth_offloading(tensor, storage):
            return tensor
        what = storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        key = *what, tensor.dtype, tensor._version
        known = self._known.get(key)
        offloaded = known[1]() if known is not None and not known[0].expired() else None
        if offloaded is None:
            offloaded = self._send(tensor, min(tensor.nbytes, storage.nbytes()))
            if offloaded is None:
                self._stay.add(storage.data_ptr())
                return tensor
            self._known[key] = StorageWeakRef(storage), ref(offloaded)
        offloaded.uses += 1
        self._order.append(ref(offloaded))
        return offloaded, len(self._order) - 1

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor, and start copying back those saved just before it."""
        if isinstance(packed, torch.Tensor):
            return packed
        offloaded, index = packed
        tensor: torch.Tensor = offloaded.use()
        for before in self._order[max(0, index - AHEAD) : index][::-1]:
            if (other := before()) is not None and other.uses > 0:
                other.load()
        return tensor

    def _worth_offloading(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.device.type == self._offload.kind
            and min(tensor.nbytes, storage.nbytes()) >= SMALL
            and storage.data_ptr() not in self._stay
            and not (tensor.is_conj() or tensor.is_neg())
            and not (self._offload.compiled and gapped(tensor))
        )

    def _send(self, tensor: torch.Tensor, size: int) -> _OffloadedTensor | None:
        """Copy a tensor to the host; ``None`` beyond the level's share or the host's memory."""
        offload = self._offload
        self._seen += size
        if self._gone + size > offload.share * self._seen or not (
            taken := offload.host_budget.take(size)
        ):
            return None
        self._gone += size
        transfer = offload.transfer(tensor.device)
        source, stride = laid_out(tensor)
        content, ticket = transfer.to_host(source)
        offloaded = _OffloadedTensor(
            transfer, offload.host_budget, taken, content, ticket, source, tensor.shape, stride
        )
        self._leaving.append(ref(offloaded))
        if len(self._leaving) > WINDOW and (oldest := self._leaving.popleft()()) is not None:
            oldest.leave()
        return offloaded


class Offload:
    """Keeps a share of the tensors that one root saves in host memory."""

    def __init__(self, module: nn.Module, share: float) -> None:
        self.share = share
        self.host_budget = HostBudget()
        devices = (each.device for each in module.parameters())
        self.kind = next((at.type for at in devices if on_accelerator(at)), "cpu")
        """Type of the device whose tensors are offloaded."""
        self.compiled = False
        """Part of the root is compiled: its backward needs the original strides."""
        self._module = ref(module)
        self._transfers: dict[torch.device, _Transfer] = {}

    def around(self, forward: Forward) -> Forward:
        """Run each call with gradients under the saved-tensor hooks."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.host_budget.look()
            module = self._module()
            parts = [] if module is None else module.modules()
            self.compiled = any(each._compiled_call_impl is not None for each in parts)
            saved = _SavedTensors(self, self._residents(args, kwargs))
            with saved_tensors_hooks(saved.pack, saved.unpack):
                return forward(*args, **kwargs)

        return call

    def transfer(self, device: torch.device) -> _Transfer:
        """Return the transfer between ``device`` and the host."""
        if device not in self._transfers:
            self._transfers[device] = (
                _StreamTransfer(device) if on_accelerator(device) else _BlockingTransfer()
            )
        return self._transfers[device]

    def release(self) -> None:
        """Return the pinned memory that torch caches to the system."""
        used = [device for device in self._transfers if on_accelerator(device)]
        for device in used:
            torch.accelerator.synchronize(device)  # torch keeps what a copy may still use
        if used:
            empty_host_cache()

    def _residents(self, *arguments: Any) -> set[int]:
        """Return the addresses of weights, buffers and the batch, which stay on the device."""
        module = self._module()
        own = [] if module is None else [*module.parameters(), *module.buffers()]
        found = (each for each in (*own, *tree_leaves(arguments)) if type(each) in PLAIN)
        return {each.untyped_storage().data_ptr() for each in found}


PLAIN = (torch.Tensor, nn.Parameter)
"""Tensor types without a subclass that overrides their data."""
