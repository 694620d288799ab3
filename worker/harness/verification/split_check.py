"""Verifies on the script's own batch that a split of the batch gives the same training.

The check takes the few samples of the batch that differ most. The model runs in its own mode with
fixed random draws, in float64. At two points, the outputs, gradients and changes of state of these
samples are compared with those of uneven chunks (``split_rules``). The first rule that always holds
is used; otherwise the split is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.strategies.base import Forward
from autofit.strategies.inspection import tf32
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.torch_state.host_saved import saved_on_host
from autofit.worker.harness.torch_state.modules import is_paged
from autofit.worker.harness.torch_state.reachable_state import Snapshot
from autofit.worker.harness.torch_state.rng import Ambient, RandomState, autocast_on
from autofit.worker.harness.verification.fixed_draws import HIGH, LOW, USUAL, fixed_draws
from autofit.worker.harness.verification.float64 import in_float64, soon, widened_batch
from autofit.worker.harness.verification.loss_weights import (
    LARGEST,
    Observer,
    is_mask,
    rolled,
    varied,
)
from autofit.worker.harness.verification.shifted_weights import SETS_WEIGHTS, far, moving, near
from autofit.worker.harness.verification.side_effects import (
    Escapes,
    refuse_changed_arguments,
    refuse_checkpoint_around,
    refuse_listeners,
    state_updates,
    versions,
    weights,
)
from autofit.worker.harness.verification.split_rules import (
    DOUBLE,
    Comparison,
    Criterion,
    Mismatch,
    Runner,
    Undecided,
    Whole,
    by_coefficients,
)
from autofit.worker.harness.verification.ways import SAMPLES, LowMemory, Way, first_that_runs
from autofit.worker.oom.attempt import attempt, attempt_model, free_frames
from autofit.worker.oom.classifier import ErrorKind, classify

SEEDS = range(6)
"""Of Python's and NumPy's generators, for a model that draws with them."""
ELSEWHERE = "it draws with Python or NumPy, whose numbers cannot be repeated for each sample"
REENTRANT = "the model checkpoints with use_reentrant=True, and autofit cannot verify such a model"
HALF_SCALE = 2.0**12
"""The loss scale in float16, so that gradients do not underflow."""


def find_layout(
    module: nn.Module,
    forward: Forward,
    batch: Batch,
    *,
    gradients: bool = True,
    whole_observed: bool = False,
    checkpointed: LowMemory | None = None,
    in_bf16: LowMemory | None = None,
    doubted: bool = False,
    dims: Sequence[int] = (0, 1),
) -> Layout:
    """Return how calls like this one are split.

    Without ``gradients`` (evaluation), only outputs are compared. ``whole_observed``: somebody
    compares the loss of a whole batch, so no whole batch runs here. ``checkpointed`` and
    ``in_bf16`` save memory if the check does not fit otherwise. ``doubted``: the first dimension
    may be time, so the refusal also gives the reason against the second dimension. ``dims``: the
    dimensions of the arguments that may be the batch, in the order in which they are tried.

    Raises ``Refused`` with the reason if such calls cannot be split.
    """
    if gradients:
        refuse_listeners(module)
        refuse_checkpoint_around()
    reasons: list[Refused] = []
    for dim in dims:
        batched = batched_arguments(batch, dim)
        if not batched:
            continue
        layout = Layout(dim, batched, ())
        try:
            if layout.size(batch) < 2:
                raise Refused("the model sees one sample at a time already")
            if reason := pointing(batch, layout):
                raise Refused(reason)
            check = _SplitCheck(module, forward, batch, gradients, gradients and not whole_observed)
            return check.find(layout, _ways(module, checkpointed, in_bf16))
        except Refused as refusal:
            reasons.append(type(refusal)(str(refusal)))
            free_frames(refusal)  # its frames refer to the batch
    if not reasons:
        raise Refused("no tensor argument of the model shows a batch")
    reasons = reasons[: 2 if doubted else 1]
    told = dict.fromkeys(map(str, reasons))
    kind = Undecided if any(isinstance(each, Undecided) for each in reasons) else Refused
    raise kind("; if the batch is the second dimension: ".join(told))


def _ways(
    module: nn.Module, checkpointed: LowMemory | None, in_bf16: LowMemory | None
) -> list[Way]:
    """Return the ways to run the check; each is tried if those before cannot run.

    Float64 never saves tensors on the host: a large model would copy for minutes. If the weights
    are paged, all ranks must do the same, so there is one way, which surely fits.
    """
    if is_paged(module):
        around = partial(_paged, checkpointed or nullcontext)
        return [Way(2, around=around, on_host=checkpointed is None)]
    blocks = [] if checkpointed is None else [checkpointed]
    ways = [Way(wide=True), Way(2, wide=True)]
    ways += [Way(2, wide=True, around=around) for around in blocks]
    ways += [Way(), Way(2)]
    if autocast_on():
        ways += [Way(autocast=True), Way(2, autocast=True)]
    ways += [Way(2, around=around) for around in blocks]
    ways.append(Way(2, on_host=True))
    if autocast_on():
        ways.append(Way(2, on_host=True, autocast=True))
    elif in_bf16 is not None:
        ways.append(Way(2, around=in_bf16, on_host=True, autocast=True))
    return ways


@contextmanager
def _paged(around: LowMemory) -> Iterator[None]:
    with around(), RepeatedHeads():
        yield


NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class RepeatedHeads(TorchFunctionMode):
    """Repeats keys and values before each call of ``scaled_dot_product_attention``.

    torch's fused kernel for float32 on a GPU has no groups. Attention with ``enable_gqa`` then has
    a score for every pair of tokens and every head, in several copies: 2 GiB a sample for 32 heads
    and 2048 tokens. With repeated keys and values, the fused kernel computes the same function and
    needs none of them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and kwargs.get("enable_gqa"):
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            heads = given["query"].shape[-3]
            for name in ("key", "value"):
                times = heads // given[name].shape[-3]
                given[name] = given[name].repeat_interleave(times, dim=-3)
            return func(**{**given, "enable_gqa": False})
        return func(*args, **kwargs)


