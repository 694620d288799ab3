"""The patch applies with git, and changes what a person would change."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.analysis.result import Result
from autofit.exceptions import UsageError
from autofit.export import lost, render
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.strategies import Facts, Hardware
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.quick
MakeResult = Callable[..., Result]
CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=16)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
ALL = Plan.of(
    {
        "precision": "bf16",
        "checkpointing": "2",
        "optimizer": "fused",
        "micro_batch": "8",
        "compile": "regional",
        "data_loading": "pinned",
    }
)


@pytest.fixture
def patched(make_result: MakeResult, tmp_path: Path) -> Callable[..., str]:
    """Return what applies the patch for a plan to a script with git, and returns its new text."""

    def patch(text: str, plan: Plan, *, optimizer: str = "SGD", **more: Any) -> str:
        file = tmp_path / "train.py"
        file.write_text(text)
        script = Script(target="train.py", cwd=str(tmp_path))
        facts = Facts(optimizers=(optimizer,))
        result = make_result(plan, script=script, facts=facts, hardware=CPU)
        (tmp_path / "plan.patch").write_text(render("patch", result, **more))
        subprocess.run(["git", "apply", "plan.patch"], cwd=tmp_path, check=True)
        return file.read_text()

    return patch


def test_a_plain_loop_gets_the_whole_plan(patched: Callable[..., str]) -> None:
    found = patched(LOOP, ALL)
    compile(found, "train.py", "exec")
    assert "SGD(model.parameters(), lr=0.1, fused=True)" in found
    assert "DataLoader(data, batch_size=16, num_workers=4, pin_memory=True)" in found
    assert (
        """\
model.forward = accelerate.utils.convert_outputs_to_fp32(
    torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
)
for block in model.blocks[:2]:
    block.forward = functools.partial(
        torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
    )
for block in model.blocks:
    block.compile()
optimizer = """
        in found
    )
    assert found.endswith("""\
    optimizer.zero_grad()
    whole_batch, mean_loss = len(x), 0.0
    for x, y in zip(x.split(8), y.split(8), strict=True):
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss * (len(x) / whole_batch)
        loss.backward()
        mean_loss += loss.detach()
    loss = mean_loss
    optimizer.step()
    print(loss.item())
""")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loss.item()", "loss.item(), len(x)"),  # the last chunk would be counted
        ("for x, y in loader:", "while True:"),  # no loop that makes the batch
        ("loss = nn.functional.cross_entropy(model(x), y)", "loss = step(x, y)"),
        ("loss.backward()", "scaler.scale(loss).backward()"),
        ("loss.backward()", "accelerator.backward(loss)"),
    ],
)
def test_a_loop_that_cannot_be_split_is_not(
    before: str, after: str, make_result: MakeResult, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace(before, after))
    script = Script(target="train.py", cwd=str(tmp_path))
    facts = Facts(optimizers=("SGD",))
    result = make_result(ALL, script=script, facts=facts)
    assert any(each.startswith("micro_batch 8 (by hand: ") for each in lost("patch", result))
    with pytest.raises(UsageError, match=r"^--format patch cannot carry .*micro_batch 8"):
        render("patch", result)


def test_another_optimizer_is_not_touched(patched: Callable[..., str]) -> None:
    found = patched(LOOP, ALL.replace(compile="as_is"), optimizer="AdamW", partial=True)
    assert "SGD(model.parameters(), lr=0.1)" in found
    assert "fused" not in found


def test_the_arguments_of_trainer_are_changed(patched: Callable[..., str]) -> None:
    script = """\
from transformers import TrainingArguments

arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=options.size,
    max_steps=20,
)
"""
    plan = Plan.of({"micro_batch": "8", "optimizer": "fused", "compile": "full"})
    assert patched(script, plan, optimizer="AdamW").endswith("""\
    output_dir="out",
    per_device_train_batch_size=8,
    max_steps=20,
    gradient_accumulation_steps=2,
    optim="adamw_torch_fused",
    torch_compile=True,
)
""")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from lightning import Trainer\nTrainer(max_epochs=4)\n", "max_epochs=4, precision="),
        ("import lightning as L\nL.Trainer()\n", "L.Trainer(precision="),
    ],
)
def test_the_precision_of_lightning_is_set(
    before: str, after: str, patched: Callable[..., str]
) -> None:
    found = patched(before, Plan.of({"precision": "bf16"}))
    assert f'{after}"bf16-mixed")' in found


LIGHTNING = """\
import torch
import pytorch_lightning
from torch import nn
from torch.utils.data import DataLoader

