"""Verifies on the script's own batch that a split of the batch gives the same training.

The check takes the few samples of the batch that differ most. The model runs in its own mode with
fixed random draws. For each rule of joining, the check compares the outputs and gradients of these
samples with those of three uneven chunks (``split_rules``), also on variants of the batch
(``loss_weights``). Then it compares the outputs of the whole batch once with those of chunks of all
sizes. The first rule that always holds is used; otherwise the split is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.strategies.inspection import tf32
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.torch_state.host_saved import saved_on_host
from autofit.worker.harness.torch_state.module_state import update_at_first_call
from autofit.worker.harness.torch_state.modules import is_paged
from autofit.worker.harness.torch_state.reachable_state import Key, Place, Snapshot, changes, key_of
from autofit.worker.harness.torch_state.rng import Ambient, RandomState, autocast_on
from autofit.worker.harness.verification.fixed_draws import fixed_draws
from autofit.worker.harness.verification.float64 import Twins, in_float64, widened_batch
from autofit.worker.harness.verification.gradient_digest import digest
from autofit.worker.harness.verification.loss_weights import LARGEST, Observer, is_mask, rolled
from autofit.worker.harness.verification.perturbation import at_other_weights, zeros_perturbed
from autofit.worker.harness.verification.repeated_heads import RepeatedHeads
from autofit.worker.harness.verification.side_effects import (
    refuse_changed_arguments,
    refuse_changes_in_backward,
    refuse_escapes,
    refuse_listeners,
    state_updates,
    versions,
    weights,
)
from autofit.worker.harness.verification.split_rules import (
    DOUBLE,
    LAST_BITS,
    SINGLE,
    Comparison,
    Criterion,
    Mismatch,
    Progress,
    Runner,
    Undecided,
    is_number,
)
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.oom.attempt import attempt_model
from autofit.worker.oom.classifier import Kind, classify

SAMPLES = 4
"""The number of samples in the check: enough for uneven chunks, few enough to be cheap."""

REENTRANT = "the model checkpoints with use_reentrant=True, through which nothing can be verified"
HALF_SCALE = 2.0**12
"""The loss scale in float16, so that gradients do not underflow."""


_SINGLE = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class _Samples:
    """A few samples of a call, and what forwards of them have shown."""

    part: Batch
    start: Snapshot
    """The model's state before the check."""
    observer: Observer
    dtypes: set[torch.dtype]
    """The data types in which a forward computes."""

    @property
    def epsilon(self) -> float:
        """The machine epsilon of the lowest precision in which a forward computes."""
        return max((torch.finfo(dtype).eps for dtype in self.dtypes), default=1e-7)


Ask = Callable[[Comparison, Progress], Layout]
"""A question to a comparison: which rules hold, or whether a layout holds."""

LowMemory = Callable[[], AbstractContextManager[object]]
"""Returns a context in which the model saves fewer activations, or smaller ones."""


def find_layout(
    module: nn.Module,
    forward: Forward,
    batch: Batch,
    *,
    gradients: bool = True,
    known: Layout | None = None,
    checkpointed: LowMemory | None = None,
    in_bf16: LowMemory | None = None,
    doubted: bool = False,
) -> Layout:
    """Return how calls like this one are split.

    Without ``gradients`` (evaluation), only outputs are compared. ``known``: the layout of an
    earlier call of this kind; if it holds here, the rules are not searched again. ``checkpointed``
    and ``in_bf16`` save memory if the check does not fit otherwise. ``doubted``: the first
    dimension may be time, so the refusal also gives the reason against the second dimension.

    Raises ``Refused`` with the reason if such calls cannot be split.
    """
    if gradients:
        refuse_listeners(module)
    reasons: list[Refused] = []
    for dim in (0, 1):
        batched = batched_arguments(batch, dim)
        if not batched:
            continue
        layout = Layout(dim, batched, ())
        try:
            if layout.size(batch) < 2:
                raise Refused("the model sees one sample at a time already")
            if reason := pointing(batch, layout):
                raise Refused(reason)
            check = _SplitCheck(module, forward, batch, gradients, known)
            return _find_frugally(check, layout, checkpointed, in_bf16)
        except Refused as refusal:
            reasons.append(type(refusal)(str(refusal)))
            clear_frames(refusal.__traceback__)  # its frames refer to the batch
    if not reasons:
        raise Refused("no tensor argument of the model shows a batch")
    reasons = reasons[: 2 if doubted else 1]
    told = dict.fromkeys(map(str, reasons))
    kind = Undecided if any(isinstance(each, Undecided) for each in reasons) else Refused
    raise kind("; if the batch is the second dimension: ".join(told))


