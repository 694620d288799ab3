"""Keeps parameters in parts until a model that is too large for its device is sharded.

A model is usually created as a whole on the device. If its parameters exceed a share of the device
there, those that were used longest ago are *paged out*. Each rank copies its own part of the bytes
to host memory and frees the device memory. The tensors and their storages stay the same objects.
When an operation uses such a parameter, all ranks page it in first: they gather its parts. All
ranks run the same script, so they do so in the same order. Random numbers come from the generators
as ever.

The first page-out enters a dispatch mode, which sees every operation of torch. Before that, only
the parameters are counted. Code that reads memory without an operation of torch is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from autofit.strategies.base import Undo
from autofit.strategies.support.memory import on_accelerator
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.torch_state.host_saved import host_bytes
from autofit.worker.harness.torch_state.undo import together
from autofit.worker.meter import accelerator

SHARE = 0.5
"""Share of the device that parameters may fill before the model is sharded.

The first call checks the plan on the whole model. Its activations, and one gathered block with its
gradient, need the rest.
"""
WHILE_PAGED = 0.25
"""Share of those bytes that parameters may fill once some are paged out.

A model uses its parameters in turn, so more of them on the device would save no copy: those that
come next are always those that were used longest ago.
"""
SMALL = 1 << 16
"""Bytes below which a parameter stays on the device: the norms of a model with 30 G parameters
need 3 MB."""
ALIGNED = 512
"""The parts start at multiples of so many bytes, as the allocator's memory does."""
WITHOUT_VALUES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))
"""Operations that need no memory of their argument. Other views may check its size."""

_held: WeakKeyDictionary[Seams, PagedParameters] = WeakKeyDictionary()


def paged_parameters(seams: Seams) -> PagedParameters | None:
    """Return the one object of the session; ``None`` if its plan pages nothing."""
    return _held.get(seams)


class _Page:
    """The memory of one parameter, or of several that share it."""

    def __init__(self, storage: torch.UntypedStorage, number: int) -> None:
        self.reference = StorageWeakRef(storage)
        self.size = storage.nbytes()
        self.number = number
        self.own: torch.Tensor | None = None
        """This rank's part in host memory, as it was paged out last."""
        self.out = False
        self.changed = True
        """The values may differ from those that were paged out last."""

    @property
    def alive(self) -> bool:
        """Whether a tensor still uses the memory."""
        return not self.reference.expired()

    def storage(self) -> torch.UntypedStorage:
        """Return the memory, which is alive."""
        found: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return found


