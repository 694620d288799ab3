"""``autofit explain``: sizes add up to the measured peak, and a leak is named by its line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import autofit
from autofit.cli import main
from autofit.exceptions import ScriptError, UsageError
from autofit.inspection.cards import MODELS
from autofit.inspection.document import explanation_document
from autofit.inspection.explanation import Explanation
from autofit.inspection.techniques import Basis
from autofit.plan import Plan
from autofit.text import printable
from autofit.view import explanation as view
from autofit.worker.records.inspection import TensorKind
from tests.inspection import by_hand
from tests.inspection.conftest import MODEL, WIDTH

PARAMETERS = 4 * (32 * WIDTH + WIDTH + WIDTH * 32 + 32)
"""Numbers of the model of four blocks."""


def shown(found: Explanation) -> str:
    """Return all that the command prints."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    for each in (*view.head(found), *view.tables(found)):
        console.print(printable(each) if isinstance(each, str) else each)
    return out.getvalue()


@pytest.fixture(scope="module")
def found(leaking: Path) -> Explanation:
    storage = leaking.with_name("none.db")
    return autofit.explain(leaking, cwd=leaking.parent, leak=True, storage=storage, quiet=True)


@pytest.mark.quick
def test_the_sum_by_kind_is_the_measured_peak(found: Explanation) -> None:
    assert sum(part.size for part in found.peak.parts) == found.peak.peak
    sizes = found.by_kind
    assert sizes[TensorKind.WEIGHTS] == 4 * PARAMETERS
    assert sizes[TensorKind.OPTIMIZER_STATE] == pytest.approx(8 * PARAMETERS, abs=100)
    activations = 4 * 64 * (2 * WIDTH + 2 * 32) * 4
    assert 0.3 * activations < sizes[TensorKind.ACTIVATIONS] < 1.2 * activations


@pytest.mark.quick
def test_each_part_has_a_module_and_a_line(found: Explanation) -> None:
    activations = [part for part in found.parts if part.kind is TensorKind.ACTIVATIONS]
    assert {part.module.split(".")[0] for part in activations} >= {"0", "1", "2", "3"}
    line = "loss = (model(x) - x).square().mean()"
    sources = {part.place.source for part in activations if part.place}
    assert sources <= {line, "return x + self.down(torch.relu(self.up(x)))"}
    weights = next(part for part in found.parts if part.kind is TensorKind.WEIGHTS)
    assert weights.place is not None
    assert weights.place.line.startswith("train.py:")


@pytest.mark.quick
def test_the_batches_that_a_script_accumulates_are_in_its_step(tmp_path: Path) -> None:
    accumulates = Path(__file__).parents[1] / "scripts" / "accumulation.py"  # four batches of 16
    found = autofit.explain(accumulates, cwd=tmp_path, storage=tmp_path / "none.db", quiet=True)
    assert "64 samples a step" in view.head(found)[0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("contrastive.py", "the model returns a number that its parts' outputs do not"),
        ("batch_norm.py", "BatchNorm"),
    ],
)
def test_a_batch_that_cannot_be_split_is_no_technique(
    tmp_path: Path, script: str, reason: str
) -> None:
    path = Path(__file__).parents[1] / "scripts" / script
    found = autofit.explain(path, cwd=tmp_path, storage=tmp_path / "none.db", quiet=True)
    assert all(each.plan["micro_batch"] == "as_is" for each in found.techniques)
    assert found.techniques
    assert f"the batch cannot be split: {reason}" in shown(found)
    assert reason in explanation_document(found)["unsplittable"]


@pytest.mark.quick
def test_the_leaking_line_is_named(found: Explanation) -> None:
    assert found.growths
    leak = found.growths[0]
    assert leak.holder == "the list kept"
    assert leak.held_at is not None
    assert leak.held_at.source == "kept.append(loss)"
    assert "kept.append(loss)" in shown(found)


@pytest.mark.quick
def test_a_sum_that_keeps_only_nodes_of_the_graph_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(MODEL.format(widths=[8], last="kept += loss").replace("kept = []", "kept = 0"))
    found = autofit.explain(path, leak=True, storage=tmp_path / "none.db", quiet=True)
    (leak,) = found.growths
    assert leak.holder == "the variable kept"
    assert leak.held_at is not None
    assert leak.held_at.source == "kept += loss"
    assert "nodes of the graph" in shown(found)


LIBRARY = """
def train(model, optimizer, batches):
    for x in batches:
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loss_of(model, x):
    return (model(x) - x).square().mean()
"""
CALLS_IT = """
import sys

import torch
from torch import nn

sys.path.insert(0, "lib/site-packages")
import loops

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))
optimizer = torch.optim.AdamW(model.parameters())
loops.train(model, optimizer, (torch.randn(512, 32) for _ in range(40)))
"""


def rows(printed: str) -> list[list[str]]:
    """Return the cells of each printed line; a row of a package's line keeps its indent."""
    return [re.split(r"(?<=\S)\s{2,}", line.rstrip()) for line in printed.splitlines()]


