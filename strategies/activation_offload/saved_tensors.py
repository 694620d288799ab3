"""Moves what autograd saves to the host and back, beside the computation.

A tensor's copy to pinned memory runs on a stream of its own. The tensor is held until a few more
have been saved; then the computing stream is told to wait for the copy, and the memory is free for
what is computed next, in the order of that stream: nothing waits on the CPU. In backward the copies
of the next few tensors are under way while the present one is used. The last ones saved are still
there when backward begins, which uses them first.
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
from autofit.strategies.base import Forward

SMALL = 1 << 20
"""Bytes below which a tensor stays: its copy takes longer to start than to run."""
WINDOW = 4
"""Tensors on their way out that are held."""
AHEAD = 4
"""Tensors that are on their way back before they are used."""
RESERVE = 8
"""Of the host's memory, one part in so many is left to others."""
LOOK = 1.0
"""Seconds between two looks at how much is free."""


class HostBudget:
    """How much of the host's memory may be taken. Pinned memory comes in powers of two."""

    def __init__(self) -> None:
        self._total = host.hardware().total_bytes
        self._held = self._peak = self._limit = 0
        self._looked = -math.inf

    @property
    def known(self) -> bool:
        """The system says how much there is."""
        return self._total > 0

    def look(self) -> None:
        """See how much is free besides what has been taken before: torch keeps that for us."""
        if (now := time.monotonic()) - self._looked < LOOK:
            return
        self._looked = now
        free = host.free_bytes() - self._total // RESERVE
        self._limit = self._peak + max(0, free)

    def take(self, size: int) -> int:
        """Return what is taken for ``size`` bytes; 0 where there is no room."""
        rounded = 1 << (size - 1).bit_length()
        if self._held + rounded > self._limit:
            return 0
        self._held += rounded
        self._peak = max(self._peak, self._held)
        return rounded

    def give_back(self, taken: int) -> None:
        """Take no longer what ``take`` returned."""
        self._held -= taken


class Transfer(Protocol):
    """The way of tensors between a device and the host."""

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy ``source`` to the host; return the content and a ticket for that copy."""

    def wait_copied_out(self, ticket: Any) -> None:
        """Let what is computed next wait for a copy out: then it may overwrite the source."""

    def to_device(self, content: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy ``content`` to the device; return the tensor and a ticket for that copy."""

    def wait_copied_back(self, tensor: torch.Tensor, ticket: Any) -> None:
        """Let what is computed next wait for a copy back."""