class PagedParameters:
    """The parameters of a process before they are sharded."""

    def __init__(
        self,
        seams: Seams,
        group: RankGroup | None,
        kind: str,
        capacity: Callable[[torch.device], int | None],
    ) -> None:
        """``kind``: the type of the devices; ``capacity``: the bytes of one, if they are limited.

        ``group``: the ranks; ``None`` if the process is alone.
        """
        self._seams = seams
        self._group = group
        self._kind = kind
        self._capacity = capacity
        self._most: int | None = None
        """Bytes of parameters that may all stay on the device; the same on all ranks."""
        self._pages: dict[int, _Page] = {}
        """By the address of the storage; those that were used longest ago come first."""
        self._count = 0
        self._there = 0
        """Bytes of the pages that are on the device."""
        self._mode = _Mode(self)
        self._undos: list[Undo] = []
        """What ends the paging, while there is any."""
        _held[seams] = self

    @property
    def active(self) -> bool:
        """Whether some parameters may be paged out, so that all operations are watched."""
        return bool(self._undos)

    @property
    def _limit(self) -> int:
        """Bytes of parameters that may be on the device while others are paged out."""
        assert self._most is not None, "the first page sets it"
        return int(self._most * WHILE_PAGED)

    def attach(self) -> Undo:
        """Count the parameters that modules register, receive or copy from now on."""
        patches = self._seams.patches
        return together(
            register_module_parameter_registration_hook(lambda *given: self.add(given[2])).remove,
            patches.wrap(nn.Module, "_apply", self._moves),
            patches.wrap(nn.Parameter, "__deepcopy__", self._copies),
            self._pages.clear,
            self._stop,
        )

    def add(self, tensor: torch.Tensor | None) -> None:
        """Count the memory of a parameter; page others out if it is too much."""
        if not _is_plain(tensor) or tensor.device.type != self._kind:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL or not storage.resizable() or storage._cdata in self._pages:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        if self._most is None:
            if (capacity := self._capacity(tensor.device)) is None:
                return
            if self._group is not None:
                with _unseen():
                    capacity = min(self._group.meet("the first parameters", capacity))
            self._most = int(SHARE * capacity)
        page = self._pages[storage._cdata] = _Page(storage, self._count)
        self._count += 1
        self._there += page.size
        if self._there > (self._limit if self.active else self._most):
            self._agree("the size of the parameters")
            if self.active or self._there > self._most:
                self._free_memory(0, [page])

    # --- use -------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation; page in what it uses, and note what it may change."""
        if func in WITHOUT_VALUES:
            return func(*args, **kwargs)
        pages = self._used(tree_leaves((args, kwargs)))
        if len(pages) > 1 and func.name().startswith("aten::_foreach_"):
            lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
            if len(lists[0]) > 1:
                return self._one_by_one(func, args, kwargs, len(lists[0]))
        if pages:
            self._page_in(pages)
            if func.namespace != "aten" or func._schema.is_mutable:
                for page in pages:
                    page.changed = True
        return func(*args, **kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any, count: int) -> Any:
        """Run an operation on lists of parameters for one after another."""

        def picked(value: Any, index: int) -> Any:
            several = isinstance(value, list | tuple) and len(value) == count
            return [value[index]] if several else value

        found = [
            self.run(
                func,
                [picked(each, index) for each in args],
                {name: picked(each, index) for name, each in kwargs.items()},
            )
            for index in range(count)
        ]
        return None if found[0] is None else [each[0] for each in found]

    def _page_of(self, tensor: Any) -> _Page | None:
        return self._pages.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None

    def _used(self, values: Iterable[Any]) -> list[_Page]:
        found = (self._page_of(each) for each in values if isinstance(each, torch.Tensor))
        return list(dict.fromkeys(each for each in found if each is not None))

    @contextmanager
    def there(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep ``parameters`` and no others on the device within the context.

        No operation is seen in it.
        """
        pages, watched = self._used(parameters), self.active
        self._page_in(pages)
        if watched:
            self._free_memory(self._limit, pages)
            self._watch(False)
        try:
            yield
        finally:
            if watched:
                self._watch(True)

    def settle(self) -> None:
        """End the paging if the parameters that are left fit."""
        if not self.active:
            return
        self._agree("the call of a sharded model")
        assert self._most is not None, "something was paged out"
        if sum(page.size for page in self._pages.values()) <= self._most:
            self._page_in(list(self._pages.values()))
            self._stop()

    # --- pages -----------------------------------------------------------------------------

    def _agree(self, what: str) -> None:
        """Forget memory that some rank has freed; all ranks must be about to do ``what``."""
        gone = {page.number for page in self._pages.values() if not page.alive}
        if self._group is not None:
            with _unseen():
                gone = set().union(*self._group.meet(what, gone))
        for address, page in list(self._pages.items()):
            if page.number in gone:
                del self._pages[address]
                self._there -= 0 if page.out else page.size

    def _free_memory(self, size: int, keep: Iterable[_Page]) -> None:
        """Page out what was used longest ago, until ``size`` bytes more are within the limit."""
        kept = set(keep)
        for page in list(self._pages.values()):
            if self._there + size <= self._limit:
                break
            if page.alive and not page.out and page not in kept:
                self._start()
                with _unseen():
                    self._page_out(page)

    def _page_in(self, pages: list[_Page]) -> None:
        for page in pages:  # the dictionary is in the order of use
            address = page.reference.cdata
            self._pages[address] = self._pages.pop(address)
        if missing := [page for page in pages if page.out]:
            self._agree(f"the use of parameter {missing[0].number}")
            self._free_memory(sum(page.size for page in missing), pages)
            with _unseen():
                for page in missing:
                    self._gather(page)

    def _page_out(self, page: _Page) -> None:
        storage = page.storage()
        if page.changed:
            whole, own, rest = self._parts(storage)
            if page.own is None:
                pinned = on_accelerator(storage.device)
                page.own = host_bytes(len(own) + len(rest), pinned=pinned)
            page.own[: len(own)].copy_(own)
            page.own[len(own) :].copy_(rest)
            page.changed = False
            del whole, own, rest
        storage.resize_(0)
        page.out = True
        self._there -= page.size

    def _gather(self, page: _Page) -> None:
        storage = page.storage()
        storage.resize_(page.size)
        whole, own, rest = self._parts(storage)
        assert page.own is not None, "it was paged out"
        own.copy_(page.own[: len(own)], non_blocking=True)
        rest.copy_(page.own[len(own) :], non_blocking=True)
        if self._group is not None:
            self._group.gather_into(whole[: len(whole) - len(rest)], own)
        page.out = False
        self._there += page.size

    def _parts(
        self, storage: torch.UntypedStorage
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bytes of a storage, those of this rank, and the rest that each rank keeps."""
        rank, size = (self._group.rank, self._group.size) if self._group is not None else (0, 1)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        part = len(whole) // size // ALIGNED * ALIGNED
        return whole, whole[rank * part : (rank + 1) * part], whole[size * part :]

    # --- what is watched -------------------------------------------------------------------

    def _start(self) -> None:
        """See every operation from now on, and show the script whole parameters."""
        if self.active:
            return
        self._watch(True)
        self._undos = [
            lambda: self._watch(False),
            self._seams.weight_views.show(self._seen, lambda *_: None),
            self._seams.patches.wrap(nn.Parameter, "__deepcopy__", self._copies),
        ]

    def _stop(self) -> None:
        while self._undos:
            self._undos.pop()()
        for page in self._pages.values():  # changes are no longer seen
            page.own, page.changed = None, True
        accelerator.empty_host_cache()  # pinned memory would stay for ever

    def _watch(self, wanted: bool) -> None:
        """Enter the dispatch mode or leave it, below the modes that the script has entered."""
        others = []
        if wanted:
            others = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        else:
            while (mode := _pop_mode()) is not self._mode:
                others.append(mode)
            _push_mode(self._mode)
            self._mode.__exit__(None, None, None)
        for mode in reversed(others):
            _push_mode(mode)

    def _seen(self, parameter: torch.Tensor, here: bool) -> torch.Tensor | None:
        """Return a copy in host memory of a parameter that may be paged out."""
        if here or self._page_of(parameter) is None:
            return None
        return parameter.detach().to("cpu", copy=True)

    def _moves(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(module: nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def converted(tensor: torch.Tensor) -> Any:
                found = fn(tensor)
                if isinstance(tensor, nn.Parameter):
                    self.add(found)
                return found

            return plain(module, converted, *args, **kwargs)

        return apply

    def _copies(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
            if id(parameter) in memo or self._page_of(parameter) is None:
                return plain(parameter, memo)
            copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            memo[id(parameter)] = copied
            self.add(copied)
            return copied

        return deepcopy


@contextmanager
def _unseen() -> Iterator[None]:
    """Run operations that no mode sees or changes, such as ``with torch.device("cuda")``."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def _is_plain(tensor: Any) -> TypeGuard[torch.Tensor]:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


class _Mode(TorchDispatchMode):
    """Passes each operation on to ``PagedParameters.run``."""

    def __init__(self, pages: PagedParameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pages = pages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._pages.run(func, args, kwargs or {})