class _SplitCheck:
    """The check of one root on one of its calls."""

    def __init__(
        self, module: nn.Module, forward: Forward, batch: Batch, gradients: bool, sizes: bool
    ) -> None:
        self.module = module
        self.forward = forward
        self.batch = batch
        self.gradients = gradients
        self.sizes = sizes
        """Compare the whole batch with parts of it too."""

    def find(self, layout: Layout, ways: Sequence[Way]) -> Layout:
        """Return ``layout`` with its rules, found in the first of ``ways`` that can run.

        If the samples do not decide, others are asked.
        """
        chosen = choose(self.batch, layout)

        def run(way: Way) -> Layout:
            with suppress(Undecided) if len(chosen) > way.samples else nullcontext():
                return self._find(layout, chosen[: way.samples], way)
            return self._find(layout, chosen[-way.samples :], way)

        outcome = first_that_runs(ways, lambda way: attempt_model(partial(run, way)))
        if (error := outcome.failure) is None:
            return outcome.result()
        line = (str(error).splitlines() or [type(error).__name__])[0]
        self._run_whole()
        if "use_reentrant" in line:
            raise Refused(REENTRANT)
        name = type(error).__name__
        raise Refused(f"the model raises {name} for a part of the batch, not for all of it: {line}")

    def _run_whole(self) -> None:
        """Run the whole batch; an error that it raises as well is the script's own."""
        args, kwargs = self.batch.call([_copied(leaf) for leaf in self.batch.leaves])
        with preserved(self.module), torch.set_grad_enabled(self.gradients):
            try:
                self.forward(*args, **kwargs)
            except Exception as error:
                if classify(error).kind is ErrorKind.NOT_OOM:
                    raise

    def _find(self, layout: Layout, samples: Sequence[int], way: Way) -> Layout:
        part = few(self.batch, layout, sorted(samples))
        if self.gradients:
            for copy, leaf in zip(part.leaves, self.batch.leaves, strict=True):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    copy.requires_grad_()  # the output of another root, for example
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if self.gradients else torch.no_grad())
            # A split does not depend on TF32, and without it the comparison is more accurate.
            stack.enter_context(tf32.switched(False))
            stack.enter_context(preserved(self.module))
            if not way.autocast:
                stack.enter_context(Ambient.now().off().again())
            stack.enter_context(way.around())
            hooks = saved_on_host(self.module.parameters()) if way.on_host else None
            running = in_float64(self.module, near) if way.wide else None
            weights = stack.enter_context(running or moving(self.module, near, hooks))
            draws = stack.enter_context(fixed_draws(self.module))
            part = widened_batch(part) if way.wide else part
            return self._compare(Runner(self.forward, layout, draws, weights), part, way)

    def _compare(self, runner: Runner, part: Batch, way: Way) -> Layout:
        """Return the layout that holds at two points."""
        observer, escapes = Observer(), Escapes(self.module, part, runner.weights.anchor)
        parameters: dict[str, torch.Tensor] = {
            name: each
            for name, each in self.module.named_parameters()
            if each.requires_grad and self.gradients
        }
        comparison = Comparison(
            runner,
            part,
            parameters,
            (lambda: DOUBLE) if way.wide else partial(_own_criterion, escapes.witness.dtypes),
            observer,
        )
        start = Snapshot(self.module)
        norms, before = weights(self.module), versions(part)
        with soon(self.module) if way.wide else nullcontext(), observer, escapes.witness:
            output, after = runner.call(part, (0, comparison.size))
        refuse_changed_arguments(part, before, after)
        if weights(self.module) != norms:
            raise Refused(SETS_WEIGHTS)
        comparison.observed()
        escapes.note_graph(output.leaves)
        first = comparison.whole(output, start)
        if self.gradients:
            escapes.refuse_escapes(first.output.leaves)
        try:
            comparison.first(first)
        except Mismatch as mismatch:
            if not runner.drew_elsewhere:
                raise
            raise Mismatch(f"{mismatch}; {ELSEWHERE}") from None
        escapes.refuse_foreign()
        if runner.draws.unknown:
            names = ", ".join(sorted(runner.draws.unknown))
            raise Refused(f"the model draws random numbers that cannot be fixed: {names}")
        if self.sizes and runner.layout.size(self.batch) > comparison.size:
            self._compare_sizes(comparison, start, wide=way.wide)
        points, shown = [first], None
        if self.gradients:
            self._other_draws(comparison, first)
            further, shown = self._second_point(comparison, first)
            points += further
        elif comparison.found.draws and self.module.training:
            raise Refused("the model draws random numbers")
        later = [(each.start, each.after) for each in points[1:] or points]
        updates = state_updates(first.start, first.after, later)
        return replace(comparison.found, updates=updates, shown=shown)

    def _other_draws(self, comparison: Comparison, first: Whole) -> None:
        """Compare under other draws, if the model draws a number for its whole batch.

        It may join samples only if that number is low, as a mixing of styles does.
        """
        runner = comparison.runner
        others = [(LOW, SEEDS[0])] if runner.draws.for_all or runner.drew_elsewhere else []
        others += [(HIGH, seed) for seed in SEEDS[1:]] if runner.drew_elsewhere else []
        for chance, seed in others:
            runner.draw(chance, seed)
            first.start.restore()
            output = runner.run(comparison.part, (0, comparison.size))
            try:
                comparison.again(comparison.whole(output, first.start))
            except Mismatch as mismatch:
                raise Mismatch(f"{mismatch}, for some of the numbers that it draws") from None
        runner.draw(USUAL, None)

    def _second_point(
        self, comparison: Comparison, first: Whole
    ) -> tuple[list[Whole], Batch | None]:
        """Narrow the rules at other weights and samples.

        Returns the results, and the samples if ``varied`` made them. Such samples do not refute a
        split, because the training may have none. If they differ, ``rolled`` ones are compared.
        There a difference counts, unless the last bits of the weights make as much, as attention
        over two words can in many layers. The point does not count if the model cannot run there,
        on a singular matrix for example.
        """
        runner, part, possible = comparison.runner, comparison.part, comparison.possible
        runner.weights.move, comparison.second = far, True
        runner.draw(HIGH, None)

        def run() -> Whole:
            first.after.restore()
            output = runner.run(comparison.part, (0, comparison.size))
            return comparison.whole(output, first.after)

        comparison.part = varied(part, runner.layout, comparison.observer)
        outcome = attempt_model(run)
        if outcome.failure is None:
            whole = outcome.result()
            try:
                if comparison.again(whole):
                    return [whole], comparison.part
            except Refused as refusal:
                free_frames(refusal)
            comparison.possible = possible
        comparison.part = rolled(part, runner.layout, comparison.observer)
        outcome = attempt_model(run)
        if outcome.failure is not None:
            return [], None
        whole = outcome.result()
        try:
            comparison.again(whole)
        except Mismatch as mismatch:
            free_frames(mismatch)
            if not comparison.is_chaotic(whole, far):
                raise
        except Undecided:
            pass
        return [whole], None

    def _compare_sizes(self, comparison: Comparison, start: Snapshot, *, wide: bool) -> None:
        """Compare the whole batch with two parts; if it does not fit, half of it, and so on."""
        leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in self.batch.leaves]
        batch = Batch(leaves, self.batch.spec)
        layout = comparison.layout
        size = layout.size(batch)
        while size > comparison.size:
            some = Batch(layout.select(batch, (0, size)), batch.spec)
            part = widened_batch(some) if wide else some
            if attempt(partial(comparison.in_other_sizes, part, start)).fits:
                return
            size //= 2