class StreamTransfer:
    """On a stream of its own. A ticket: the copy's end, and the stream that it was made for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy to pinned memory, which torch does not give away before the copy has ended."""
        content = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return content, self._copy(content, source)

    def wait_copied_out(self, ticket: Any) -> None:
        """The source's memory goes back to the stream that it was used on."""
        event, stream = ticket
        stream.wait_event(event)

    def to_device(self, content: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Into memory of the present stream, whose earlier use of it the copy waits for."""
        tensor = torch.empty(content.shape, dtype=content.dtype, device=self._device)
        return tensor, self._copy(tensor, content)

    def wait_copied_back(self, tensor: torch.Tensor, ticket: Any) -> None:
        """Mind that backward may run on another stream than the one that asked for it."""
        event, stream = ticket
        present = torch.cuda.current_stream(self._device)
        present.wait_event(event)
        if present != stream:
            tensor.record_stream(present)

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> Any:
        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
        return self._stream.record_event(), present


class BlockingTransfer:
    """Where a CPU stands in for a device: to memory of Python's own, which no cap counts."""

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
class OffloadedTensor:
    """A tensor in host memory, and what it takes to make it again."""

    transfer: Transfer
    host_budget: HostBudget
    taken: int
    content: torch.Tensor
    ticket: Any
    source: torch.Tensor | None
    """Held while its copy may be under way."""
    shape: torch.Size
    stride: tuple[int, ...]
    there: torch.Tensor | None = None
    """On the device again."""
    uses: int = 0
    """How often autograd will ask for it."""

    def leave(self) -> None:
        """Hold the source no longer."""
        if self.source is not None:
            self.transfer.wait_copied_out(self.ticket)
            self.source = None

    def load(self) -> None:
        """Begin to bring it back."""
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


class SavedTensors:
    """What one forward saves."""

    def __init__(self, offload: Offload, stay: set[int]) -> None:
        """``stay``: addresses of storages that are on the device whatever is saved."""
        self._offload = offload
        self._stay = stay
        self._seen = self._gone = 0
        self._known: dict[Any, tuple[StorageWeakRef, ref[OffloadedTensor]]] = {}
        """Tensors that were saved before, by all that makes them the same."""
        self._order: list[ref[OffloadedTensor]] = []
        self._leaving: deque[ref[OffloadedTensor]] = deque()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Send a tensor away, if that is worth it; return what autograd is to keep for it."""
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
        """Return the tensor; begin to bring those back that were saved before it."""
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

    def _send(self, tensor: torch.Tensor, size: int) -> OffloadedTensor | None:
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
        offloaded = OffloadedTensor(
            transfer, offload.host_budget, taken, content, ticket, source, tensor.shape, stride
        )
        self._leaving.append(ref(offloaded))
        if len(self._leaving) > WINDOW and (oldest := self._leaving.popleft()()) is not None:
            oldest.leave()
        return offloaded


class Offload:
    """Sends a share of what the forwards of one root save to the host."""

    def __init__(self, module: nn.Module, share: float) -> None:
        self.share = share
        self.host_budget = HostBudget()
        self.kind = "cuda" if any(each.is_cuda for each in module.parameters()) else "cpu"
        """Of the device whose tensors travel."""
        self.compiled = False
        """A part of the root is: its backward takes tensors in no other strides."""
        self._module = ref(module)
        self._transfers: dict[torch.device, Transfer] = {}

    def around(self, forward: Forward) -> Forward:
        """Run each call with gradients under the hooks."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.host_budget.look()
            module = self._module()
            parts = [] if module is None else module.modules()
            self.compiled = any(each._compiled_call_impl is not None for each in parts)
            saved = SavedTensors(self, self._residents(args, kwargs))
            with saved_tensors_hooks(saved.pack, saved.unpack):
                return forward(*args, **kwargs)

        return call

    def transfer(self, device: torch.device) -> Transfer:
        """Return the way between ``device`` and the host."""
        if device not in self._transfers:
            self._transfers[device] = (
                StreamTransfer(device) if device.type == "cuda" else BlockingTransfer()
            )
        return self._transfers[device]

    def release(self) -> None:
        """Give the pinned memory that torch keeps for later back to the system."""
        for device in self._transfers:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # torch keeps what a copy may still use
        if torch.cuda.is_initialized():
            torch._C._host_emptyCache()

    def _residents(self, *arguments: Any) -> set[int]:
        """Return the addresses of what is on the device all the same: weights and the batch."""
        module = self._module()
        own = [] if module is None else [*module.parameters(), *module.buffers()]
        found = (each for each in (*own, *tree_leaves(arguments)) if type(each) in PLAIN)
        return {each.untyped_storage().data_ptr() for each in found}


def laid_out(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return what a tensor has in memory, in one dimension, and the stride that reads it so.

    Strides are kept, so that backward runs the same kernels; where much would lie between the
    elements they are put side by side first.
    """
    if not gapped(tensor):  # dense in some order, or expanded: what lies there
        return tensor.as_strided((span(tensor),), (1,)), tensor.stride()
    return tensor.contiguous().view(-1), torch.empty(tensor.shape, device="meta").stride()


def span(tensor: torch.Tensor) -> int:
    """Return how many elements lie from a tensor's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def gapped(tensor: torch.Tensor) -> bool:
    """Return whether others lie between a tensor's elements."""
    return span(tensor) > tensor.numel()


PLAIN = (torch.Tensor, nn.Parameter)
"""Types of tensors that are what they seem."""
