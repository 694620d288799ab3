"""Writes fields of transformers' ``TrainingArguments`` as YAML.

Read them with ``HfArgumentParser(TrainingArguments).parse_yaml_file(...)``, or pass them as
``TrainingArguments(**fields)``.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from functools import cache

from autofit.analysis.result import Result
from autofit.export import as_deepspeed
from autofit.export.carried import Carried, comments, parts, samples_a_device
from autofit.strategies import Number
from autofit.strategies.base import ScriptPart

PARTS = {
    ScriptPart.MODEL: "before Trainer(model=...)",
    ScriptPart.OPTIMIZER: "and pass it in Trainer(optimizers=(optimizer, None))",
    ScriptPart.LOADER: "in Trainer.get_train_dataloader()",
    ScriptPart.STEP: "in Trainer.compute_loss()",
}
"""Where a script with a ``Trainer`` has what is set by hand."""


def render(result: Result) -> str:
    """Return ``field: value`` lines, with comments at the top."""
    found = settings(result)
    lines = [f"{name}: {json.dumps(value)}" for name, value in found.fields.items()]
    return (
        "\n".join([*comments(result, "Trainer has no setting for it", found), *(lines or ["{}"])])
        + "\n"
    )


def settings(result: Result) -> Carried:
    """Return the fields for the plan of ``result``."""
    found = Carried(parts=PARTS)
    if result.hardware.on_host:
        found.fields["use_cpu"] = True
    if result.facts is not None and result.facts.framework != "transformers":
        found.notes.append("The script has no Trainer: the fields are for a script that has one.")
    _batches(result, found)
    _ranks(result, found)
    found.express_settings("trainer", result, fsdp="fsdp_config" in found.fields)
    found.fields = {_as_installed(name): value for name, value in found.fields.items()}
    return found


def _batches(result: Result, found: Carried) -> None:
    chunks = parts(result)
    if chunks is not None:
        sizes = {
            "per_device_train_batch_size": result.measurement.micro_batch,
            "gradient_accumulation_steps": chunks,
        }
        found.express_number(Number.SAMPLES, sizes)
        found.notes.append("If the model takes any keyword, but does not divide its loss by")
        found.notes.append("  num_items_in_batch, set: trainer.model_accepts_loss_kwargs = False")
    elif result.plan.ranks > 1 and not result.plan.splits:
        found.fields["per_device_train_batch_size"] = samples_a_device(result)


def _ranks(result: Result, found: Carried) -> None:
    plan, shards = result.plan, result.plan.shards
    if plan.ranks > 1:
        found.express_number(Number.RANKS)
        found.notes.append(f"Start it with: torchrun --nproc-per-node {plan.ranks} SCRIPT")
    if shards is not None and not shards.weights:
        found.express_shards(plan, {"deepspeed": as_deepspeed.of_trainer(result)})
    elif shards is not None and shards.groups == 1:
        config = {"version": 2, "reshard_after_forward": shards.gathers_twice}
        if shards.on_host:
            config["cpu_offload"] = True
        found.express_shards(plan, {"fsdp": True, "fsdp_config": config})


def _as_installed(name: str) -> str:
    """Return the name of a field in the installed release, which may have renamed it."""
    new = name.replace("gradient_checkpointing", "activation_checkpointing")
    return new if new in _known_fields() else name


@cache
def _known_fields() -> frozenset[str]:
    """Return the fields of the installed ``TrainingArguments``; none without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return frozenset()
    from autofit.strategies.support.optimizers import bitsandbytes

    bitsandbytes()  # transformers imports it too, and would print its messages
    from transformers import TrainingArguments

    return frozenset(each.name for each in fields(TrainingArguments))