@pytest.mark.quick
def test_a_line_that_hides_a_library_is_told_by_the_librarys_lines(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "site-packages" / "loops"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(CALLS_IT)
    found = autofit.explain("train.py", cwd=tmp_path, storage=tmp_path / "none.db", quiet=True)
    printed = rows(shown(found))
    starts = [row[0] for row in printed]
    line = starts.index("train.py:13")
    below = [row for row in printed[line + 1 :] if row[0].startswith("  loops/__init__.py:")]
    (loss,) = [row for row in below if row[1] == "return (model(x) - x).square().mean()"]
    assert loss[0] == "  loops/__init__.py:11"
    assert "activations" in loss[2]
    assert any(row[1:3] == ["optimizer.step()", "optimizer state"] for row in below)
    modules = {row[0]: row[1:] for row in printed}
    assert modules["*"][:2] == ["3", "65.1 KiB"], "three modules, and their weights"
    parts = explanation_document(found)["parts"]
    assert {part["library_line"] for part in parts} >= {"loops/__init__.py:11"}


@pytest.mark.quick
def test_a_line_that_hides_nothing_stands_by_itself(found: Explanation) -> None:
    assert all(part.library is None for part in found.parts), "torch's own lines say little"
    assert not any(row[0].startswith("  ") for row in rows(shown(found)))


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=500, hidden_size=64, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=2,
)
ids = torch.randint(0, 500, (400, 64))
data = [{"input_ids": row, "labels": row} for row in ids]
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=16, max_steps=20, report_to=[],
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data)
trainer.train()
"""


@pytest.mark.full
def test_a_trainer_is_told_by_module_and_by_the_lines_of_its_packages(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TRAINER)
    found = autofit.explain("train.py", cwd=tmp_path, storage=tmp_path / "none.db", quiet=True)
    printed = rows(shown(found))
    assert any(row[0].startswith("model.layers.*.mlp") for row in printed)
    (hidden,) = [row for row in printed if row[1:2] == ["trainer.train()"]]
    below = [row for row in printed[printed.index(hidden) :] if row[0].startswith("  ")]
    assert any("transformers/models/llama/modeling_llama.py" in row[0] for row in below)
    assert any("self.mlp" in row[1] or "down_proj" in row[1] for row in below)


@pytest.mark.quick
def test_techniques_and_cards(found: Explanation) -> None:
    levels = [dict(each.plan.changes) for each in found.techniques]
    assert {"micro_batch": "1"} in levels
    assert all(each.freed > 0 and each.slowdown is None for each in found.techniques)
    assert {each.basis for each in found.techniques} <= {Basis.PREDICTED, Basis.ESTIMATED}
    assert [card.name for card in found.cards] == [model.name for model in MODELS]
    assert all(card.advised == Plan() for card in found.cards)
    assert json.loads(json.dumps(explanation_document(found)))["fits"]


@pytest.mark.full
def test_a_script_that_does_not_fit(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.write_text(train.read_text().replace("randn(64, 32)", "randn(4096, 32)"))
    assert main(["explain", "train.py", "--memory", "6MiB"]) == 0
    printed = capsys.readouterr().out
    assert "train.py does not fit 6.0 MiB: out of memory in " in printed
    assert "the peak below is that under another plan: micro 512" in printed
    short, peak = (printed.partition(title)[2] for title in ("when memory ran out", "at the peak"))
    assert printed.index("when memory ran out") < printed.index("at the peak")
    for table in (short, peak):
        assert table.index("weights") < table.index("sum")
    assert "`autofit search` finds the fastest plan that fits" in printed
    assert not Path("autofit.db").exists()


@pytest.mark.quick
def test_what_cannot_be_explained(train: Path) -> None:
    with pytest.raises(UsageError, match="PyTorch records memory snapshots of GPUs only"):
        autofit.explain("train.py", snapshot="memory.pickle")
    with pytest.raises(UsageError, match="one process, not of 2"):
        autofit.explain(["torchrun", "--nproc-per-node", "2", "train.py"])
    train.write_text("print('hello')\n")
    with pytest.raises(ScriptError, match="ended without an optimizer step"):
        autofit.explain("train.py", quiet=True)


@pytest.mark.quick
def test_the_tables() -> None:
    printed = shown(by_hand.explanation())
    cells = [tuple(re.split(r"\s{2,}", line.strip())) for line in printed.splitlines()]
    assert ("weights", "40.0 MiB", "6.5 %", "parameters and buffers") in cells
    assert ("sum", "620.0 MiB", "100.0 %") in cells
    assert ("module", "modules", "weights", "activations", "size", "share") in cells
    assert ("h.*.act", "2", "-", "60.0 MiB", "60.0 MiB", "9.7 %") in cells
    assert ("h.*", "1", "40.0 MiB", "-", "40.0 MiB", "6.5 %") in cells
    below = ("lib/net.py:3", "return act(x)", "activations", "4", "60.0 MiB", "9.7 %")
    assert below in cells, "of what lines made, this line made all"
    assert ("bf16", "30.0 MiB", "70.0 MiB", "-50 %", "rounding", "measured") in cells
    assert ("bf16", "up to 30.0 MiB", "70.0 MiB", "~-50 %", "rounding", "estimate") in cells
    assert ("T4", "14.0 GiB", "bf16") in cells
    assert "the list losses" in printed
    assert "\x1b" not in printed
