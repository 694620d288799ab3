"""Writes a config file for ``accelerate launch --config_file`` with Accelerate's own class.

Only scripts that make an ``Accelerator`` read it. Comments at its top name the levels that it
cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autofit.analysis.result import Result
from autofit.export.header import comments, launched_with

FSDP = "ACCELERATE_USE_FSDP"
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
RENAMED = {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}
"""Keys of the config file for variables that have another name, in lower case."""


def render(result: Result) -> str:
    """Return the file's text, with comments at its top; imports Accelerate."""
    import tempfile

    from accelerate.commands.config.config_args import ClusterConfig

    launched = launched_with(result)
    settings, expressed = _settings(result, launched)
    config = ClusterConfig(**settings)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        config.to_yaml_file(str(file))
        text = file.read_text(encoding="utf-8")
    notes = [*comments(result, "Accelerate", expressed), *_notes(result, launched)]
    return "\n".join([*notes, text.rstrip("\n")]) + "\n"


def _settings(result: Result, launched: dict[str, str]) -> tuple[dict[str, Any], set[str]]:
    """Return the fields, and the strategies whose levels they express."""
    plan, expressed = result.plan, {"allocator"}
    precision = launched.get("ACCELERATE_MIXED_PRECISION", "no")
    if plan["precision"] in ("bf16", "fp16"):
        precision = plan["precision"]
        expressed.add("precision")
    dynamo: dict[str, Any] = {}
    if plan["compile"] in ("regional", "full"):
        regional = plan["compile"] == "regional"
        dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": regional}
        expressed.add("compile")
    fsdp = _fsdp(launched) if FSDP in launched else None
    if fsdp is not None and plan["checkpointing"] == "all":
        fsdp["fsdp_activation_checkpointing"] = True
        expressed.add("checkpointing")
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(result, launched),
        "mixed_precision": precision,
        "use_cpu": result.hardware.device == "cpu",
        "debug": False,
        "num_processes": result.ranks,
        "dynamo_config": dynamo,
        "fsdp_config": fsdp,
        "deepspeed_config": _deepspeed(launched) if DEEPSPEED in launched else None,
    }
    return fields, expressed


def _kind(result: Result, launched: dict[str, str]) -> str:
    """Return Accelerate's name for how the ranks train together."""
    if FSDP in launched:
        return "FSDP"
    if DEEPSPEED in launched:
        return "DEEPSPEED"
    if result.ranks == 1:
        return "NO"
    return "MULTI_CPU" if result.hardware.device == "cpu" else "MULTI_GPU"


def _fsdp(launched: dict[str, str]) -> dict[str, Any]:
    """Return the keys and values for the FSDP variables that Accelerate's launcher sets."""
    keys = {n.lower(): value for n, value in launched.items() if n.startswith("FSDP_")}
    return {RENAMED.get(key, key): _value(value) for key, value in keys.items()}


def _deepspeed(launched: dict[str, str]) -> dict[str, Any]:
    start = "ACCELERATE_DEEPSPEED_"
    keys = {
        name.removeprefix(start).lower(): value
        for name, value in launched.items()
        if name.startswith(start)
    }
    renamed = {"config_file": "deepspeed_config_file", "zero3_init": "zero3_init_flag"}
    return {renamed.get(key, key): _value(value) for key, value in keys.items()}


def _value(text: str) -> bool | int | str:
    """Return a variable's value with its type in YAML."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


def _notes(result: Result, launched: dict[str, str]) -> Iterator[str]:
    """Yield comments on levels that Accelerate implements in another way than autofit."""
    yield "# Only scripts that make an Accelerator read this file: accelerate launch --config_file."
    plan = result.plan
    if FSDP in launched and plan["precision"] == "bf16":
        yield "# Under FSDP Accelerate's bf16 gathers weights and reduces gradients in bf16 too."
    if plan["precision"] == "fp16":
        yield "# Losses are scaled by Accelerate's own scaler, not inside the model."
    if plan["compile"] in ("regional", "full"):
        yield "# Compiled dropout draws Inductor's own random numbers."
    if plan["micro_batch"] != "as_is":
        size, total = result.measurement.micro_batch, result.measurement.effective_batch
        yield f"# By hand: {size} samples a batch and gradients accumulated to {total} a step."
    if result.ranks > 1 and result.hardware.device == "cpu":
        yield "# On a CPU, accelerate launch starts one process; only MPI starts more."