def _find_frugally(
    check: _SplitCheck, layout: Layout, checkpointed: LowMemory | None, in_bf16: LowMemory | None
) -> Layout:
    """Check ``SAMPLES`` samples, and other samples if these do not decide.

    If that does not fit in memory, the check uses two samples. Then it uses ``checkpointed``. Then
    autograd's saved tensors go to host memory, which is slow. The last attempt also runs in
    autocast, the script's own or the plan's.
    """
    chosen = choose(check.batch, layout)
    if is_paged(check.module):  # all ranks must do the same, so only what is sure to fit
        return _find_paged(check, layout, chosen[:2], checkpointed)
    check.leaner = len(chosen) > 2 or checkpointed is not None
    found, error = _try(check, layout, chosen[:SAMPLES])
    if isinstance(error, Undecided) and len(chosen) > SAMPLES:
        again, other = _try(check, layout, chosen[-SAMPLES:])
        if other is None or isinstance(other, Undecided):
            found, error = again, other
    hooks = saved_on_host(check.module.parameters())
    ways: list[tuple[LowMemory, saved_tensors_hooks | None, bool]] = []
    if len(chosen) > 2:  # otherwise the samples were the whole batch
        ways.append((nullcontext, None, True))
    if checkpointed is not None:
        ways.append((checkpointed, None, True))
    ways.append((nullcontext, hooks, True))
    if autocast_on():
        ways.append((nullcontext, hooks, False))
    elif in_bf16 is not None:
        ways.append((in_bf16, hooks, False))
    on_device = sum(hooks is None for _, hooks, _ in ways)
    for number, (around, check.on_host, check.without_autocast) in enumerate(ways, 1):
        if error is None or isinstance(error, Undecided):
            break
        check.leaner = number < on_device
        with around(), check.on_host or nullcontext():
            found, error = _try(check, layout, chosen[:2])
    if error is not None:
        raise error
    assert found is not None
    return found


def _find_paged(
    check: _SplitCheck, layout: Layout, samples: Sequence[int], checkpointed: LowMemory | None
) -> Layout:
    """Check with checkpointed blocks, or with autograd's saved tensors in host memory."""
    check.on_host = saved_on_host(check.module.parameters()) if checkpointed is None else None
    with (checkpointed or nullcontext)(), check.on_host or nullcontext(), RepeatedHeads():
        found, error = _try(check, layout, samples)
    if error is not None:
        raise error
    assert found is not None
    return found


def _try(
    check: _SplitCheck, layout: Layout, samples: Sequence[int]
) -> tuple[Layout | None, Exception | None]:
    """Return the layout, or the error if memory ran out or the samples did not decide."""
    try:
        outcome = attempt_model(lambda: check.find(layout, sorted(samples)))
    except Undecided as undecided:
        return None, undecided
    if (error := outcome.failure) is None:
        return outcome.value, outcome.shortage
    line = (str(error).splitlines() or [type(error).__name__])[0]
    check.run_whole()
    if "use_reentrant" in line:
        raise Refused(REENTRANT)
    raise Refused(f"the model cannot run on a part of the batch: {line}")


