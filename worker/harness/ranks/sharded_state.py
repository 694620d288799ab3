"""Shards the state of an optimizer: each rank keeps that of its own parameters (ZeRO, stage 1).

Before a step the gradients are the same on all ranks. A rank steps its own parameters, and all get
the new values. The script sees an optimizer as in one process: whenever it asks for the state, by
``state_dict``, ``optimizer.state`` or a pickle, the ranks send one another what each has.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sys import intern
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.support.optimizers import PER_PARAMETER, in_torch, parameters, without
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.ranks.reduction import buckets
from autofit.worker.harness.torch_state.undo import together

INSIDERS = ("torch.optim.", "autofit.")
"""Prefixes of the modules that see the state as it is stored; all others see the whole state."""
COMPILED = "the script compiles its optimizer's step, or calls it in an unknown way"
SCALED = "the script's fused optimizer takes gradients that are scaled; use fused=False"

State = dict[str, Any]


def why_not(optimizer: Optimizer, names: Collection[str]) -> str | None:
    """Return why an optimizer cannot step some of the values on each rank, or ``None``.

    ``names``: the classes of torch that can.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in in_torch(names):
        return f"{name} is not known to step each parameter by itself; {', '.join(names)} do"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable: backward leads through its step"
    return None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the state, as its rank describes it to the others."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_gpu: bool

    @classmethod
    def described(cls, value: Any) -> Any:
        """Return the description of a tensor; any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(value.shape, value.stride(), value.dtype, value.is_cuda)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for such a tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class ShardedStates:
    """The optimizers of one process whose state is sharded."""

    def __init__(self, group: RankGroup, patches: Patches) -> None:
        self._group = group
        self._patches = patches
        self._held: WeakKeyDictionary[Optimizer, ShardedState] = WeakKeyDictionary()
        self._watching = False

    def shard(self, handle: OptimizerHandle) -> Undo:
        """Shard the state of an optimizer from now on; the undo leaves it as it is then."""
        optimizer = handle.optimizer
        if reason := why_not(optimizer, PER_PARAMETER):
            raise Refused(reason)
        if not self._watching:
            self._patches.set(Optimizer, "state", property(self._read, _write))
            self._watching = True
        sharded = self._held.get(optimizer)
        if sharded is None:
            sharded = self._held[optimizer] = ShardedState(self._group)
        return sharded.start(handle)

    def _read(self, optimizer: Optimizer) -> Any:
        """Return the state as it is stored; other code than torch's gets the whole state."""
        if torch.compiler.is_compiling():
            return stored(optimizer)
        asker = f"{sys._getframe(1).f_globals.get('__name__', '')}."
        sharded = None if asker.startswith(INSIDERS) else self._held.get(optimizer)
        if sharded is not None:
            sharded.gather(optimizer, on_host=False)  # it is freed by the next step
        return stored(optimizer)


