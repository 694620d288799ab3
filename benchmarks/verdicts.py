"""How often is the check of a plan wrong? A zoo of tiny models, with the truth in float64.

    python benchmarks/verdicts.py                       # every model, writes the figures
    python benchmarks/verdicts.py --quick               # every sixth, prints the tables only
    python benchmarks/verdicts.py --only gpt2 --only t5

The truth of a split is a loop cut by hand in float64: its gradients and the whole's, over several
batches and optimizer steps, are equal within 1e-6 or they are not. The truth of another plan is its
own gradients in float64 beside the plain model's. A verdict is the harness's: on float32 models, on
the first batch, as in a real session. Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import faults
import torch
import zoo
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autofit import strategies
from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.strategies.base import AS_IS
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.harness.verification.plan_check import prove

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "explanation" / "verification.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
EQUAL = 1e-6
"""Relative difference of all gradients together up to which two ways are one, in float64."""
STEPS = 6
"""Optimizer steps over which the truth of a split is asked: a kink may lie a few steps away."""
COMPILED = 4
"""Of so many models one is compiled too, which takes most of the time."""

PLANS = {
    "micro-batch 2 of 8": {"micro_batch": "2"},
    "micro-batch 3 of 8": {"micro_batch": "3"},
    "checkpointing": {"checkpointing": "all"},
    "bf16": {"precision": "bf16"},
    "compile (aot_eager)": {"compile": "full"},
}
PRECISIONS = ("float32", "autocast")


class _Bystander:
    """Takes every notice of the seams, and runs the backward passes it is given."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: args[-1]() if name == "backward" else None


def rooted(module: nn.Module) -> HarnessRoot:
    """Return a module as the harness holds it."""
    return HarnessRoot(module, Seams(_Bystander()), Calls(), lambda *_: False)


@dataclass(frozen=True, slots=True)
class Case:
    """A verdict and the truth; ``None`` where a plan does not apply to the model."""

    model: str
    plan: str
    precision: str
    truth: bool | None
    accepted: bool | None
    reason: str = ""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """Right or wrong, and how."""
        if self.accepted is None or self.truth is None:
            return "not applicable"
        if self.accepted == self.truth:
            return "rightly accepted" if self.truth else "rightly refused"
        return "falsely accepted" if self.accepted else "falsely refused"


# --- the truth -----------------------------------------------------------------------------------


def number(output: Any) -> torch.Tensor:
    """Return what a script would go backward through: the loss, or a mean over the answers."""
    found = getattr(output, "loss", None)
    if found is None:
        leaves = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        found = next(each for each in leaves if each.requires_grad)
    return found if found.ndim == 0 else found.tanh().square().mean()


def joined(outputs: list[Any], shares: list[float], dim: int) -> torch.Tensor:
    """Return the loss of the whole from the parts' outputs: rows put together, means weighted."""
    first = outputs[0]
    if isinstance(first, torch.Tensor) and first.ndim > 0:
        return number(torch.cat(outputs, dim))
    pairs = zip(outputs, shares, strict=True)
    return torch.stack([number(output) * share for output, share in pairs]).sum()


def doubled(value: Any) -> Any:
    """Return tensors of fractions in float64."""
    fraction = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if fraction else value