class _SplitCheck:
    """The check of one root on one of its calls."""

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        batch: Batch,
        gradients: bool,
        known: Layout | None = None,
    ) -> None:
        self.module = module
        self.forward = forward
        self.batch = batch
        self.gradients = gradients
        self.known = known
        """The layout of an earlier call of this kind."""
        self.on_host: saved_tensors_hooks | None = None
        """Stores autograd's saved tensors in host memory; ``None`` if they fit on the device."""
        self.leaner = False
        """Whether a leaner way to run this check is left that needs no host memory."""
        self.without_autocast = True
        """Leave the script's autocast if the model can run without it."""
        self.rounds = False
        """Rounding was the reason of a difference: what follows is compared in float64 at once."""
        self.with_graph: dict[Key, Any] = {}
        """The state that a forward with a graph and its backward have changed, if they could
        run."""

    def run_whole(self) -> None:
        """Run the whole batch; an error that it raises as well is the script's own."""
        args, kwargs = self.batch.call([_copied(leaf) for leaf in self.batch.leaves])
        with preserved(self.module), torch.set_grad_enabled(self.gradients):
            try:
                self.forward(*args, **kwargs)
            except Exception as error:
                if classify(error).kind is Kind.NOT_OOM:
                    raise

    def find(self, layout: Layout, samples: Sequence[int]) -> Layout:
        """Return ``layout`` with its rules, found on ``samples``.

        The check leaves the script's autocast if the model can run without it. In half precision,
        rounding may differ as much as a wrong split does.
        """
        if not self.without_autocast or not autocast_on():
            return self._find(layout, samples)
        with Ambient.now().off().again():
            outcome = attempt_model(lambda: self._find(layout, samples))
        return outcome.result() if outcome.failure is None else self._find(layout, samples)

    def _find(self, layout: Layout, samples: Sequence[int]) -> Layout:
        part = few(self.batch, layout, samples)
        if self.gradients:
            _need_gradients(part, self.batch)
        graph = torch.enable_grad() if self.gradients else torch.no_grad()
        # A split does not depend on TF32, and without it the comparison is more accurate.
        with graph, tf32.switched(False), preserved(self.module) as start:
            if self.gradients:
                self._rehearse(part, start)
            with zeros_perturbed(self.module) as perturbed:
                try:
                    return self._find_on(layout, part, start)
                except Undecided:
                    if not perturbed:
                        raise
            # Without the perturbation, the weights may tell the samples apart.
            return self._find_on(layout, part, start)

    def _find_on(self, layout: Layout, part: Batch, start: Snapshot) -> Layout:
        start.restore()
        self.rounds = False
        observer = Observer()
        before, norms = versions(part), weights(self.module)
        with observer:
            draws, after = self._draws(part)
        refuse_changed_arguments(part, before, after)
        if weights(self.module) != norms:
            raise Refused("the model sets its weights in a forward, from the batch maybe")
        chunk = Batch(layout.select(part, (0, 1)), part.spec)
        state = Snapshot(self.module, copies=False)
        refuse_changes_in_backward(start, state, self.with_graph)
        updates = state_updates(start, part, chunk, self.forward, state, draws=draws)
        dtypes = self._refuse_escapes(part)
        layout = replace(layout, draws=draws, updates=updates)
        samples = _Samples(part, start, observer, dtypes)
        if layout.draws and not self.gradients and self.module.training:
            raise Refused("the model draws random numbers")
        if self.known is not None and replace(layout, joins=self.known.joins) == self.known:
            known = _with_updates(self.known, updates)
            with suppress(Refused):  # the rules are searched again
                return self._settle(known, samples, _verified_again)
        return self._settle(layout, samples, Comparison.find)

    def _settle(self, layout: Layout, samples: _Samples, ask: Ask) -> Layout:
        """Return the answer to ``ask``, confirmed at other weights if gradients count."""
        found = self._decide(layout, samples, ask)
        if not self.gradients:
            return found
        samples = replace(samples, part=rolled(samples.part, layout, samples.observer))
        for larger in (True, False):  # where rounding decides, the layout is not confirmed
            with suppress(Undecided):
                return self._confirm(found, samples, larger=larger)
        return found

    def _confirm(self, layout: Layout, samples: _Samples, *, larger: bool) -> Layout:
        """Return ``layout`` with the state that is updated at other weights too.

        ``larger``: the other weights are also larger. Raises ``Refused`` if the layout holds only
        at the present weights and samples, and ``Undecided`` if rounding decides.
        """
        with at_other_weights(self.module, larger=larger):
            outcome = attempt_model(lambda: self._updates(layout, samples.part, samples.start))
            if outcome.failure is not None:  # such as a singular matrix
                return layout
            layout = _with_updates(layout, outcome.result())
            confirmed = attempt_model(lambda: self._decide(layout, samples, _confirmed))
        return layout if confirmed.failure is not None else confirmed.result()

    def _updates(self, layout: Layout, part: Batch, start: Snapshot) -> tuple[Place, ...]:
        """Return the state that each call updates at the present weights."""
        start.restore()
        args, kwargs = part.call(part.leaves)
        with torch.no_grad():
            self.forward(*args, **kwargs)
        chunk = Batch(layout.select(part, (0, 1)), part.spec)
        after = Snapshot(self.module, copies=False)
        return state_updates(start, part, chunk, self.forward, after, draws=layout.draws)

    def _rehearse(self, part: Batch, start: Snapshot) -> None:
        """Run the step that needs most memory first, so that a shortage ends the check early.

        Later steps find and report other errors. But only this step finds what a forward with a
        graph or a backward changes: each chunk would change it.
        """
        leaves = [*self.module.parameters(), *part.leaves]
        wanted = [each for each in leaves if is_number(each) and each.requires_grad]
        draws = RandomState.now()
        args, kwargs = part.call(part.leaves)

        def step() -> None:
            made = tree_leaves(self.forward(*args, **kwargs))
            outputs = [each for each in made if is_number(each) and each.requires_grad]
            del made
            if outputs:
                digest(outputs, [torch.ones_like(each) for each in outputs], wanted)
            del outputs
            now = Snapshot(self.module, copies=False)
            self.with_graph = {key: now.values.get(key) for key in changes(start, now)}

        try:
            with suppress(Refused):
                shortage = attempt_model(step).shortage
                if shortage is not None:
                    raise shortage
        finally:
            draws.restore()

    def _refuse_escapes(self, part: Batch) -> set[torch.dtype]:
        if self.gradients:
            return refuse_escapes(self.module, part, self.forward, self.on_host)
        return {p.dtype for p in self.module.parameters() if p.is_floating_point()}

    def _decide(self, layout: Layout, samples: _Samples, ask: Ask) -> Layout:
        """Return the answer to ``ask``; float64 decides what may differ by rounding.

        Each comparison starts from ``samples.start``, because the first call may do what later
        calls do not. What the script's own precision has settled is not compared again, unless
        float64 then refuses the rest.
        """
        settled = Progress()
        own = DOUBLE if samples.epsilon < _SINGLE else SINGLE
        if own is DOUBLE or (samples.epsilon <= _SINGLE and not self.rounds):
            samples.start.restore()
            try:
                return self._compare(
                    layout, samples.part, self.batch, samples.observer, own, ask, settled
                )
            except (Mismatch, Undecided) as refusal:
                if own is DOUBLE:
                    raise
                if isinstance(refusal, Undecided):
                    settled = Progress()
                clear_frames(refusal.__traceback__)
        rest = partial(self._decide_in_float64, layout, samples, ask)
        if settled.candidates is not None:
            try:
                return rest(settled)
            except Refused as refusal:
                clear_frames(refusal.__traceback__)
        return rest(Progress())

    def _decide_in_float64(
        self, layout: Layout, samples: _Samples, ask: Ask, settled: Progress
    ) -> Layout:
        """Return the answer to ``ask`` in float64.

        If the model cannot run in it, the chunks' coefficients in the gradients decide.
        """
        part, observer, epsilon = samples.part, samples.observer, samples.epsilon
        samples.start.restore()
        if (found := self._in_float64(layout, part, observer, ask, settled)) is not None:
            self.rounds = True
            return found
        samples.start.restore()
        scale = HALF_SCALE if torch.float16 in samples.dtypes else 1.0
        shares = Criterion(tolerance(epsilon), None, LAST_BITS * epsilon, scale)
        return self._compare(layout, part, self.batch, observer, shares, ask, settled)

    def _in_float64(
        self, layout: Layout, part: Batch, observer: Observer, ask: Ask, settled: Progress
    ) -> Layout | None:
        """Return the answer to ``ask`` in float64; ``None`` if the model cannot run in it.

        Raises the shortage if float64 does not fit and a leaner way to run this check is left.
        Float64 never saves tensors on the host: a large model would then copy for minutes.
        """
        if self.on_host is not None:
            return None
        fits = False

        def compare() -> Layout:
            nonlocal fits
            with in_float64(self.module) as twins:
                fits = True
                batches = widened_batch(part), widened_batch(self.batch)
                return self._compare(layout, *batches, observer, DOUBLE, ask, settled, twins)

        outcome = attempt_model(compare)
        if outcome.shortage is not None and fits and self.leaner:
            raise outcome.shortage
        return outcome.value  # no value if a kernel has no float64, say

    def _compare(
        self,
        layout: Layout,
        part: Batch,
        whole: Batch,
        observer: Observer,
        criterion: Criterion,
        ask: Ask,
        settled: Progress,
        twins: Twins | None = None,
    ) -> Layout:
        """Return the answer to ``ask``; ``twins`` are the parameters that the model runs with."""
        with fixed_draws(self.module) if layout.draws else nullcontext() as draws:
            runner = Runner(update_at_first_call(self.forward, layout.updates), layout, draws)
            parameters = {
                name: parameter if twins is None else twins.of(parameter)
                for name, parameter in self.module.named_parameters()
                if parameter.requires_grad and self.gradients
            }
            found = ask(Comparison(runner, part, whole, parameters, criterion, observer), settled)
            if draws is not None and draws.unknown:
                names = ", ".join(sorted(draws.unknown))
                raise Refused(f"the model draws random numbers that cannot be fixed: {names}")
        return found

    def _draws(self, part: Batch) -> tuple[bool, Batch]:
        """Run once without a graph; return whether it drew numbers, and the arguments after it."""
        before = RandomState.now()
        args, kwargs = part.call(part.leaves)
        with torch.no_grad():
            outcome = attempt_model(lambda: self.forward(*args, **kwargs))
        if self.gradients and outcome.failure is not None:
            self.forward(*args, **kwargs)
            raise Refused("the model cannot run without gradients, as a part of it must")
        outcome.result()
        return before != RandomState.now(), Batch.of(args, kwargs)