class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def configure_optimizers(self):
        groups = [{"params": self.parameters()}]
        return torch.optim.SGD(self.parameters(), lr=0.1)

train = DataLoader(data, 16, shuffle=True)
other = DataLoader(data, 16)
pytorch_lightning.Trainer(max_epochs=4, precision="32").fit(Net(), train, other)
"""
ROW = Plan.of({"optimizer": "fused", "micro_batch": "8"})


def test_the_arguments_of_lightning_its_loader_and_its_optimizer_are_changed(
    patched: Callable[..., str],
) -> None:
    found = patched(LIGHTNING, ROW.replace(data_loading="workers"))
    assert "train = DataLoader(data, 8, shuffle=True, num_workers=4)\n" in found
    assert "other = DataLoader(data, 16)\n" in found
    assert 'Trainer(max_epochs=4, precision="32", accumulate_grad_batches=2).fit(' in found
    assert "SGD(self.parameters(), lr=0.1, fused=True)" in found


def test_an_optimizer_of_parameter_groups_is_changed(patched: Callable[..., str]) -> None:
    found = patched(LIGHTNING.replace("SGD(self.parameters()", "SGD(groups"), ROW)
    assert "SGD(groups, lr=0.1, fused=True)" in found


def test_a_strategy_of_lightning_is_of_the_scripts_own_package(
    patched: Callable[..., str],
) -> None:
    found = patched(LIGHTNING, Plan.of({"ranks": "4", "sharding": "full"}))
    assert "import pytorch_lightning.strategies\n" in found
    assert "strategy=pytorch_lightning.strategies.FSDPStrategy(" in found
    assert "train = DataLoader(data, 4, shuffle=True)" in found


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "Net(), train, other",
            "Net(), make_loader()",
            r"micro_batch 8 \(by hand: DataLoader\(batch_size=8\) for Trainer.fit\(\), and"
            r" Trainer\(accumulate_grad_batches=2\)\)",
        ),
        (
            'precision="32"',
            'precision="bf16-mixed", gradient_clip_val=1.0',
            r"optimizer fused \(by hand: take the callback of --format lightning, because",
        ),
        (
            "torch.optim.SGD(self.parameters(), lr=0.1)",
            "make_optimizer(self)",
            r"optimizer fused \(by hand: make the optimizer with fused=True, in"
            r" configure_optimizers\(\)\)",
        ),
    ],
)
def test_what_a_script_for_lightning_does_not_show_is_told(
    before: str, after: str, words: str, patched: Callable[..., str]
) -> None:
    with pytest.raises(UsageError, match=words):
        patched(LIGHTNING.replace(before, after), ROW)


@pytest.mark.parametrize(("root", "applies"), [("Net", True), ("Backbone", False)])
def test_statements_on_self_need_the_module_that_was_tuned(
    root: str, applies: bool, make_result: MakeResult, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    facts = RootFacts(name=root, parameters=1, parameter_bytes=4, trainable=1, dtype="float32")
    result = make_result(
        Plan.of({"checkpointing": "2", "attention": "flash"}),
        script=Script(target="train.py", cwd=str(tmp_path)),
        facts=Facts(optimizers=("SGD",), roots=(facts,)),
    )
    text = render("patch", result, partial=True)
    assert ("+        for block in self.blocks[:2]:" in text) == applies
    assert ("+        self.forward = inside" in text) == applies


def test_the_precision_of_an_accelerator_is_set(patched: Callable[..., str]) -> None:
    found = patched("import accelerate\na = accelerate.Accelerator()\n", Plan.of(BF16))
    assert 'Accelerator(mixed_precision="bf16")' in found


BF16 = {"precision": "bf16"}


def test_text_before_a_change_may_be_of_several_bytes(patched: Callable[..., str]) -> None:
    found = patched(LOOP.replace("lr=0.1", "**{'µ→é': 1}, lr=0.1"), Plan.of({"optimizer": "fused"}))
    assert "**{'µ→é': 1}, lr=0.1, fused=True)" in found


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": "missing.py"}, "cannot be read here: No such file or directory"),
        ({"target": "package", "module": True}, "package is started as a module"),
        ({"target": "broken.py"}, "cannot be read here: it is not Python"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused(
    changed: dict[str, Any], words: str, make_result: MakeResult, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("for\n")
    script = Script(cwd=str(tmp_path), **changed)
    with pytest.raises(UsageError, match=words):
        render("patch", make_result(ALL, script=script))
