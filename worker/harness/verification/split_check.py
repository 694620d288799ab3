"""Does a split of the batch keep its promise on this model and batch? Measured, not believed.

On a few samples of the script's own batch, those that differ most, in the model's own mode with
the random draws fixed, the outputs and gradients of the whole are compared with those of three
uneven chunks, for each rule of joining (``comparison``), on variants of the batch too (``hints``).
Then the outputs of the whole batch are compared once with those of parts of every size. The first
rule that holds everywhere is taken, else the split is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
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
from autofit.worker.harness.torch_state.reachable_state import Key, Place, Snapshot, changes, key_of
from autofit.worker.harness.torch_state.rng import Ambient, RandomState, autocast_on
from autofit.worker.harness.verification.fixed_draws import fixed_draws
from autofit.worker.harness.verification.float64 import CannotRun, Twins, in_float64, widened_batch
from autofit.worker.harness.verification.gradient_digest import digest
from autofit.worker.harness.verification.loss_weights import LARGEST, Observer, is_mask, rolled
from autofit.worker.harness.verification.perturbation import at_other_weights, zeros_perturbed
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
    Doubt,
    Runner,
    Undecided,
    is_number,
)
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.oom.classifier import Kind, classify

SAMPLES = 4
"""Samples the check looks at: enough for uneven chunks, few enough to cost little."""

REENTRANT = "the model checkpoints with use_reentrant=True: nothing can be proven through it"
HALF_SCALE = 2.0**12
"""What a loss is multiplied with in float16, so that its gradients do not vanish."""


_SINGLE = torch.finfo(torch.float32).eps

Ask = Callable[[Comparison], Layout]
"""What a comparison is asked: how parts are joined, or whether a layout holds there too."""

Leanly = Callable[[], AbstractContextManager[object]]
"""Makes a context in which the model keeps fewer activations, or narrower ones."""


def find_layout(
    module: nn.Module,
    forward: Forward,
    batch: Batch,
    *,
    gradients: bool = True,
    leanly: Leanly | None = None,
    narrowly: Leanly | None = None,
    doubted: bool = False,
) -> Layout:
    """Return how calls like this one can be split; raise ``Refused`` with the reason if not.

    Without ``gradients`` (evaluation) only outputs are compared. ``leanly``, ``narrowly``: where
    there is no memory otherwise, the latter in half precision. ``doubted``: the first dimension may
    be time, so that what speaks against the second is told too.
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
            check = _SplitCheck(module, forward, batch, gradients)
            return _find_frugally(check, layout, leanly, narrowly)
        except Refused as refusal:
            reasons.append(type(refusal)(str(refusal)))
            clear_frames(refusal.__traceback__)  # they hold the batch, and some of them the error
    if not reasons:
        raise Refused("no tensor argument of the model shows a batch")
    reasons = reasons[: 2 if doubted else 1]
    told = dict.fromkeys(map(str, reasons))
    kind = Undecided if any(isinstance(each, Undecided) for each in reasons) else Refused
    raise kind("; if the batch is the second dimension: ".join(told))


def _find_frugally(
    check: _SplitCheck, layout: Layout, leanly: Leanly | None, narrowly: Leanly | None
) -> Layout:
    """Probe on ``SAMPLES`` samples; on other samples where these could not decide.

    Where memory has no room for them: on two; then leanly; then with what autograd saves in host
    memory, which takes long; then in autocast as well, the script's own or the plan's.
    """
    chosen = choose(check.batch, layout)
    found, error = _try(check, layout, chosen[:SAMPLES])
    if isinstance(error, Undecided) and len(chosen) > SAMPLES:
        again, other = _try(check, layout, chosen[-SAMPLES:])
        if other is None or isinstance(other, Undecided):
            found, error = again, other
    hooks = saved_on_host(check.module.parameters())
    ways: list[tuple[Leanly, saved_tensors_hooks | None, bool]] = []
    if len(chosen) > 2:  # else they were all of them
        ways.append((nullcontext, None, True))
    if leanly is not None:
        ways.append((leanly, None, True))
    ways.append((nullcontext, hooks, True))
    if autocast_on():
        ways.append((nullcontext, hooks, False))
    elif narrowly is not None:
        ways.append((narrowly, hooks, False))
    for around, check.on_host, check.sharp in ways:
        if error is None or isinstance(error, Undecided):
            break
        clear_frames(error.__traceback__)  # they hold what did not fit
        with around(), check.on_host or nullcontext():
            found, error = _try(check, layout, chosen[:2])
    if error is not None:
        raise error
    assert found is not None
    return found


