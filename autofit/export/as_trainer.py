"""Writes fields of transformers' ``TrainingArguments`` as YAML.

Read them with ``HfArgumentParser(TrainingArguments).parse_yaml_file(...)``, or pass them as
``TrainingArguments(**fields)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autofit.analysis.result import Result
from autofit.export.header import comments
from autofit.strategies import AS_IS

OPTIMIZERS = {
    "fused": "adamw_torch_fused",
    "eight_bit": "adamw_bnb_8bit",
}
"""Values of ``optim`` for levels of ``optimizer``, if the script trains with AdamW."""
WORKERS = 4


def render(result: Result) -> str:
    """Return ``field: value`` lines, with comments at the top."""
    fields, expressed = _fields(result)
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    notes = [*comments(result, "Trainer", expressed), *_notes(fields)]
    return "\n".join([*notes, *(lines or ["{}"])]) + "\n"


def _fields(result: Result) -> tuple[dict[str, Any], set[str]]:
    """Return the fields, and the strategies whose levels they express."""
    plan, measured = result.plan, result.measurement
    fields: dict[str, Any] = {"use_cpu": True} if result.hardware.device == "cpu" else {}
    expressed = {"allocator"}

    def express(strategy: str, **new: Any) -> None:
        fields.update(new)
        expressed.add(strategy)

    parts, rest = divmod(measured.effective_batch, measured.micro_batch * result.ranks)
    if plan["micro_batch"] != AS_IS and not rest:
        express(
            "micro_batch",
            per_device_train_batch_size=measured.micro_batch,
            gradient_accumulation_steps=parts,
        )
    if plan["precision"] != AS_IS:
        express("precision", **{plan["precision"]: True})
    if plan["checkpointing"] == "all":
        kwargs = {"use_reentrant": False}
        express("checkpointing", gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    if plan["optimizer"] in OPTIMIZERS:
        express("optimizer", optim=OPTIMIZERS[plan["optimizer"]])
    if plan["compile"] == "full":
        express("compile", torch_compile=True)
    if plan["data_loading"] != AS_IS:
        pinned = plan["data_loading"] == "pinned"
        express("data_loading", dataloader_num_workers=WORKERS, dataloader_pin_memory=pinned)
    return fields, expressed


def _notes(fields: dict[str, Any]) -> Iterator[str]:
    """Yield comments on levels that Trainer implements in another way than autofit."""
    if "optim" in fields:
        yield "# optim: for a script that trains with AdamW, Trainer's default."
    if "fp16" in fields:
        yield "# fp16: losses are scaled by Trainer's own scaler, not inside the model."
    if "torch_compile" in fields:
        yield "# torch_compile: compiled dropout draws Inductor's own random numbers."
