"""Writes fields of transformers' ``TrainingArguments`` as YAML.

Read them with ``HfArgumentParser(TrainingArguments).parse_yaml_file(...)``, or pass them as
``TrainingArguments(**fields)``.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from functools import cache
from typing import Any

from autofit.analysis.result import Result
from autofit.export import as_deepspeed
from autofit.export.carried import Carried, comments, parts, samples_a_device
from autofit.strategies import AS_IS, get
from autofit.strategies.base import ScriptPart
from autofit.strategies.precision import AUTOCAST

OPTIMIZERS = {
    "fused": "adamw_torch_fused",
    "eight_bit": "adamw_bnb_8bit",
}
"""Values of ``optim`` for levels of ``optimizer``. Trainer has them for AdamW only."""
RESHARDED = {"zero2": False, "full": True, "full_offload": True}
"""For levels of ``sharding``: whether FSDP2 frees weights after their forward."""

PARTS = {
    ScriptPart.MODEL: "before Trainer(model=...)",
    ScriptPart.OPTIMIZER: "and pass it in Trainer(optimizers=(optimizer, None))",
    ScriptPart.LOADER: "in Trainer.get_train_dataloader()",
    ScriptPart.STEP: "in Trainer.compute_loss()",
}
"""Where a script with a ``Trainer`` has what is set by hand."""
LIGER = (
    "TrainingArguments(use_liger_kernel=True), if liger-kernel is installed and knows the model;"
    " liger_kernel_config chooses its kernels"
)


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
    plan, found = result.plan, Carried(parts=PARTS, by_hand={"loss": LIGER})
    if result.hardware.device == "cpu":
        found.fields["use_cpu"] = True
    if result.facts is not None and result.facts.framework != "transformers":
        found.notes.append("The script has no Trainer: the fields are for a script that has one.")
    _batches(result, found)
    _ranks(result, found)
    if plan["precision"] != AS_IS:
        found.express("precision", {plan["precision"]: True})
        if plan["precision"] == "fp16":
            found.notes.append("fp16: Trainer's own scaler scales the loss, not the model's call.")
        if plan["precision"] in AUTOCAST:
            found.notes.append(
                "The Trainer keeps a 16-bit copy of all weights until it has the loss,"
            )
            found.notes.append("  so the peak may be higher than the one above.")
    if plan["checkpointing"] == "all":
        found.express("checkpointing", _checkpointing(found))
    if plan["optimizer"] in OPTIMIZERS and _adamw(result):
        found.express("optimizer", {"optim": OPTIMIZERS[plan["optimizer"]]})
    if plan["compile"] == "full":
        found.express("compile", {"torch_compile": True})
        found.notes.append("torch_compile: compiled dropout draws Inductor's own random numbers.")
    if (hand := get("data_loading").by_hand(plan["data_loading"])) and plan[
        "data_loading"
    ] != AS_IS:
        workers, pinned = int(hand.loader["num_workers"]), "pin_memory" in hand.loader
        loader = {"dataloader_num_workers": workers, "dataloader_pin_memory": pinned}
        found.express("data_loading", loader)
    return found


def _adamw(result: Result) -> bool:
    """Return whether the script is known to train with AdamW alone."""
    return result.facts is not None and set(result.facts.optimizers) == {"AdamW"}


def _batches(result: Result, found: Carried) -> None:
    chunks = parts(result)
    if chunks is not None:
        sizes = {
            "per_device_train_batch_size": result.measurement.micro_batch,
            "gradient_accumulation_steps": chunks,
        }
        found.express("micro_batch", sizes)
        found.notes.append("If the model takes any keyword, but does not divide its loss by")
        found.notes.append("  num_items_in_batch, set: trainer.model_accepts_loss_kwargs = False")
    elif result.plan["ranks"] != AS_IS and result.plan["micro_batch"] == AS_IS:
        found.fields["per_device_train_batch_size"] = samples_a_device(result)


def _ranks(result: Result, found: Carried) -> None:
    plan = result.plan
    if plan["ranks"] != AS_IS:
        found.express("ranks")
        found.notes.append(f"Start it with: torchrun --nproc-per-node {plan['ranks']} SCRIPT")
    if plan["sharding"] == "zero1":
        found.express("sharding", {"deepspeed": as_deepspeed.of_trainer(result)})
    if plan["sharding"] in RESHARDED:
        again = RESHARDED[plan["sharding"]]
        config = {"version": 2, "reshard_after_forward": again}
        if plan["sharding"] == "full_offload":
            config["cpu_offload"] = True
        found.express("sharding", {"fsdp": True, "fsdp_config": config})


def _checkpointing(found: Carried) -> dict[str, Any]:
    """Return the fields that checkpoint every block, by the names of the installed release."""
    if "fsdp_config" in found.fields:
        config = {**found.fields["fsdp_config"], "activation_checkpointing": True}
        return {"fsdp_config": config}
    name = "activation" if "activation_checkpointing" in _known_fields() else "gradient"
    return {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": False}}


@cache
def _known_fields() -> frozenset[str]:
    """Return the fields of the installed ``TrainingArguments``; none without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return frozenset()
    from autofit.strategies.optimizer.bitsandbytes_kernels import bitsandbytes

    bitsandbytes()  # transformers imports it too, and would print its messages
    from transformers import TrainingArguments

    return frozenset(each.name for each in fields(TrainingArguments))
