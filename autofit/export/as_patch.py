"""Writes a patch of the script for a plan, as a unified diff: ``git apply plan.patch``.

The patch changes what a person would change. In a script with ``TrainingArguments`` or
``lightning.Trainer`` these are their arguments. In a plain loop these are the optimizer's and the
loader's arguments, statements on the model before the optimizer is made, and the forward pass.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from autofit.analysis.result import Result
from autofit.exceptions import UsageError
from autofit.export import as_accelerate, as_lightning, as_trainer
from autofit.export.as_python import around
from autofit.export.carried import Carried, comments, training_of
from autofit.export.source import Made, Source
from autofit.strategies import SPLIT, Number
from autofit.strategies.base import ByHand

WHY = "the script does not show where"
LOADER = ("dataset", "batch_size")
"""The positional arguments of a ``DataLoader`` that a plan may change."""
FUSED_AND_CLIPPED = (
    "take the callback of --format lightning, because Trainer(gradient_clip_val=...) refuses"
    " fused=True under mixed precision"
)


def render(result: Result) -> str:
    """Return the diff, below lines that say what it carries; ``git apply`` skips these.

    Raises ``UsageError`` if the script cannot be read here.
    """
    if result.plan.neutral:
        return f"# The plan is the script as it is: {result.script.target} needs no change.\n"
    before, after, found = _patched(result)
    name = os.path.relpath(_path(result), result.script.cwd)
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    return "\n".join(comments(result, WHY, found)) + "\n" + "".join(_ended(lines))


def settings(result: Result) -> Carried:
    """Return the strategies that the patch applies."""
    return Carried() if result.plan.neutral else _patched(result)[2]


def _ended(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a diff; the last line of a file may lack its end."""
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _path(result: Result) -> Path:
    return Path(result.script.cwd, result.script.target)


