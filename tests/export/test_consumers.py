"""The settings for other programs, read by these programs themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.analysis.result import Result
from autofit.export import as_trainer, lost, render
from autofit.launch_lines.parse import read_accelerate
from autofit.plan import Plan
from autofit.strategies import Facts, Hardware

MakeResult = Callable[..., Result]
CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
GPU = Hardware(device="cuda", name="NVIDIA H200", total_bytes=1 << 37)
ADAMW = Facts(optimizers=("AdamW",), framework="transformers")
TUNED = Plan.of(
    {
        "precision": "bf16",
        "checkpointing": "all",
        "optimizer": "fused",
        "micro_batch": "8",
        "data_loading": "workers",
    }
)
SHARDED = Plan.of({"ranks": "4", "precision": "bf16"})


@pytest.fixture
def exported(make_result: MakeResult, tmp_path: Path) -> Callable[..., Path]:
    """Return what writes a plan in a format to a file."""

    def export(form: str, plan: Plan, **changed: Any) -> Path:
        file = tmp_path / "exported"
        file.write_text(render(form, make_result(plan, **changed)))
        return file

    return export


# --- accelerate -------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("level", "reshard"),
    [("full", True), ("zero2", False), ("hybrid", True), ("full_offload", True)],
)
def test_accelerate_shards_by_fsdp2(
    level: str, reshard: bool, exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    file = exported("accelerate", SHARDED.replace(sharding=level), hardware=GPU)
    found = read_accelerate(["--config_file", str(file), "train.py"])
    assert found.ranks == 4
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, reshard)
    offloads = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    assert offloads == (level == "full_offload")
    if level == "hybrid":
        config = ParallelismConfig()
        assert (config.dp_replicate_size, config.dp_shard_size) == (2, 2)


@pytest.mark.quick
def test_accelerate_shards_the_optimizer_by_deepspeed(exported: Callable[..., Path]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    plan = SHARDED.replace(sharding="zero1")
    file = exported("accelerate", plan, hardware=GPU)
    config = load_config_from_file(str(file))
    assert config.distributed_type == "DEEPSPEED"
    assert config.num_processes == 4
    assert config.deepspeed_config["zero_stage"] == 1
    assert "# Change in the script: each process takes 4 samples a batch" in file.read_text()


# --- deepspeed --------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("level", "stage"), [("zero1", 1), ("zero2", 2), ("full", 3), ("full_offload", 3)]
)
def test_deepspeed_reads_the_config(
    level: str, stage: int, exported: Callable[..., Path], make_result: MakeResult
) -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    plan = SHARDED.replace(sharding=level)
    found = HfDeepSpeedConfig(str(exported("deepspeed", plan)))
    assert found.get_value("zero_optimization.stage") == stage
    assert found.is_zero3() == (stage == 3)
    assert found.is_offload() == (level == "full_offload")
    assert found.get_value("torch_autocast.dtype") == "bfloat16"
    sizes = [json.loads(render("deepspeed", make_result(plan)))[name] for name in SIZES]
    assert sizes[0] == 4 * sizes[1] * sizes[2] == 16
    assert lost("deepspeed", make_result(SHARDED.replace(sharding="hybrid"))) == (
        "sharding hybrid (not by hand in a few lines: autofit run applies it)",
    )


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.full
def test_deepspeed_itself_reads_the_config(exported: Callable[..., Path]) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig  # type: ignore[import-not-found]

    plan = Plan.of({"precision": "bf16", "micro_batch": "8"})
    found = DeepSpeedConfig(str(exported("deepspeed", plan)))
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (16, 2)
    assert found.torch_autocast_enabled


# --- trainer ----------------------------------------------------------------------------------


def arguments_of(file: Path, **more: Any) -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    with file.open("a") as lines:
        lines.writelines(f"{name}: {json.dumps(value)}\n" for name, value in more.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # no deprecated field
        parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
        (found,) = parser.parse_yaml_file(str(file))
    return found


@pytest.mark.full
def test_trainer_takes_the_fields(exported: Callable[..., Path], tmp_path: Path) -> None:
    file = exported("trainer", TUNED, hardware=CPU, facts=ADAMW)
    assert "has no setting" not in file.read_text()
    found = arguments_of(file, output_dir=str(tmp_path))
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (8, 2)
    assert (found.bf16, found.gradient_checkpointing) == (True, True)
    assert (str(found.optim.value), found.dataloader_num_workers) == ("adamw_torch_fused", 4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("level", "reshard"), [("full", True), ("zero2", False), ("full_offload", True)]
)
def test_trainer_shards_by_fsdp2(
    level: str, reshard: bool, exported: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.of({"ranks": "4", "sharding": level, "checkpointing": "all"})
    found = arguments_of(exported("trainer", plan, facts=ADAMW), output_dir=str(tmp_path))
    assert found.per_device_train_batch_size == 4
    plugin = found.fsdp_plugin_args
    assert (plugin["fsdp_version"], plugin["reshard_after_forward"]) == (2, reshard)
    assert plugin["activation_checkpointing"] is True
    assert plugin.get("cpu_offload", False) == (level == "full_offload")


@pytest.mark.full
def test_trainer_fills_in_deepspeeds_config(make_result: MakeResult, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    plan = Plan.of({"ranks": "4", "sharding": "zero1"})
    own = as_trainer.settings(make_result(plan, facts=ADAMW)).fields
    read: Any = HfTrainerDeepSpeedConfig  # not annotated
    config = read(own.pop("deepspeed"))
    config.trainer_config_process(TrainingArguments(output_dir=str(tmp_path), **own))
    assert config.get_value("train_micro_batch_size_per_gpu") == 4
    assert config.get_value("zero_optimization.stage") == 1
    assert config.mismatches == []


@pytest.mark.quick
@pytest.mark.parametrize("facts", [Facts(optimizers=("SGD",)), None], ids=["SGD", "unknown"])
@pytest.mark.parametrize("level", ["fused", "eight_bit"])
def test_trainer_never_changes_the_optimizers_class(
    level: str, facts: Facts | None, make_result: MakeResult
) -> None:
    result = make_result(Plan.of({"optimizer": level}), facts=facts)
    (told,) = lost("trainer", result)
    assert told.startswith(f"optimizer {level} (by hand: make the optimizer ")
    assert told.endswith(", and pass it in Trainer(optimizers=(optimizer, None)))")
    assert "\noptim:" not in render("trainer", result, partial=True)


# --- lightning --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "strategy"),
    [
        (Plan.of({"precision": "bf16", "micro_batch": "8"}), "SingleDeviceStrategy"),
        (SHARDED.replace(precision="as_is"), "DDPStrategy"),
    ],
    ids=["one", "four ranks"],
)
def test_lightning_takes_the_arguments(
    plan: Plan, strategy: str, exported: Callable[..., Path], tmp_path: Path
) -> None:
    import lightning

    names: dict[str, Any] = {}
    exec(exported("lightning", plan, hardware=CPU).read_text(), names)
    quiet: dict[str, Any] = {
        "logger": False,
        "default_root_dir": tmp_path,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(**names["ARGUMENTS"], **quiet)
    assert type(trainer.strategy).__name__ == strategy
    assert trainer.accumulate_grad_batches == (2 if "micro_batch" in dict(plan.changes) else 1)
    assert trainer.precision == ("bf16-mixed" if plan["precision"] == "bf16" else "32-true")


@pytest.mark.full
@pytest.mark.parametrize("level", ["zero1", "zero2", "full", "hybrid", "full_offload"])
def test_lightning_has_the_strategy(level: str, exported: Callable[..., Path]) -> None:
    if level == "zero1" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("Lightning's DeepSpeedStrategy imports deepspeed")
    names: dict[str, Any] = {}
    exec(exported("lightning", SHARDED.replace(sharding=level)).read_text(), names)
    assert names["ARGUMENTS"]["devices"] == 4
    own = names["ARGUMENTS"]["strategy"]
    if level != "zero1":
        kinds = {"zero2": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}
        assert own.sharding_strategy.name == kinds.get(level, "FULL_SHARD")
        assert own.cpu_offload.offload_params == (level == "full_offload")


@pytest.mark.full
def test_lightnings_callback_sets_what_trainer_has_no_argument_for(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    """Also under mixed precision and clipping, where Lightning refuses ``fused=True``."""
    import lightning
    import torch

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            parts = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)]
            self.net = torch.nn.Sequential(*parts)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    plan = Plan.of(
        {"precision": "bf16", "checkpointing": "2", "optimizer": "fused", "micro_batch": "8"}
    )
    names: dict[str, Any] = {}
    exec(exported("lightning", plan, hardware=CPU).read_text(), names)
    rows: Any = torch.randn(32, 4)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=8)

    def fit(model: Net, epochs: int, saved: Path | None = None) -> Any:
        arguments = {**names["ARGUMENTS"], "callbacks": [names["Planned"]()]}
        trainer = lightning.Trainer(
            **arguments,
            max_epochs=epochs,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, loader, ckpt_path=saved)
        return trainer

    model = Net()
    trainer = fit(model, 1)
    assert trainer.global_step == 2
    assert [group["fused"] for group in trainer.optimizers[0].param_groups] == [True]
    assert ["forward" in vars(each) for each in model.net] == [True, True, False]
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert fit(Net(), 2, tmp_path / "saved.ckpt").global_step == 4


@pytest.fixture(autouse=True)
def _environment_as_before() -> Any:
    """Undo what Trainer and Accelerate write into the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