class ShardedState:
    """The state of one optimizer, of which this rank keeps a part."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._owners = WeakTensorKeyDictionary()
        """The rank that steps a parameter. It stays, also when other parameters come or go."""
        self._loads = [0] * group.size
        """Bytes of the parameters of each rank."""
        self._read = False
        """The state of other ranks is here until the next step, because the script has read it."""
        self._borrowed: list[torch.Tensor] = []
        """Parameters of other ranks whose state is here while a ``state_dict`` is made."""

    def start(self, handle: OptimizerHandle) -> Undo:
        """Step by parts from now on."""
        optimizer = handle.optimizer
        self._divide(optimizer)
        reference = weakref.ref(optimizer)
        hooks = (
            optimizer.register_state_dict_pre_hook(self._borrow),
            optimizer.register_state_dict_post_hook(self._give_back, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._only_own, prepend=True),
        )
        return together(
            *(hook.remove for hook in hooks),
            handle.around_pickle(lambda: self._whole(reference())),
            handle.around_step(self.step),
        )

    # --- steps -----------------------------------------------------------------------------

    def step(self, optimizer: Any, plain: Callable[[], None]) -> None:
        """Step this rank's parameters, and receive the others."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise Refused(SCALED)
        self._divide(optimizer)
        self._read = False
        stepped = [each for each in parameters(optimizer) if each.grad is not None]
        others = {id(each) for each in stepped if self._owners[each] != self._group.rank}
        if len(others) < len(stepped):
            with without(optimizer, others):
                plain()
        said = self._group.meet(f"a step of {type(optimizer).__name__}", len(stepped))
        if len(set(said)) > 1:
            raise Refused("the ranks have gradients for different parameters")
        self._send(stepped)

    def _send(self, stepped: Sequence[torch.Tensor]) -> None:
        """Give every rank the new values of these parameters."""
        group = self._group
        for rank in range(group.size):
            own = [i for i, each in enumerate(stepped) if self._owners[each] == rank]
            for bucket in buckets(stepped, own):
                tensors = [stepped[i].detach() for i in bucket]
                flat = _flat(tensors)
                group.broadcast(flat, rank)
                if rank != group.rank and flat.data_ptr() != tensors[0].data_ptr():
                    parts = flat.split([each.numel() for each in tensors])
                    for each, part in zip(tensors, parts, strict=True):
                        each.copy_(part.view(each.shape))

    # --- who keeps what --------------------------------------------------------------------

    def _divide(self, optimizer: Optimizer) -> None:
        """Choose a rank for each new parameter, and free the state that other ranks keep."""
        new = [each for each in parameters(optimizer) if each not in self._owners]
        for each in sorted(new, key=lambda tensor: -tensor.nbytes):
            rank = self._loads.index(min(self._loads))
            self._owners[each] = rank
            self._loads[rank] += each.nbytes
        state = stored(optimizer)
        for each in [each for each in state if not self._is_own(each)]:
            del state[each]

    def _is_own(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank keeps the state of a parameter."""
        found: int = self._owners.get(parameter, self._group.rank)
        return found == self._group.rank

    def gather(self, optimizer: Optimizer, *, on_host: bool) -> list[torch.Tensor]:
        """Copy here the state that other ranks keep; return the parameters that it belongs to.

        ``on_host``: copies from a GPU are in host memory, because the device may have no room.
        """
        if not self._read and not all(map(self._is_own, stored(optimizer))):
            raise Refused(COMPILED)
        self._divide(optimizer)
        self._read = not on_host
        state, held = stored(optimizer), list(parameters(optimizer))
        own = {
            i: {name: _Tensor.described(value) for name, value in state[each].items()}
            for i, each in enumerate(held)
            if each in state
        }
        said = self._group.meet(f"the state of {type(optimizer).__name__}", own)
        told = sorted((i, rank) for rank, each in enumerate(said) for i in each)
        for i, rank in told:
            mine = state.pop(held[i]) if rank == self._group.rank else None
            found = {
                intern(name): self._value(rank, value, mine and mine[name], held[i].device, on_host)
                for name, value in said[rank][i].items()
            }
            state[held[i]] = found if mine is None else mine  # in the order of the parameters
        return [held[i] for i, rank in told if rank != self._group.rank]

    def _value(self, rank: int, told: Any, mine: Any, device: torch.device, on_host: bool) -> Any:
        """Send a value of the state from ``rank`` to the others, and return it."""
        if not isinstance(told, _Tensor):
            return told
        if rank == self._group.rank:
            self._group.broadcast(mine.detach().contiguous(), rank)
            return mine
        there = device if told.on_gpu else torch.device("cpu")
        buffer = torch.empty(told.shape, dtype=told.dtype, device=there)
        self._group.broadcast(buffer, rank)
        return told.empty(torch.device("cpu") if on_host else there).copy_(buffer)

    # --- what the script sees --------------------------------------------------------------

    def _borrow(self, optimizer: Optimizer) -> None:
        self._borrowed = self.gather(optimizer, on_host=True)

    def _give_back(self, optimizer: Optimizer, document: Any = None) -> None:
        while self._borrowed:
            stored(optimizer).pop(self._borrowed.pop(), None)

    @contextmanager
    def _whole(self, optimizer: Optimizer | None) -> Iterator[None]:
        """Return a context in which the whole state is here."""
        assert optimizer is not None, "it is alive while it is pickled"
        self._borrow(optimizer)
        try:
            yield
        finally:
            self._give_back(optimizer)

    def _only_own(self, optimizer: Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        """Leave the state that other ranks keep out of a document that is loaded."""
        self._divide(optimizer)
        order = [index for group in document["param_groups"] for index in group["params"]]
        others = {i for i, p in zip(order, parameters(optimizer)) if not self._is_own(p)}  # noqa: B905 - torch compares the lengths
        own = {i: state for i, state in document["state"].items() if i not in others}
        return {**document, "state": own}


def stored(optimizer: Optimizer) -> dict[torch.Tensor, State]:
    """Return the state as this rank keeps it."""
    found: dict[torch.Tensor, State] = vars(optimizer)["state"]
    return found


def _write(optimizer: Optimizer, state: dict[torch.Tensor, State]) -> None:
    vars(optimizer)["state"] = state


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all entries as one vector; a single contiguous tensor shares its memory with it."""
    rows = [each.reshape(-1) for each in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
