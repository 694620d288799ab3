"""Writes a patch of the script for a plan, as a unified diff: ``git apply plan.patch``.

The patch changes what a person would change. In a script with ``TrainingArguments`` or
``lightning.Trainer`` these are their arguments. In a plain loop these are the optimizer's and the
loader's arguments, statements on the model before the optimizer is made, and the forward pass.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from autofit.analysis.result import Result
from autofit.exceptions import UsageError
from autofit.export import as_lightning, as_trainer
from autofit.export.carried import Carried, comments
from autofit.export.source import Source
from autofit.plan import Plan
from autofit.strategies import AS_IS
from autofit.strategies.precision import AUTOCAST

WORKERS = 4
WHY = "the script does not show where"


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


def carried(result: Result) -> set[str]:
    """Return the names of the strategies that the patch applies."""
    return set() if result.plan.neutral else _patched(result)[2].strategies


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
            f"--format patch: {script.target} is started as a module; see --format python"
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
    found = Carried()
    if (call := source.call("TrainingArguments")) is not None:
        if any(each.arg is None for each in call.keywords):
            return text, text, found  # ** may hold the same arguments
        own = as_trainer.settings(result)
        own.fields.pop("use_cpu", None)
        source.set_keywords(call, {key: _python(value) for key, value in own.fields.items()})
        return text, source.text, own
    _precision(result, source, found)
    _loop(result, source, found)
    return text, source.text, found


def _python(value: object) -> str:
    """Return a value of JSON as Python, with double quotes."""
    text = json.dumps(value)
    return text.replace("true", "True").replace("false", "False").replace("null", "None")


def _precision(result: Result, source: Source, found: Carried) -> None:
    """Set the precision in the script's ``Trainer`` of Lightning, or in its ``Accelerator``."""
    call = source.call("Trainer") if source.imports("lightning", "pytorch_lightning") else None
    level = result.plan["precision"]
    if call is not None and level in as_lightning.PRECISIONS:
        source.set_keywords(call, {"precision": f'"{as_lightning.PRECISIONS[level]}"'})
        found.express("precision")
    call = source.call("Accelerator")
    if call is not None and level in AUTOCAST:
        source.set_keywords(call, {"mixed_precision": f'"{level}"'})
        found.express("precision")


def _loop(result: Result, source: Source, found: Carried) -> None:
    plan = result.plan
    optimizers = result.facts.optimizers if result.facts is not None else ()
    _loader(plan, source, found)
    if plan["zero_grad"] != AS_IS and (call := source.call("zero_grad")) is not None:
        source.set_keywords(call, {"set_to_none": "True"})
        found.express("zero_grad")
    size = int(plan["micro_batch"]) if plan["micro_batch"].isdecimal() else None
    made = source.optimizer(optimizers)
    if size and made is not None and source.train_in_chunks(made.model, size):
        found.express("micro_batch")
        found.notes.append("The loss must be a mean over the samples, as the search found it.")
    made = source.optimizer(optimizers)
    if made is None:
        return
    keywords = {"fused": {"fused": "True"}, "single": {"foreach": "False"}}
    if plan["optimizer"] in keywords:
        source.set_keywords(made.call, keywords[plan["optimizer"]])
        found.express("optimizer")
    statements = list(_on_model(result, source, made.model, found))
    source.before_optimizer(optimizers, "\n".join(statements))


def _loader(plan: Plan, source: Source, found: Carried) -> None:
    call = source.call("DataLoader")
    if plan["data_loading"] != AS_IS and call is not None:
        pinned = {"pin_memory": "True"} if plan["data_loading"] == "pinned" else {}
        source.set_keywords(call, {"num_workers": str(WORKERS), **pinned})
        found.express("data_loading")


def _on_model(result: Result, source: Source, model: str, found: Carried) -> Iterator[str]:
    """Yield the statements that change the model before its optimizer is made."""
    plan = result.plan
    blocks = source.blocks()
    of_hub = result.facts is not None and any(root.transformers for root in result.facts.roots)
    if plan["precision"] == "tf32":
        found.express("precision")
        yield 'torch.set_float32_matmul_precision("high")'
        yield "torch.backends.cudnn.allow_tf32 = True"
    if plan["memory_format"] != AS_IS:
        found.express("memory_format")
        yield f"{model}.to(memory_format=torch.channels_last)"
    level = plan["checkpointing"]
    if level == "all" and of_hub:
        found.express("checkpointing")
        yield f"{model}.gradient_checkpointing_enable()"
    elif blocks is not None and (level == "all" or level.isdecimal()):
        found.express("checkpointing")
        some = "" if level == "all" else f"[:{level}]"
        yield dedent(f"""\
            for block in {model}.{blocks}{some}:
                block.forward = functools.partial(
                    torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
                )""")
        source.import_("functools")
        source.import_("torch.utils.checkpoint")
    if plan["precision"] == "bf16" and "precision" not in found.strategies:
        # Around the loss, autocast would compute cross-entropy in bf16 on a GPU.
        found.express("precision")
        yield dedent(f"""\
            {model}.forward = accelerate.utils.convert_outputs_to_fp32(
                torch.autocast("{result.hardware.device}", dtype=torch.bfloat16)({model}.forward)
            )""")
        source.import_("accelerate.utils")
        source.import_("torch")
    if plan["compile"] == "full":
        found.express("compile")
        yield f"{model}.compile()"
    elif plan["compile"] == "regional" and blocks is not None:
        found.express("compile")
        yield f"for block in {model}.{blocks}:\n    block.compile()"