def _own_criterion(dtypes: set[torch.dtype]) -> Criterion:
    """Return the tolerances for a forward that computes in ``dtypes``."""
    epsilon = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7)
    return by_coefficients(epsilon, HALF_SCALE if torch.float16 in dtypes else 1.0)


# --- samples ----------------------------------------------------------------------------------


def batched_arguments(batch: Batch, dim: int) -> tuple[int, ...]:
    """Return the arguments whose size along ``dim`` equals that of the first tensor.

    Sparse tensors do not count, such as the adjacency matrix of a graph. Nested tensors do not
    count, because they have no shape.
    """
    tensors = [
        (index, leaf)
        for index, leaf in enumerate(batch.leaves)
        if isinstance(leaf, torch.Tensor) and _has_shape(leaf) and leaf.ndim > dim
    ]
    if not tensors:
        return ()
    size = tensors[0][1].shape[dim]
    return tuple(index for index, leaf in tensors if leaf.shape[dim] == size)


def batch_dimension_uncertain(facts: RootFacts, batch: Batch) -> bool:
    """Return whether the first dimension of a call's arguments may be time instead of the batch.

    Only asked where no split tells. It may be time if all arguments are sequences, and none has one
    number per sample. Hugging Face models always have the batch first.
    """
    shown = [batch.leaves[index] for index in batched_arguments(batch, 0)]
    if not shown or facts.transformers or facts.attention is not None:
        return False
    first = shown[0]
    sequences = first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point())
    return sequences and first.shape[0] != first.shape[1] and all(each.ndim > 1 for each in shown)


