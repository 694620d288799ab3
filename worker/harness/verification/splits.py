"""How the calls of one root are split: what was verified of that, and the chunks they run in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward, Root, Undo
from autofit.worker.harness.batch import ddp
from autofit.worker.harness.batch.chunked_root import ChunkedRoot, InOnePiece, OnShortage
from autofit.worker.harness.batch.layout import Batch, Layout, Unverified
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.torch_state.compile_state import uncompiled
from autofit.worker.harness.torch_state.graph import Shapes
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.modules import copied, is_paged, without_cache
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.reachable_state import key_of, places_at
from autofit.worker.harness.verification.checked_root import (
    CheckedRoot,
    checkpointed_blocks,
    in_bf16,
)
from autofit.worker.harness.verification.layout_cache import Layouts
from autofit.worker.harness.verification.short_of_memory import checking
from autofit.worker.harness.verification.split_check import (
    batch_dimension_uncertain,
    few,
    find_layout,
    preserved,
)
from autofit.worker.oom.attempt import attempt


class Splits:
    """How the calls of one root are split, and what runs them in chunks."""

    def __init__(
        self,
        root: CheckedRoot,
        watch: ModuleWatch,
        *,
        verifies: bool,
        rehearses: bool,
        around_proof: Callable[[], AbstractContextManager[None]],
        on_copy: Callable[[], bool],
        another: Callable[[nn.Module], Root],
    ) -> None:
        """``watch``: that of the root's module.

        ``verifies``: new kinds of calls are verified; else they run whole. ``rehearses``: the model
        may run extra calls. ``around_proof`` makes a context for each check. ``on_copy`` tells
        whether a copy of the model is checked, because its weights are sharded. ``another`` returns
        a root of such a copy.
        """
        self.root = root
        self.watch = watch
        self.verifies = verifies
        self.chunked: ChunkedRoot | None = None
        """Runs the root in chunks; ``None`` where the plan does not split the batch."""
        self.layouts = Layouts(
            lambda: root.module,
            self._find,
            root.proof.evidence,
            watch,
            self._rehearse if rehearses else None,
        )
        self.by_sample: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes a context in which BatchNorm does not join samples, if ranks divide the batch."""
        self._around_proof = around_proof
        self._on_copy = on_copy
        self._another = another
        self._last_micro_batch: int | None = None
        self._one_size = False

    # --- in chunks -------------------------------------------------------------------------

    @property
    def micro_batch(self) -> int | None:
        """The samples in a chunk, or in the last one before the script dropped the model."""
        return self.chunked.micro_batch if self.chunked is not None else self._last_micro_batch

    def start(
        self,
        micro_batch: int,
        seams: Seams,
        on_shortage: OnShortage,
        in_one_piece: InOnePiece | None,
    ) -> Undo:
        """Run each call in chunks of at most ``micro_batch`` samples; see ``ChunkedRoot``."""
        outer = self.root.outer
        ddp.refuse_what_cannot_be_split(outer)
        self.chunked = ChunkedRoot(
            outer,
            seams,
            micro_batch,
            find_layout=self._layout,
            layouts=self.layouts,
            watch=self.watch,
            on_shortage=on_shortage,
            reduction=ddp.DdpReduction(outer)
            if isinstance(outer, DistributedDataParallel)
            else None,
            in_one_piece=in_one_piece,
            one_size=self._one_size,
        )
        return self._stop

    def _stop(self) -> None:
        if self.chunked is not None:
            self.chunked.remove()
        self.chunked = None

    def set_one_size(self, wanted: bool) -> None:
        """Let all chunks of a call have one size, or end that."""
        self._one_size = wanted
        if self.chunked is not None:
            self.chunked.one_size = wanted

    def forget(self) -> None:
        """Hold nothing of the model, which the script has dropped."""
        self._last_micro_batch = self.micro_batch
        self._stop()
        self.watch.forget()

    # --- what was verified -----------------------------------------------------------------

    def layout(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return how such a call is split; verify it when its kind comes for the first time.

        Raises ``Refused`` if it cannot be split, with the same reason each time. The split is
        verified on the plain root, in its own precision where that fits. The plan's precision has
        a check of its own, with the tolerance of rounding.
        """
        self.watch.look()
        return self._layout(batch, gradients=gradients)

    def _layout(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return the layout of a call for which the watch has looked at the module."""
        try:
            layout = self.layouts.of(batch, gradients=gradients)
        except Refused as refusal:
            raise type(refusal)(str(refusal), SPLIT) from refusal
        facts = self.root.facts
        if layout.draws and facts is not None and not facts.dropout:
            self.root.facts = replace(facts, dropout=True)
        return layout

    def prove_rescue(self, args: Any, kwargs: Any) -> None:
        """Verify the split that a run under a plan without one needs when memory runs out.

        Nothing is raised if calls cannot be split: the run then saves tensors on the host.
        """
        batch = Batch.of(args, without_cache(self.root.module, kwargs))
        with suppress(Refused):
            layout = attempt(lambda: self.layout(batch)).value
            shape = "" if layout is None else self._rehearse(batch, layout, self.root.forward)
            if layout is not None and shape:
                self.layouts.accept(layout, shape)

    def _find(self, batch: Batch, gradients: bool) -> Layout:
        if gradients and not self.verifies:
            raise Unverified("calls of this kind were not verified before the run")
        root = self.root
        root.proof.proofs += 1
        ddp.refuse_what_cannot_be_split(root.outer)
        on_copy = self._on_copy()
        with uncompiled(), self._around_proof(), checking(), self.by_sample():
            if on_copy:
                module, blocks = copied(root.module), None
                plain: Forward = module.__call__
                if is_paged(module):  # the device cannot hold it
                    blocks = checkpointed_blocks(self._another(module), root.facts, Plan())
            else:
                module, plain = root.module, root.plain
                blocks = checkpointed_blocks(root, root.facts, root.plan)
            found = find_layout(
                module,
                ddp.refuse_collectives(root.in_lasting(plain)),
                batch,
                gradients=gradients,
                whole_observed=root.whole_fits(),
                checkpointed=blocks,
                in_bf16=in_bf16(root.module, root.plan),
                doubted=root.facts is not None and batch_dimension_uncertain(root.facts, batch),
            )
        if not on_copy or not found.updates:
            return found
        return replace(found, updates=places_at(root.module, map(key_of, found.updates)))

    def _rehearse(self, batch: Batch, layout: Layout, forward: Forward | None = None) -> str:
        """Return the shape of the graph of two samples; "" if they do not fit.

        ``forward``: the model's call; by default that without a plan.
        """
        if self._on_copy() or is_paged(self.root.module):
            return ""
        forward = forward or self.root.in_lasting(self.root.plain)
        return attempt(lambda: self._shape(batch, layout, forward)).value or ""

    def _shape(self, batch: Batch, layout: Layout, forward: Forward) -> str:
        some = few(batch, layout, range(min(2, layout.size(batch))))
        args, kwargs = some.call(some.leaves)
        forward = ddp.refuse_collectives(forward)
        module = self.root.module
        with (
            uncompiled(),
            self._around_proof(),
            self.by_sample(),
            preserved(module),
            torch.enable_grad(),
        ):
            outputs = flatten(forward(*args, **kwargs))[0]
            return Shapes().of(outputs, [*module.parameters()])
