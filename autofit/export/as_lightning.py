"""Writes a Python module with the arguments of ``lightning.Trainer``, and its strategy's object."""

from __future__ import annotations

from autofit.analysis.result import Result
from autofit.export.carried import Carried, comments, parts, samples_a_device
from autofit.strategies import AS_IS

PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Values of ``precision`` for the levels that Lightning has."""
SHARDED = {
    "zero1": "DeepSpeedStrategy(stage=1)",
    "zero2": 'FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")',
    "full": 'FSDPStrategy(sharding_strategy="FULL_SHARD")',
    "hybrid": 'FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, {half}))',
}
"""Lightning's strategy for each level of ``sharding``."""
TF32 = 'torch.set_float32_matmul_precision("high")\ntorch.backends.cudnn.allow_tf32 = True'


def render(result: Result) -> str:
    """Return the module's text: ``ARGUMENTS`` for ``lightning.Trainer(**ARGUMENTS)``."""
    found = settings(result)
    imports = []
    strategy = found.fields.get("strategy", "")
    if "(" in strategy:
        name = strategy.partition("(")[0]
        imports.append(f"from lightning.pytorch.strategies import {name}")
    if tf32 := result.plan["precision"] == "tf32":
        imports.append("import torch")
    lines = [f"    {name!r}: {_code(value)}," for name, value in found.fields.items()]
    return "\n".join(
        [
            *comments(result, "Lightning has no setting for it", found),
            *([*imports, ""] if imports else []),
            *([TF32, ""] if tf32 else []),
            "# lightning.Trainer(**ARGUMENTS, max_epochs=...)",
            "ARGUMENTS = {",
            *(line.replace("'", '"', 2) for line in lines),
            "}",
            "",
        ]
    )


def _code(value: object) -> str:
    """Return a value as Python; the text of a strategy's object is code already."""
    if isinstance(value, str):
        return value if "(" in value else f'"{value}"'
    return repr(value)


def carried(result: Result) -> set[str]:
    """Return the names of the strategies that the arguments express."""
    return settings(result).strategies


def settings(result: Result) -> Carried:
    """Return the arguments for the plan of ``result``; those with a parenthesis are code."""
    plan, found = result.plan, Carried()
    cpu = result.hardware.device == "cpu"
    found.fields |= {"accelerator": "cpu" if cpu else "gpu", "devices": result.devices}
    if plan["precision"] in PRECISIONS:
        found.express("precision", {"precision": PRECISIONS[plan["precision"]]})
    if plan["precision"] == "tf32":
        found.express("precision")
    if plan["precision"] == "fp16":
        found.notes.append("Lightning's own scaler scales the loss, not the model's call.")
    chunks = parts(result)
    if chunks is not None:
        found.express("micro_batch", {"accumulate_grad_batches": chunks})
    if plan["ranks"] != AS_IS:
        found.express("ranks", {"strategy": "ddp"})
    if plan["sharding"] in SHARDED:
        code = SHARDED[plan["sharding"]].format(half=result.devices // 2)
        found.express("sharding", {"strategy": code})
    if chunks is not None or plan["ranks"] != AS_IS:
        size = samples_a_device(result) if chunks is None else result.measurement.micro_batch
        found.in_script.append(f"the DataLoader of each process has batch_size={size}")
    return found