def _patched(result: Result) -> tuple[str, str, Carried]:
    """Return the script's text before and after, and what the change carries."""
    script = result.script
    if script.module:
        raise UsageError(
            f"--format patch: {script.target} is started as a module; use --format python"
        )
    try:
        text = _path(result).read_text(encoding="utf-8")
        source = Source(text)
    except (OSError, SyntaxError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not Python"
        raise UsageError(
            f"--format patch: {str(_path(result))!r} cannot be read here: {reason};"
            " see --format python"
        ) from error
    if (call := source.call("TrainingArguments")) is not None:
        if any(each.arg is None for each in call.keywords):
            return text, text, Carried(parts=as_trainer.PARTS)  # ** may hold the same arguments
        own = as_trainer.settings(result)
        own.fields.pop("use_cpu", None)
        source.set_keywords(call, {key: _python(value) for key, value in own.fields.items()})
        return text, source.text, own
    if source.lightning_trainer() is not None:
        found = _lightning(result, source)
    else:
        found = Carried()
        _accelerator(result, source, found)
        _chunks(result, source, found)
    _arguments(result, source, found)
    _model(result, source, found)
    return text, source.text, found


def _python(value: object) -> str:
    """Return a value of JSON as Python, with double quotes."""
    text = json.dumps(value)
    return text.replace("true", "True").replace("false", "False").replace("null", "None")


def _lightning(result: Result, source: Source) -> Carried:
    """Set the arguments of the script's ``lightning.Trainer``, and its loader's batch size."""
    own = as_lightning.arguments(result)
    call = source.lightning_trainer()
    if call is None or any(each.arg is None for each in call.keywords):
        return Carried(parts=own.parts)  # ** may hold the same arguments
    given = {each.arg for each in call.keywords}
    mixed = result.plan.autocast is not None or "precision" in given
    if mixed and "gradient_clip_val" in given:
        fused = [
            s.name for s, n in result.plan if (hand := s.by_hand(n)) and "fused" in hand.optimizer
        ]
        own.by_hand |= dict.fromkeys(fused, FUSED_AND_CLIPPED)
    size, splits = as_lightning.batch_size(result), SPLIT in own.strategies
    if size is not None and _set_batch_size(size, source):
        own.in_script.clear()
    elif splits:
        own.strategies.discard(SPLIT)
        own.in_script.clear()
        trainer = f"Trainer(accumulate_grad_batches={own.fields.pop('accumulate_grad_batches')})"
        own.by_hand[SPLIT] = f"DataLoader(batch_size={size}) for Trainer.fit(), and {trainer}"
    call = source.lightning_trainer()
    assert call is not None
    package = source.lightning_package()
    fields = {
        name: code.replace("lightning.pytorch.", package) for name, code in own.fields.items()
    }
    source.set_keywords(call, fields)
    if "(" in fields.get("strategy", ""):
        source.import_(f"{package}strategies")
    return own


def _set_batch_size(size: int, source: Source) -> bool:
    """Set the batch size of the training loader; return whether the script shows where."""
    call = source.training_loader()
    if call is None or any(each.arg in (None, "batch_sampler") for each in call.keywords):
        return False
    source.set_keywords(call, {"batch_size": str(size)}, LOADER)
    return True


def _accelerator(result: Result, source: Source, found: Carried) -> None:
    """Set the precision in the script's ``Accelerator``."""
    call = source.call("Accelerator")
    if call is None:
        return
    found.parts = as_accelerate.PARTS
    found.by_hand |= as_accelerate.accumulation(result)
    for strategy, level in result.plan:
        setting = strategy.setting(level, "accelerate", training_of(result))
        if setting is not None and (precision := setting.fields.get("mixed_precision")):
            source.set_keywords(call, {"mixed_precision": f'"{precision}"'})
            found.express(strategy.name)


def _chunks(result: Result, source: Source, found: Carried) -> None:
    """Train on chunks of the batch in a plain loop."""
    size = result.plan.chunk
    made = source.optimizer(_optimizers(result))
    if made is None or made.model is None or size is None:
        return
    if source.train_in_chunks(made.model, size):
        found.express_number(Number.SAMPLES)
        found.notes.append("The loss must be a mean over the samples, as the search found it.")


def _arguments(result: Result, source: Source, found: Carried) -> None:
    """Set arguments where the script makes its loader and optimizer."""
    hands = {s.name: hand for s, level in result.plan if (hand := s.by_hand(level)) is not None}
    for name, hand in hands.items():
        if hand.loader and (loader := source.training_loader()) is not None:
            source.set_keywords(loader, hand.loader, LOADER)
            found.express(name)
        made = source.optimizer(_optimizers(result))
        if hand.optimizer and made is not None and name not in found.by_hand:
            source.set_keywords(made.call, hand.optimizer)
            found.express(name)


def _model(result: Result, source: Source, found: Carried) -> None:
    """Insert the statements on the model above the one that makes its optimizer."""
    optimizers = _optimizers(result)
    made = source.optimizer(optimizers)
    if made is None or made.model is None:
        return
    if made.model == "self" and not _is_root(result, made):
        return  # the search has tuned another module
    statements = list(_on_model(result, source, made, found))
    source.before_optimizer(optimizers, "\n".join(statements))


def _optimizers(result: Result) -> tuple[str, ...]:
    return result.facts.optimizers if result.facts is not None else ()


def _is_root(result: Result, made: Made) -> bool:
    """Return whether the class whose method makes the optimizer is the only root."""
    roots = result.facts.roots if result.facts is not None else ()
    return {root.name for root in roots} == {made.within}


def _on_model(result: Result, source: Source, made: Made, found: Carried) -> Iterator[str]:
    """Yield the statements that change the model before its optimizer is made."""
    model = str(made.model)
    blocks = source.blocks(made.within if model == "self" else None)
    for strategy, level in result.plan:
        hand = strategy.by_hand(level)
        if hand is None or strategy.name in found.strategies:
            continue
        statements = strategy.statements(level, model, blocks, training_of(result))
        for line in _as_by_hand(hand, model) if statements is None else statements:
            found.express(strategy.name)
            if line.startswith("import "):
                source.import_(line.removeprefix("import "))
            else:
                yield line


def _as_by_hand(hand: ByHand, model: str) -> Iterator[str]:
    """Yield the lines that set a level on a model without regard to its blocks."""
    if hand.blocks or hand.scaled:
        return
    code = dedent(hand.prepare).strip("\n")
    yield from re.sub(r"\bmodel\b", model, code).splitlines()
    if hand.around:
        yield from around(hand.around, model).splitlines()
