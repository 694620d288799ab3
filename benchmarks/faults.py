"""Deliberate faults, for ``verdicts.py``: each must be refused by the harness's check.

Those of a split change the way in which the harness cuts a batch, weighs its parts or runs them; a
part is told from the whole by its size. Those of a plan that does not round change what the model
does under it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import zoo
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.worker.harness.batch.layout import Batch, Cut, Layout, Weights
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.harness.verification.plan_check import prove

Forward = Callable[..., Any]
MODELS = ("gpt2", "bert, classes", "t5", "vit", "attention", "masked mean", "relu net", "dropout")
SPLIT = ("gpt2", "bert, classes", "t5", "vit", "attention", "relu net", "dropout")
MASKED = ("gpt2", "bert, classes", "t5", "masked mean")
LABELLED = ("gpt2", "t5", "masked mean")
TRAINED = ("gpt2", "bert, classes", "attention", "relu net")
NORMALISED = ("resnet", "conv, batch norm")


@dataclass(frozen=True, slots=True)
class Found:
    """Whether the check has refused a fault in one model."""

    fault: str
    plan: str
    model: str
    refused: bool
    reason: str


# --- in the cutting and weighing of a batch ------------------------------------------------------


@contextmanager
def patched(owner: type, name: str, value: Any) -> Iterator[None]:
    """Within it an attribute of a class is another."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def taking(change: Callable[[Layout, Batch, Cut, list[Any]], list[Any]]) -> Any:
    """Return a fault in the samples that a part is given."""
    select = Layout.select

    def wrong(self: Layout, batch: Batch, cut: Cut) -> list[Any]:
        return change(self, batch, cut, select(self, batch, cut))

    return lambda entry: patched(Layout, "select", wrong)


def dropped(layout: Layout, batch: Batch, cut: Cut, leaves: list[Any]) -> list[Any]:
    """The last sample never runs: the one before it does twice."""
    if cut[0] > 0 and cut[1] == layout.size(batch):
        return layout.select(batch, (0, cut[1] - cut[0]))
    return leaves


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a fault in one argument of each part; of the model that has it."""

    def of(entry: zoo.Entry) -> AbstractContextManager[None]:
        batch = entry.batch()
        found = next((each for each in (name, "m", "b", "labels") if each in batch), name)
        place = list(Batch.of((), {each: each for each in batch}).leaves).index(found)

        def wrong(layout: Layout, batch: Batch, cut: Cut, leaves: list[Any]) -> list[Any]:
            if cut[1] - cut[0] < layout.size(batch):
                leaves[place] = change(leaves[place])
            return leaves

        context: AbstractContextManager[None] = taking(wrong)(entry)
        return context

    return of


def by_samples(_: zoo.Entry) -> AbstractContextManager[None]:
    """A mean over labels is weighed by samples."""

    def wrong(self: Weights, cut: Cut) -> float:
        if self.counts is None:
            return 1.0
        return (cut[1] - cut[0]) / len(self.counts)

    return patched(Weights, "of", wrong)


# --- in what a model does, in parts or under a plan ----------------------------------------------


class _Doubled(torch.autograd.Function):
    """Sends back twice the gradient."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        """Return the value."""
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return twice the gradient."""
        return 2.0 * gradient