def _with_updates(layout: Layout, further: Sequence[Place]) -> Layout:
    """Return ``layout`` with further state that each call updates."""
    updates = {key_of(place): place for place in (*further, *layout.updates)}
    return replace(layout, updates=tuple(updates.values()))


def _verified_again(comparison: Comparison, _: Progress) -> Layout:
    comparison.verify_again()
    return comparison.layout


def _confirmed(comparison: Comparison, _: Progress) -> Layout:
    comparison.confirm()
    return comparison.layout


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
                return "an argument of whole numbers may point at samples of the batch"
        elif leaf.ndim == 1:
            order = torch.arange(size).to(leaf)
            if bool((leaf.sort().values == order).all()) and not bool((leaf == order).all()):
                return "an argument may be an order of the samples of the batch"
    return None


def _need_gradients(part: Batch, batch: Batch) -> None:
    """Let the copies require gradients if the script's arguments do.

    The output of another root does, for example.
    """
    for copy, leaf in zip(part.leaves, batch.leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            copy.requires_grad_()


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
        raise Refused(f"what a check changes in the model cannot be put back: its {left[0]}")


def tolerance(epsilon: float) -> float:
    """Return the relative difference that an output may have in a type with this ``epsilon``."""
    return min(TOLERANCES.coarse, TOLERANCES.epsilons * epsilon)