def _try(
    check: _SplitCheck, layout: Layout, samples: Sequence[int]
) -> tuple[Layout | None, Exception | None]:
    """Return the layout, or the error where memory ran out or nothing could be decided."""
    try:
        return check.find(layout, sorted(samples)), None
    except Undecided as undecided:
        return None, undecided
    except Refused:
        raise
    except Exception as error:
        kind = classify(error).kind
        if kind is Kind.OOM:
            return None, error
        if kind is not Kind.NOT_OOM:
            raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
    check.run_whole()
    if "use_reentrant" in line:
        raise Refused(REENTRANT)
    raise Refused(f"the model cannot run on a part of the batch: {line}")


class _SplitCheck:
    """One root and one of its calls."""

    def __init__(self, module: nn.Module, forward: Forward, batch: Batch, gradients: bool) -> None:
        self.module = module
        self.forward = forward
        self.batch = batch
        self.gradients = gradients
        self.on_host: saved_tensors_hooks | None = None
        """Keep what autograd saves in host memory; ``None`` where there is room for it."""
        self.sharp = True
        """Leave the script's autocast, where the model can."""
        self.with_graph: dict[Key, Any] = {}
        """What a forward with a graph and its backward have changed, where they could run."""

    def run_whole(self) -> None:
        """Let an error through that the model raises on the whole batch too: the script's own."""
        args, kwargs = self.batch.call([_copied(leaf) for leaf in self.batch.leaves])
        with preserved(self.module), torch.set_grad_enabled(self.gradients):
            try:
                self.forward(*args, **kwargs)
            except Exception as error:
                if classify(error).kind is Kind.NOT_OOM:
                    raise

    def find(self, layout: Layout, samples: Sequence[int]) -> Layout:
        """Return ``layout`` with its rules, found on some samples.

        Outside the script's autocast where the model can run there: in half precision two ways to
        compute the same may differ by as much as two that are not the same.
        """
        if not self.sharp or not autocast_on():
            return self._find(layout, samples)
        try:
            with Ambient.now().off().again():
                return self._find(layout, samples)
        except Refused:
            raise
        except Exception as error:
            if classify(error).kind is not Kind.NOT_OOM:
                raise
            clear_frames(error.__traceback__)
        return self._find(layout, samples)

    def _find(self, layout: Layout, samples: Sequence[int]) -> Layout:
        part = few(self.batch, layout, samples)
        if self.gradients:
            _need_gradients(part, self.batch)
        graph = torch.enable_grad() if self.gradients else torch.no_grad()
        # How a batch is split does not depend on TF32, and the comparison is sharper without.
        with graph, tf32.switched(False), preserved(self.module) as start:
            if self.gradients:
                self._rehearse(part, start)
            with zeros_perturbed(self.module) as stirring:
                try:
                    return self._look(layout, part, start)
                except Undecided:
                    if not stirring:
                        raise
            return self._look(layout, part, start)  # the weights as they are may tell samples apart

    def _look(self, layout: Layout, part: Batch, start: Snapshot) -> Layout:
        start.restore()
        seen = Observer()
        before, set_out = versions(part), weights(self.module)
        with seen:
            draws, after = self._draws(part)
        refuse_changed_arguments(part, before, after)
        if weights(self.module) != set_out:
            raise Refused("the model sets its weights in a forward, from the batch maybe")
        chunk = Batch(layout.select(part, (0, 1)), part.spec)
        state = Snapshot(self.module, copies=False)
        refuse_changes_in_backward(start, state, self.with_graph)
        updates = state_updates(start, part, chunk, self.forward, state)
        dtypes = self._refuse_escapes(part)
        layout = replace(layout, draws=draws, updates=updates)
        if layout.draws and not self.gradients and self.module.training:
            raise Refused("the model draws random numbers")
        found = self._decide(layout, part, start, seen, dtypes, Comparison.find)
        if not self.gradients:
            return found
        part = rolled(part, layout, seen)
        for larger in (True, False):  # rounding may decide everything there: then nothing is asked
            with suppress(Undecided):
                return self._confirm(found, part, start, seen, dtypes, larger=larger)
        return found

    def _confirm(
        self,
        layout: Layout,
        part: Batch,
        start: Snapshot,
        seen: Observer,
        dtypes: set[torch.dtype],
        *,
        larger: bool,
    ) -> Layout:
        """Return ``layout`` with what moves at other weights too (a power iteration, say).

        ``larger``: these are larger than the model's own. Raises ``Refused`` where the layout holds
        at the present weights and samples alone, ``Undecided`` where rounding decides.
        """
        with at_other_weights(self.module, larger=larger):
            try:
                further = self._updates(layout, part, start)
                updates = {key_of(place): place for place in (*further, *layout.updates)}
                layout = replace(layout, updates=tuple(updates.values()))
                return self._decide(layout, part, start, seen, dtypes, _confirmed)
            except Refused:
                raise
            except Exception as error:  # a matrix without an inverse, say
                if classify(error).kind is not Kind.NOT_OOM:
                    raise
                clear_frames(error.__traceback__)
        return layout

    def _updates(self, layout: Layout, part: Batch, start: Snapshot) -> tuple[Place, ...]:
        """Return what each call moves on, of the weights that the model has now."""
        start.restore()
        args, kwargs = part.call(part.leaves)
        with torch.no_grad():
            self.forward(*args, **kwargs)
        chunk = Batch(layout.select(part, (0, 1)), part.spec)
        return state_updates(start, part, chunk, self.forward, Snapshot(self.module, copies=False))

    def _rehearse(self, part: Batch, start: Snapshot) -> None:
        """Run what needs most memory first: where there is no room for it, nothing else is spent.

        What else may go wrong in it is found, and told, where it is looked for; but for what is
        changed with a graph or in a backward alone: each part of a batch would change it.
        """
        leaves = [*self.module.parameters(), *part.leaves]
        wanted = [each for each in leaves if is_number(each) and each.requires_grad]
        draws = RandomState.now()
        args, kwargs = part.call(part.leaves)
        try:
            made = tree_leaves(self.forward(*args, **kwargs))
            outputs = [each for each in made if is_number(each) and each.requires_grad]
            if outputs:
                digest(outputs, [torch.ones_like(each) for each in outputs], wanted)
            del made, outputs
            now = Snapshot(self.module, copies=False)
            self.with_graph = {key: now.values.get(key) for key in changes(start, now)}
        except Exception as error:
            if classify(error).kind is not Kind.NOT_OOM:
                raise
            clear_frames(error.__traceback__)
        finally:
            draws.restore()

    def _refuse_escapes(self, part: Batch) -> set[torch.dtype]:
        if self.gradients:
            return refuse_escapes(self.module, part, self.forward, self.on_host)
        return {p.dtype for p in self.module.parameters() if p.is_floating_point()}

    def _decide(
        self,
        layout: Layout,
        part: Batch,
        start: Snapshot,
        seen: Observer,
        dtypes: set[torch.dtype],
        ask: Ask,
    ) -> Layout:
        """Return what ``ask`` finds of a comparison; in float64 where rounding leaves a doubt.

        Each begins from ``start``: the first call is compared, and may do what no other does.

        Where the model cannot run in float64, the parts' shares in the gradients decide.
        """
        epsilon = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7)
        own = DOUBLE if epsilon < _SINGLE else SINGLE
        start.restore()
        if epsilon <= _SINGLE:
            try:
                return self._compare(layout, part, self.batch, seen, own, ask)
            except (Doubt, Undecided) as refusal:
                if own is DOUBLE:
                    raise
                clear_frames(refusal.__traceback__)
        start.restore()
        if (found := self._in_float64(layout, part, seen, ask)) is not None:
            return found
        start.restore()
        scale = HALF_SCALE if torch.float16 in dtypes else 1.0
        shares = Criterion(tolerance(epsilon), None, LAST_BITS * epsilon, scale)
        return self._compare(layout, part, self.batch, seen, shares, ask)

    def _in_float64(self, layout: Layout, part: Batch, seen: Observer, ask: Ask) -> Layout | None:
        """Return what ``ask`` finds in float64; ``None`` where the model does not run in it.

        With what autograd saves in host memory where there is no room for it otherwise.
        """
        for hooks in (nullcontext(), saved_on_host([])):
            try:
                with hooks, in_float64(self.module) as twins:
                    batches = widened_batch(part), widened_batch(self.batch)
                    return self._compare(layout, *batches, seen, DOUBLE, ask, twins)
            except CannotRun:
                return None
            except Refused:
                raise
            except Exception as error:
                kind = classify(error).kind
                if kind not in (Kind.OOM, Kind.NOT_OOM):
                    raise
                clear_frames(error.__traceback__)
                if kind is Kind.NOT_OOM:  # a kernel that knows no float64, say
                    return None
        return None

    def _compare(
        self,
        layout: Layout,
        part: Batch,
        whole: Batch,
        seen: Observer,
        criterion: Criterion,
        ask: Ask,
        twins: Twins | None = None,
    ) -> Layout:
        """Return what ``ask`` finds; ``twins``: the parameters that the model runs with."""
        with fixed_draws(self.module) if layout.draws else nullcontext() as draws:
            runner = Runner(update_at_first_call(self.forward, layout.updates), layout, draws)
            parameters = {
                name: parameter if twins is None else twins.of(parameter)
                for name, parameter in self.module.named_parameters()
                if parameter.requires_grad and self.gradients
            }
            found = ask(Comparison(runner, part, whole, parameters, criterion, seen))
            if draws is not None and draws.unknown:
                names = ", ".join(sorted(draws.unknown))
                raise Refused(f"the model draws random numbers that cannot be fixed: {names}")
        return found

    def _draws(self, part: Batch) -> tuple[bool, Batch]:
        """Run once without a graph; return whether that drew, and the arguments afterwards."""
        before = RandomState.now()
        args, kwargs = part.call(part.leaves)
        try:
            with torch.no_grad():
                self.forward(*args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            if classify(error).kind is not Kind.NOT_OOM or not self.gradients:
                raise
            clear_frames(error.__traceback__)
            self.forward(*args, **kwargs)
            raise Refused("the model cannot run without gradients, as a part of it must") from None
        return before != RandomState.now(), Batch.of(args, kwargs)


def _confirmed(comparison: Comparison) -> Layout:
    comparison.confirm()
    return comparison.layout


# --- samples ----------------------------------------------------------------------------------


def batched_arguments(batch: Batch, dim: int) -> tuple[int, ...]:
    """Return the arguments that have as many entries along ``dim`` as the first tensor has.

    Sparse ones are none of them: the adjacency of a graph's nodes. Nor nested ones: they have no
    shape.
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

    By what may matter to a mean: how much of a sample is zero, negative, NaN, like its last entry.
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
    """Return a copy of some samples, with no graph."""
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
    """Say whether arguments point at samples of the batch: edges of a graph, bounds of sequences.

    Asked before a part runs: on CUDA an index out of range ends the context.
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
    """Let the copies need gradients where the script's arguments do (another root's output)."""
    for copy, leaf in zip(part.leaves, batch.leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            copy.requires_grad_()


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


# --- surroundings -----------------------------------------------------------------------------


@contextmanager
def preserved(module: nn.Module) -> Iterator[Snapshot]:
    """Restore the random generators, and all that calls of ``module`` can reach, afterwards.

    Raises ``Refused`` with the name of what cannot be restored. Weights that autocast has cast here
    are cast anew: without a graph they would be cut off.
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
    """Return the relative difference of an output that precision may make, by its last bit."""
    return min(TOLERANCES.coarse, TOLERANCES.epsilons * epsilon)