def on_numbers(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an output with the tensors changed that have gradients."""

    def of(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

    return tree_map(of, output)


def doubled(_: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Gradients come twice as large."""
    return on_numbers(forward(*args, **kwargs), _Doubled.apply)


def decayed(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """The decay of the weights is added once more."""
    extra = 0.005 * sum(p.square().sum() for p in module.parameters())
    return on_numbers(forward(*args, **kwargs), lambda loss: loss + extra)


def left_out(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """One parameter gets no gradient."""
    chosen = max((p for p in module.parameters() if p.ndim > 1), key=torch.Tensor.numel)
    chosen.register_hook(torch.zeros_like)
    return forward(*args, **kwargs)


def frozen(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """One parameter gets no gradient in this call."""
    chosen = max((p for p in module.parameters() if p.ndim > 1), key=torch.Tensor.numel)
    chosen.requires_grad_(False)
    try:
        return forward(*args, **kwargs)
    finally:
        chosen.requires_grad_(True)


def dropping(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Dropout has another rate."""
    drops = [each for each in module.modules() if isinstance(each, nn.Dropout) and each.p]
    rates = [each.p for each in drops]
    for each in drops:
        each.p = each.p + 0.2
    try:
        return forward(*args, **kwargs)
    finally:
        for each, rate in zip(drops, rates, strict=True):
            each.p = rate


def moved_twice(_: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Statistics of the batch are taken twice."""
    with torch.no_grad():
        forward(*args, **kwargs)
    return forward(*args, **kwargs)


class Stale:
    """Answers with a tenth of what it has answered before."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, _: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call the model and mix in what is kept of the call before."""
        output = forward(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        before, self.kept = self.kept, [leaf.detach().mean() for leaf in made if leaf.requires_grad]
        last = iter(before or self.kept)
        return on_numbers(output, lambda value: value * (0.9 + 0.1 * next(last).to(value)))


def unmasked(_: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """The mask is all ones."""
    known = {
        n: torch.ones_like(v) if n in ("attention_mask", "m") else v for n, v in kwargs.items()
    }
    return forward(*args, **known)


def shifted(_: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    """The labels are off by one place, or by one sample."""
    known = {n: v.roll(1, -1) if n in ("labels", "b") else v for n, v in kwargs.items()}
    return forward(*args, **known)


Change = Callable[[nn.Module, Forward, Any, Any], Any]


def in_parts(change: Change, module: nn.Module, forward: Forward) -> Forward:
    """Return a forward that a change is made to where fewer samples run than the check looks at."""

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if len(first) < 3:
            return change(module, forward, args, kwargs)
        return forward(*args, **kwargs)

    return run


def always(change: Change, module: nn.Module, forward: Forward) -> Forward:
    """Return a forward that a change is made to."""
    return lambda *args, **kwargs: change(module, forward, args, kwargs)


# --- verdicts --------------------------------------------------------------------------------

CUTTING: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a chunk dropped": (taking(dropped), MODELS),
    "chunks weighed by samples, not by tokens": (by_samples, LABELLED),
    "a mask ignored": (changed("attention_mask", torch.ones_like), MASKED),
    "labels shifted": (changed("labels", lambda labels: labels.roll(1, -1)), LABELLED),
}
RUNNING: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a gradient doubled": (lambda: doubled, MODELS),
    "weight decay applied twice": (lambda: decayed, TRAINED),
    "a parameter left out": (lambda: frozen, MODELS),
    "a stale cache": (Stale, TRAINED),
}
UNDER: dict[str, tuple[Any, tuple[str, ...]]] = {
    **RUNNING,
    "a parameter left out": (lambda: left_out, MODELS),
    "a mask ignored": (lambda: unmasked, MASKED),
    "labels shifted": (lambda: shifted, LABELLED),
    "dropout of another rate": (lambda: dropping, ("dropout", "gpt2, dropout", "bert, dropout")),
    "a buffer updated twice": (lambda: moved_twice, NORMALISED),
}
WHOLE = {
    "BatchNorm": NORMALISED,
    "a contrastive loss cut": ("contrastive", "clip"),
}

Rooted = Callable[[nn.Module], HarnessRoot]


def verdict(attempt: Callable[[], object]) -> tuple[bool, str]:
    """Return whether an attempt is refused, and why."""
    try:
        attempt()
    except Refused as refusal:
        return True, str(refusal)[:200]
    return False, ""


def of_split(
    rooted: Rooted, entry: zoo.Entry, fault: Any = None, change: Change | None = None
) -> tuple[bool, str]:
    """Return whether the split of a model's batch is refused with a fault in it."""
    torch.manual_seed(3)
    model, batch = entry.make(), entry.batch()
    root = rooted(model)
    root.facts = describe(model, (), batch)
    assert root.facts is not None
    if change is not None:
        root.around_forward(partial(in_parts, change, model), lasting=True)
    with nullcontext() if fault is None else fault(entry):
        call = Batch.of((), without_cache(model, batch))
        return verdict(lambda: root.splits.layout(call))


def of_plan(rooted: Rooted, entry: zoo.Entry, change: Change) -> tuple[bool, str]:
    """Return whether checkpointing is refused where the model does something else under it."""
    torch.manual_seed(3)
    model, batch = entry.make(), entry.batch()
    root = rooted(model)
    root.facts = describe(model, (), batch)
    assert root.facts is not None
    root.around_forward(partial(always, change, model))
    plan, facts = Plan.of({"checkpointing": "all"}), Facts(roots=(root.facts,))
    kwargs = without_cache(model, batch)
    return verdict(lambda: prove(root, plan, (), kwargs, facts))


def attempts(rooted: Rooted) -> Iterator[tuple[str, str, str, Callable[[], tuple[bool, str]]]]:
    """Yield each fault in each model: its name, the plan, the model, and what tells."""
    for name, (fault, models) in CUTTING.items():
        for model in models:
            yield name, "micro-batch", model, partial(of_split, rooted, zoo.ZOO[model], fault)
    for name, (make, models) in RUNNING.items():
        for model in filter(SPLIT.__contains__, models):  # of the rest the time is cut
            run = partial(of_split, rooted, zoo.ZOO[model], None, make())
            yield name, "micro-batch", model, run
    for name, models in WHOLE.items():
        for model in models:
            yield name, "micro-batch", model, partial(of_split, rooted, zoo.ZOO[model])
    for name, (make, models) in UNDER.items():
        for model in models:
            run = partial(of_plan, rooted, zoo.ZOO[model], make())
            yield name, "checkpointing", model, run


def all_found(
    rooted: Rooted, apart: Callable[[Callable[[], Any]], Any], *, quick: bool
) -> list[Found]:
    """Return what the check says of each fault, each asked in a process of its own."""
    found = []
    for fault, plan, model, run in list(attempts(rooted))[:: 4 if quick else 1]:
        refused, reason = apart(run) or (False, "the process died")
        found.append(Found(fault, plan, model, refused, reason))
    return found