def _has_shape(leaf: torch.Tensor) -> bool:
    return leaf.layout is torch.strided and not leaf.is_nested


def choose(batch: Batch, layout: Layout) -> list[int]:
    """Return up to twice ``SAMPLES`` samples, those that differ most first.

    They differ in what may matter to a mean: the number of entries that are zero, negative, NaN, or
    equal to the last entry.
    """
    size = layout.size(batch)
    extremes: list[torch.Tensor] = []
    for index in layout.batched:
        leaf = batch.leaves[index].detach()
        if leaf.is_complex() or not 0 < leaf.numel() <= LARGEST:
            continue
        rows = leaf.movedim(layout.dim, 0).reshape(size, -1)
        measures = [(rows == 0).sum(1), (rows == rows[:, -1:]).sum(1)]
        if rows.dtype != torch.bool:
            measures += [(rows < 0).sum(1), rows.isnan().sum(1)]
        if not rows.is_floating_point() or is_mask(leaf):
            measures.append(rows.sum(1))
        extremes += [pick for each in measures for pick in (each.argmin(), each.argmax())]
    picks = torch.stack(extremes).tolist() if extremes else []
    first = list(dict.fromkeys(picks))[: SAMPLES - 1]
    return list(dict.fromkeys([*first, *range(size)]))[: 2 * SAMPLES]


def few(batch: Batch, layout: Layout, samples: Sequence[int]) -> Batch:
    """Return a copy of some samples without their graph."""
    leaves = [
        _copied(leaf) if i not in layout.batched else leaf for i, leaf in enumerate(batch.leaves)
    ]
    for index in layout.batched:
        leaf = batch.leaves[index].detach()
        leaves[index] = leaf.index_select(
            layout.dim, torch.tensor(samples, device=leaf.device)
        ).contiguous()
    return Batch(leaves, batch.spec)


def pointing(batch: Batch, layout: Layout) -> str | None:
    """Return a reason if an argument may contain indices of samples, such as a graph's edges.

    This must be known before a part of the batch runs: an index out of range ends a CUDA context.
    """
    size = layout.size(batch)
    if size <= SAMPLES:
        return None
    for index, leaf in enumerate(batch.leaves):
        if not isinstance(leaf, torch.Tensor) or not _has_shape(leaf):
            continue
        if not 1 < leaf.numel() <= LARGEST:
            continue
        if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
            continue
        if index not in layout.batched:
            top, low = int(leaf.max()), int(leaf.min())
            ordered = bool((leaf == torch.arange(leaf.shape[-1], device=leaf.device)).all())
            if SAMPLES <= top <= size and low >= 0 and not ordered:
                return "an integer argument may contain indices of samples"
        elif leaf.ndim == 1:
            order = torch.arange(size).to(leaf)
            if bool((leaf.sort().values == order).all()) and not bool((leaf == order).all()):
                return "an argument may be a permutation of the samples"
    return None


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


# --- restoring -----------------------------------------------------------------------------


@contextmanager
def preserved(module: nn.Module) -> Iterator[Snapshot]:
    """Afterwards, restore the random generators and all state that calls of ``module`` can reach.

    Raises ``Refused`` with the name of a state that cannot be restored. The context also clears
    autocast's cache of cast weights: casts without a graph would detach the weights.
    """
    state, start = RandomState.now(), Snapshot(module)
    torch.clear_autocast_cache()
    left: list[str] = []
    try:
        yield start
    finally:
        torch.clear_autocast_cache()
        left = start.restore()
        state.restore()
    if left:
        raise Refused(f"a check cannot restore the model's {left[0]}")
