"""Writes a Python module that does the same in plain PyTorch, for people to read and copy.

``Strategy.by_hand`` returns the code of each level. This module joins the parts into one training
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent, indent

from autofit.analysis.result import Result
from autofit.plan import Plan
from autofit.printable import printable
from autofit.strategies.base import ByHand
from autofit.units import format_size

BLOCKS = """
from collections import Counter

def kind(module):
    parts = [type(each) for each in module.children()]
    listed = isinstance(module, torch.nn.Sequential)
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) or len(parts) <= listed:
        return None
    return (type(module), *(parts if listed else ()))

def blocks_of(module, in_lists):  # in lists; else those that a module holds one by one
    here = not in_lists or isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    kinds = Counter(kind(each) for each in module.children())
    for each in module.children():
        inside = list(blocks_of(each, in_lists))
        block = here and kind(each) and kinds[kind(each)] > 1
        if in_lists:
            block = block and not isinstance(each, torch.nn.Sequential)
        else:
            within = sum(len(list(part.parameters())) for part in inside)
            block = block and within < 0.9 * len(list(each.parameters()))
        yield from [each] if block else inside

lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
alone = [each[0] for each in lists if len(each) == 1 and kind(each[0])]  # it may run several times
blocks = list(blocks_of(model, True)) or list(blocks_of(model, False)) or alone[:1]
"""
"""Code that finds the repeated blocks of a model, a short version of the search's own."""


def render(result: Result) -> str:
    """Return a module with ``prepare(model)`` and ``train_step(...)`` that only imports torch."""
    hands = [hand for strategy, level in result.plan if (hand := strategy.by_hand(level))]
    scaler = "scaler = torch.amp.GradScaler()" if any(hand.scaled for hand in hands) else ""
    top = "\n\n".join(filter(None, [_head(result), "import torch", scaler]))
    return "\n\n\n".join([top, _prepare(result.plan), _train_step(hands)]) + "\n"


def carried(result: Result) -> set[str]:
    """Return the names of the strategies that a few lines of PyTorch express."""
    return {strategy.name for strategy, level in result.plan if strategy.by_hand(level)}


def _head(result: Result) -> str:
    measured = result.measurement
    environment = "".join(f"\n    {k}={v}" for k, v in result.plan.environment.items())
    device = printable(result.hardware.name).replace("\\", "/").replace('"', "'")
    speed, peak = f"{measured.samples_per_second:.4g}", format_size(measured.peak_device)
    lines = [
        f'"""By hand, in plain PyTorch: {result.plan}.',
        "",
        f"Measured by autofit on {device}: {speed} samples/s, peak {peak}.",
        "If the model returns its loss, use that in place of `loss_of(output, y)`.",
        *([f"Set before Python starts:{environment}"] if environment else []),
        '"""',
    ]
    return "\n".join(lines)


def _prepare(plan: Plan) -> str:
    body = "\n".join(_statements(plan))
    head = '''\
        def prepare(model: torch.nn.Module) -> torch.nn.Module:
            """Change the model once, before training."""
        '''
    return dedent(head) + indent((body + "\n" if body else "") + "return model", "    ")


def _statements(plan: Plan) -> Iterator[str]:
    hands = [strategy.by_hand(level) for strategy, level in plan]
    if any(hand is not None and hand.blocks for hand in hands):
        yield BLOCKS.strip("\n")
    for (strategy, level), hand in zip(plan, hands, strict=True):
        if hand is None:
            summary = strategy.level(level).summary
            yield f"# {strategy.describe(level)} ({summary}) takes more than a few lines by hand:"
            yield f"# see {strategy.source}"
        elif hand.prepare:
            yield dedent(hand.prepare).strip("\n")


def _train_step(hands: list[ByHand]) -> str:
    around = [hand.around for hand in hands if hand.around]
    samples = next((hand.samples for hand in hands if hand.samples), None)
    scaled = any(hand.scaled for hand in hands)
    pad = "    " if around else ""
    cut = (
        "((inputs, targets),)"
        if samples is None
        else f"zip(inputs.split({samples}), targets.split({samples}), strict=True)"
    )
    output = "output.float()" if around else "output"
    lines = [
        "def train_step(model, optimizer, loss_of, inputs, targets):",
        '    """Take one optimizer step; return the mean loss. `loss_of` averages over samples."""',
        "    optimizer.zero_grad(set_to_none=True)",
        "    total = 0.0",
        f"    for x, y in {cut}:",
        *([f"        with {', '.join(around)}:"] if around else []),
        f"        {pad}output = model(x)",
        f"        loss = loss_of({output}, y) * len(x) / len(inputs)",
        "        scaler.scale(loss).backward()" if scaled else "        loss.backward()",
        "        total += loss.item()",
        *(
            ["    scaler.step(optimizer)", "    scaler.update()"]
            if scaled
            else ["    optimizer.step()"]
        ),
        "    return total",
    ]
    return "\n".join(lines)
