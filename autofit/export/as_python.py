"""Writes a Python module that does the same in plain PyTorch, for people to read and copy.

``Strategy.by_hand`` returns the code of each level. This module joins the parts into one training
step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from textwrap import dedent, indent

from autofit.analysis.result import Result
from autofit.export.carried import Carried
from autofit.plan import Plan
from autofit.strategies.base import ByHand
from autofit.strategies.inspection import blocks
from autofit.text import printable
from autofit.units import format_size

IMPORTS = """
from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
"""
"""Imports of a program that finds the repeated blocks of a model."""
AROUND = """
def inside(*args, forward={model}.forward, **kwargs):
    x = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
    with {context}:
        return forward(*args, **kwargs)

{model}.forward = inside
"""


def render(result: Result) -> str:
    """Return a module with ``prepare(model)`` and ``train_step(...)`` that only imports torch."""
    hands = [hand for strategy, level in result.plan if (hand := strategy.by_hand(level))]
    scaler = "scaler = torch.amp.GradScaler()" if any(hand.scaled for hand in hands) else ""
    by_blocks = any(hand.blocks for hand in hands)
    imports = IMPORTS.strip() if by_blocks else "import torch"
    top = "\n\n".join(filter(None, [_head(result), imports, scaler]))
    search = [block_search()] if by_blocks else []
    return "\n\n\n".join([top, *search, _prepare(result.plan), _train_step(hands)]) + "\n"


def settings(result: Result) -> Carried:
    """Return the strategies that a few lines of PyTorch express, or a comment above them."""
    found = Carried()
    for strategy, level in result.plan:
        if hand := strategy.by_hand(level):
            found.express(strategy.name)
            found.in_script += [] if hand.in_code else [hand.setting]
    return found


def around(context: str, model: str) -> str:
    """Return statements that put a context, written as ``ByHand.around``, around a forward."""
    lines = AROUND.format(context=context, model=model).strip("\n").splitlines()
    uses_x = "x." in context
    return "\n".join(line for line in lines if uses_x or not line.startswith("    x = "))


def block_search() -> str:
    """Return the functions that find the blocks, as a search has them."""
    source = inspect.getsource(blocks)
    functions = source[source.index("def repeated_blocks") :].strip()
    return functions.replace("    from torch import nn\n\n", "")


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
        yield "blocks = repeated_blocks(model)"
    for (strategy, level), hand in zip(plan, hands, strict=True):
        if hand is None:
            summary = strategy.level(level).summary
            yield f"# {strategy.describe(level)} ({summary}) takes more than a few lines by hand:"
            yield f"# see {strategy.source}"
        elif hand.prepare:
            yield dedent(hand.prepare).strip("\n")
        elif not hand.in_code:
            yield f"# By hand: {hand.setting}"


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