def cut(batch: zoo.Call, entry: zoo.Entry, start: int, stop: int) -> zoo.Call:
    """Return some samples of a batch."""

    def some(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim <= entry.dim:
            return value
        return value.narrow(entry.dim, start, stop - start)

    return {name: some(value) for name, value in batch.items()}


def counts(batch: zoo.Call, entry: zoo.Entry) -> list[float]:
    """Return how much each sample counts in the loss."""
    if entry.counts is None:
        return [1.0] * zoo.SAMPLES
    labels = batch[entry.counts]
    rows = labels[:, 1:] if entry.shifted else labels
    each: list[float] = (rows != entry.ignored).sum(1).tolist()
    return each


def gradients(*modules: nn.Module) -> torch.Tensor:
    """Return the gradients of modules that are copies of one, added up, in one vector."""
    total: list[torch.Tensor] = []
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        found = [p.grad for p in parameters if p.grad is not None]
        total.append(sum(found, torch.zeros_like(parameters[0])).flatten())
    return torch.cat(total).double()


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative difference of two vectors."""
    norm = float(expected.norm())
    return float((found - expected).norm()) / norm if norm else float(found.norm())


def in_double(entry: zoo.Entry) -> nn.Module:
    """Return a model in float64, without the kernels that know less alone."""
    torch.manual_seed(1)
    model: Any = entry.make()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    wide: nn.Module = model.double()
    return wide


def state(module: nn.Module) -> list[torch.Tensor]:
    """Return what a module remembers in fractions: buffers, tensors among its attributes."""
    held = [leaf for each in module.modules() for leaf in tree_leaves(dict(vars(each)))]
    tensors = [*module.buffers(), *(leaf for leaf in held if isinstance(leaf, torch.Tensor))]
    return [t.detach().clone() for t in tensors if t.is_floating_point()]


def may_split(entry: zoo.Entry, size: int) -> bool:
    """Return whether a loop cut by hand is the same training, step after step."""
    if entry.truth is not None:
        return entry.truth
    model = in_double(entry)
    batches = [tree_map(doubled, entry.batch()) for _ in range(zoo.BATCHES)]
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    bounds = [*range(0, zoo.SAMPLES, size), zoo.SAMPLES]
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        each = counts(batch, entry)
        total = 1.0 if entry.summed else sum(each)
        ranges = list(pairwise(bounds))
        parts = [copy.deepcopy(model) for _ in ranges]
        optimizer.zero_grad()
        number(model(**batch)).backward()
        outputs = [p(**cut(batch, entry, *r)) for p, r in zip(parts, ranges, strict=True)]
        shares = [1.0 if entry.summed else sum(each[slice(*r)]) / total for r in ranges]
        joined(outputs, shares, entry.dim).backward()
        if apart(gradients(*parts), gradients(model)) > EQUAL:
            return False
        one, other = state(model), state(parts[-1])
        if not all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(one, other)):  # noqa: B905
            return False
        optimizer.step()
    return True


def keeps(entry: zoo.Entry, plan: Plan) -> bool | None:
    """Return whether a plan that does not round gives the plain gradients, in float64."""
    plain = in_double(entry)
    batch = tree_map(doubled, entry.batch())
    ours = copy.deepcopy(plain)
    root = rooted(ours)
    root.facts = describe(ours, (), batch)
    assert root.facts is not None
    if "checkpointing" in plan.levels and not root.facts.blocks and not root.facts.transformers:
        return None
    root.apply(plan)
    for forward in (lambda: plain(**batch), lambda: root.running(**batch)):
        torch.manual_seed(2)
        number(forward()).backward()  # type: ignore[no-untyped-call]
    same = apart(gradients(ours), gradients(plain)) <= EQUAL
    pairs = zip(ours.buffers(), plain.buffers(), strict=True)
    same = same and all(torch.allclose(a, b) for a, b in pairs)
    root.take_back()
    return same


def truth_of(entry: zoo.Entry, plan: Plan, precision: str) -> bool | None:
    """Return whether a plan is the same training, but for rounding; ``None`` where none runs."""
    if precision == "autocast" and runs_in_bf16(entry) is None:
        return None  # the script itself does not run on this machine
    if plan["micro_batch"] != AS_IS:
        return may_split(entry, int(plan["micro_batch"]))
    if plan["precision"] != AS_IS:
        return runs_in_bf16(entry)  # it rounds; what is wrong in it is told by the faults
    return keeps(entry, plan)


def runs_in_bf16(entry: zoo.Entry) -> bool | None:
    """Return ``True`` where autocast itself has kernels for the model on this machine."""
    torch.manual_seed(1)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            number(entry.make()(**entry.batch())).backward()
    except RuntimeError:
        return None
    return True


# --- the verdict ---------------------------------------------------------------------------------


def around(precision: str) -> AbstractContextManager[Any]:
    """Return the script's own context around each call."""
    on = precision == "autocast"
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else nullcontext()


def of_split(entry: zoo.Entry, precision: str, size: int) -> tuple[bool, str]:
    """Return whether the split is accepted, as a session asks when it meets a root."""
    torch.manual_seed(1)
    model = entry.make()
    batches = [entry.batch() for _ in range(zoo.BATCHES)]
    plain = copy.deepcopy(model)
    root = rooted(model)
    root.facts = describe(model, (), batches[0])
    assert root.facts is not None
    with around(precision):
        try:
            root.splits.layout(Batch.of((), without_cache(model, batches[0])))
        except Refused as refusal:
            return False, str(refusal)
    if precision == "autocast" or entry.truth is not None:
        return True, ""
    root.apply(Plan.of({"micro_batch": str(size)}))
    for batch in batches:  # ... and does as it was found
        model.zero_grad()
        plain.zero_grad()
        number(plain(**batch)).backward()
        number(root.running(**batch)).backward()
        if (error := apart(gradients(model), gradients(plain))) > 1e-2:
            return True, f"a split step was off by {error:.1e}"
    return True, ""


def of_plan(entry: zoo.Entry, plan: Plan, precision: str) -> tuple[bool | None, str]:
    """Return whether a plan is accepted; ``None`` where it does not apply."""
    torch.manual_seed(1)
    model, batch = entry.make(), entry.batch()
    root = rooted(model)
    root.facts = describe(model, (), batch)
    assert root.facts is not None
    facts = Facts(roots=(root.facts,), autocast=precision == "autocast")
    for strategy, level in plan:
        if reason := strategy.inapplicable(level, facts):
            return (None if strategy.name == "precision" else False), reason
    with around(precision):
        try:
            prove(root, plan, (), without_cache(model, batch), facts)
        except Refused as refusal:
            return False, str(refusal)
    return True, ""


def judged(entry: zoo.Entry, compiles: bool) -> Iterator[Case]:
    """Yield the verdicts on one model."""
    true: Callable[..., bool | None] = functools.cache(truth_of)
    for name, levels in PLANS.items():
        plan = Plan.of(levels)
        if "compile" in levels and not compiles:
            continue
        for precision in PRECISIONS:
            begun = time.perf_counter()
            truth: bool | None
            accepted: bool | None
            try:
                if "micro_batch" in levels:
                    accepted, reason = of_split(entry, precision, int(levels["micro_batch"]))
                else:
                    accepted, reason = of_plan(entry, plan, precision)
            except Exception as error:  # noqa: BLE001
                accepted, reason = False, f"died: {type(error).__name__}: {error}"
            seconds = time.perf_counter() - begun
            try:
                truth = true(entry, plan, precision)
            except Exception as error:  # noqa: BLE001
                truth, reason = None, f"no truth: {type(error).__name__}: {error}"
            if accepted and truth and reason:
                truth = False  # the split that was found is not the one that is right
            yield Case(entry.name, name, precision, truth, accepted, reason[:300], seconds)


# --- processes -----------------------------------------------------------------------------------


def apart_from_here(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns in a process of its own, as JSON has it; ``None`` if it dies."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        warnings.simplefilter("ignore")
        try:
            with os.fdopen(writer, "w") as pipe:
                json.dump(run(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def of_model(entry: zoo.Entry, compiles: bool) -> list[Case]:
    """Return the verdicts on one model, made in a process of its own."""

    def run() -> list[dict[str, Any]]:
        strategies.compile.SETTINGS = {"backend": "aot_eager"}
        return [asdict(case) for case in judged(entry, compiles)]

    found = apart_from_here(run)
    if found is None:
        return [Case(entry.name, "all", "all", True, False, "the process died")]
    return [Case(**each) for each in found]


# --- figures -------------------------------------------------------------------------------------

KINDS = ("rightly accepted", "rightly refused", "falsely refused", "falsely accepted")


def table(cases: list[Case]) -> Iterator[str]:
    """Yield the matrix as lines of Markdown, then the wrong verdicts by name."""
    models = len({case.model for case in cases})
    yield f"{models} models, {len(cases)} verdicts; a plan that does not apply is left out."
    yield ""
    yield "| plan | precision | " + " | ".join(KINDS) + " |"
    yield "|---|---|" + "---|" * len(KINDS)
    totals: Counter[str] = Counter()
    for plan in PLANS:
        for precision in PRECISIONS:
            row = Counter(c.kind for c in cases if (c.plan, c.precision) == (plan, precision))
            if not sum(row[kind] for kind in KINDS):
                continue
            totals += row
            yield f"| {plan} | {precision} | " + " | ".join(str(row[k]) for k in KINDS) + " |"
    yield "| **all** | | " + " | ".join(f"**{totals[kind]}**" for kind in KINDS) + " |"
    right = totals["rightly accepted"] + totals["falsely refused"]
    share = totals["falsely refused"] / right if right else 0.0
    yield ""
    yield f"Of what is right {share:.1%} is refused."
    yield ""
    for case in cases:
        unknown = case.reason.startswith("no truth")
        if case.kind.startswith("falsely") or unknown:
            kind = "truth unknown" if unknown else case.kind
            yield f"- {case.model}, {case.plan}, {case.precision}: {kind}. {case.reason}"


def of_faults(found: list[faults.Found]) -> Iterator[str]:
    """Yield a table of the deliberate faults."""
    yield "| fault | plan | models | refused |"
    yield "|---|---|---|---|"
    for name, plan in dict.fromkeys((each.fault, each.plan) for each in found):
        row = [each for each in found if (each.fault, each.plan) == (name, plan)]
        missed = [each.model for each in row if not each.refused]
        names = f": not {'; '.join(missed)}" if missed else ""
        yield f"| {name} | {plan} | {len(row)} | {len(row) - len(missed)}{names} |"


def main() -> None:
    """Run the zoo and the faults, print the tables, and write them to the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every sixth model, nothing compiled")
    parser.add_argument("--only", action="append", help="the models with this name")
    parser.add_argument("--output", type=Path, help="write the verdicts as JSON here")
    parser.add_argument("--page", action="store_true", help="write the tables to the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    import_module("torch._inductor.compile_fx")
    of_split(zoo.ZOO["gpt2"], "autocast", 2)  # what is imported late is imported once
    cases: list[Case] = []
    for index, entry in enumerate(zoo.entries(options.quick)):
        if options.only and entry.name not in options.only:
            continue
        begun = time.perf_counter()
        cases += of_model(entry, not options.quick and index % COMPILED == 0)
        seconds = time.perf_counter() - begun
        sys.stderr.write(f"{entry.name}: {seconds:.1f} s\n")
    found = [] if options.only else faults.all_found(rooted, apart_from_here, quick=options.quick)
    text = "\n".join([*table(cases), "", *of_faults(found)])
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    if options.page:
        page = PAGE.read_text()
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    wrong = any(case.kind == "falsely accepted" for case in cases)
    raise SystemExit(wrong or not all(each.refused for each in found))


if __name__ == "__main__":
    main()
