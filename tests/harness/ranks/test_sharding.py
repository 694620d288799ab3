"""A script whose ranks each keep a part is the same training as in one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ranks.trainings import (
    ADVERSARIES,
    IMAGES,
    LANGUAGE,
    SEQUENCES,
    STOP,
    TAIL,
    Ran,
    assert_same,
    deep,
    difference,
    run,
)

pytestmark = pytest.mark.full

LEVELS = ["zero1", "full"]
GROUPS = """\
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ],
    lr=1e-2,
)
"""
ONE_GROUP = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
assert ONE_GROUP in LANGUAGE
WHOLE = LANGUAGE.replace(ONE_GROUP, GROUPS)
"""The language model with two groups of parameters."""
DOCUMENT = """
torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "generator": torch.get_rng_state(),
    },
    "out.pt",
)
print("written", os.path.getsize("out.pt"))
"""
RESUMED = """
if os.path.exists("start.pt"):
    start = torch.load("start.pt")
    model.load_state_dict(start["model"])
    optimizer.load_state_dict(start["optimizer"])
    schedule.load_state_dict(start["schedule"])
    torch.set_rng_state(start["generator"])
for step in"""
READS = """
import copy, pickle

ema = copy.deepcopy(model)


def note(step):
    with torch.no_grad():
        for one, other in zip(ema.parameters(), model.parameters()):
            one.lerp_(other, 0.1)
    if step % 5 == 4:
        moments = [float(each["exp_avg"].norm()) for each in optimizer.state.values()]
        twin = copy.deepcopy(optimizer)
        again = pickle.loads(pickle.dumps(optimizer)).state_dict()["state"]
        print(len(moments), f"{sum(moments):.9f}", len(twin.state), sorted(again))


for step in"""
GROWN = """
    if step == 9:
        model.extra = nn.Linear(3, 3)
        optimizer.add_param_group({"params": [*model.extra.parameters()], "lr": 1e-3})
"""
SCHEDULED = "    schedule.step()\n"
READING = (
    WHOLE.replace("\nfor step in", READS, 1).replace(SCHEDULED, SCHEDULED + "    note(step)\n")
    + 'torch.save([model.state_dict(), ema.state_dict(), optimizer.state_dict()], "out.pt")\n'
)
"""It keeps an average of the weights, reads the optimizer's state, and copies and pickles it."""
HELD = """
kinds = {
    "weights": model.parameters(),
    "state": [x for held in vars(optimizer)["state"].values() for x in held.values()],
}
parts = {kind: [getattr(x, "_local_tensor", x) for x in kinds[kind]] for kind in kinds}
torch.save({kind: sum(x.nbytes for x in parts[kind]) for kind in kinds}, "out.pt")
"""
"""Stores how many bytes this rank keeps."""

GATHERED = (
    deep(words=17, width=32, inner=64, blocks=6)
    + """
import weakref
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

here, sums, most, most_sums = {}, [], 0.0, 0


def gathers(self):
    global most, most_sums
    gather(self)
    here[self] = self._unsharded_param.nbytes / BLOCK
    most = max(most, sum(here.values()))
    most_sums = max(most_sums, sum(each() is not None for each in sums))


def reduces(values, event):
    sums.append(weakref.ref(values))
    return reduce(values, event)


def drops(self):
    drop(self)
    here.pop(self, None)


gather, drop = FSDPParam.to_unsharded, FSDPParam.to_sharded
FSDPParam.to_unsharded, FSDPParam.to_sharded = gathers, drops
reduce, groups.ReduceScatterState = groups.ReduceScatterState, reduces
model = Deep()
BLOCK = sum(p.nbytes for p in model.blocks[0].parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randint(17, (8, 5)), torch.randint(17, (8, 5))
    nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    print(int(most), most_sums, bool(sums))
    most = 0.0
"""
)
"""Prints for each step how many blocks and sums of gradients there were when one was gathered."""

SHORT = (
    deep(words=17, width=16, inner=32, blocks=3)
    + """

def phase():
    if torch._C._current_graph_task_id() >= 0:
        return "backward"
    return "forward" if model.training else "evaluation"


class Short(Block):
    # In the second step it runs out of memory under a plan, if it gets more than two samples.
    def forward(self, x):
        if "autofit" in sys.modules and step == 1 and phase() == WHERE and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 98.00 MiB.")
        return super().forward(x)


model = Deep()
model.blocks[1] = Short()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randint(17, (8, 5)), torch.randint(17, (8, 5))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"{float(loss.detach()):.9f} {float(model(x).mean()):.9f}")
    model.train()
"""
    + TAIL
)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "text",
    [WHOLE + DOCUMENT, IMAGES + TAIL, ADVERSARIES + TAIL + STOP, SEQUENCES + TAIL],
    ids=["language", "images", "adversaries", "sequences"],
)
def test_it_is_the_same_training(tmp_path: Path, text: str, level: str) -> None:
    assert_same(tmp_path, text, {"ranks": "2", "sharding": level})


@pytest.mark.parametrize(
    "text",
    [WHOLE + DOCUMENT, READING, IMAGES + TAIL, ADVERSARIES + TAIL + STOP, SEQUENCES + TAIL],
    ids=["language", "reading", "images", "adversaries", "sequences"],
)
@pytest.mark.parametrize("ranks", ["as_is", "2"])
def test_weights_in_host_memory(tmp_path: Path, text: str, ranks: str) -> None:
    assert_same(tmp_path, text, {"ranks": ranks, "sharding": "full_offload"})


@pytest.mark.parametrize("micro_batch", ["1", "3"])
def test_weights_in_host_memory_and_a_smaller_batch(tmp_path: Path, micro_batch: str) -> None:
    levels = {"sharding": "full_offload", "micro_batch": micro_batch}
    assert_same(tmp_path, WHOLE + DOCUMENT, levels)


@pytest.mark.parametrize("others", [{}, {"checkpointing": "all"}], ids=["", "checkpointed"])
@pytest.mark.parametrize("micro_batch", ["as_is", "2"])
def test_one_block_at_a_time_is_on_the_device(
    tmp_path: Path, micro_batch: str, others: dict[str, str]
) -> None:
    levels = {"sharding": "full_offload", "micro_batch": micro_batch, **others}
    found = run(tmp_path / "offloaded", GATHERED, levels)
    assert found.code == 0, found.err
    assert found.out == "1 0 True\n" * 3


@pytest.mark.parametrize("where", ["forward", "evaluation", "backward"])
def test_a_shortage_keeps_the_weights_in_host_memory(tmp_path: Path, where: str) -> None:
    text = SHORT.replace("WHERE", repr(where))
    levels = {"sharding": "full_offload", "micro_batch": "4", "checkpointing": "all"}
    plain = run(tmp_path / "plain", text)
    found = run(tmp_path / "offloaded", text, levels)
    assert found.code == 0, found.err
    assert found.out.endswith(plain.out), found.err
    assert difference(plain, found) < 1e-9
    assert "cannot be used" not in found.err
    again = where == "backward"
    assert ("under checkpointing, sharding full_offload, micro 2" in found.err) == again
    assert ("continuing with smaller parts of the batch" in found.err) != again


@pytest.mark.parametrize("level", LEVELS)
def test_four_ranks(tmp_path: Path, level: str) -> None:
    assert_same(tmp_path, WHOLE + DOCUMENT, {"ranks": "4", "sharding": level})


@pytest.mark.parametrize("level", LEVELS)
def test_the_script_reads_whole_states(tmp_path: Path, level: str) -> None:
    assert_same(tmp_path, READING, {"ranks": "2", "sharding": level})


def test_parameters_may_come_later(tmp_path: Path) -> None:
    text = READING.replace(SCHEDULED, SCHEDULED + GROWN)
    assert_same(tmp_path, text, {"ranks": "2", "sharding": "zero1"})


@pytest.mark.parametrize("other", [{"micro_batch": "2"}, {"optimizer": "fused"}])
def test_it_combines(tmp_path: Path, other: dict[str, str]) -> None:
    assert_same(tmp_path, WHOLE + DOCUMENT, {"ranks": "2", "sharding": "zero1", **other})


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_goes_to_another_number_of_ranks(tmp_path: Path, level: str) -> None:
    text = WHOLE.replace("\nfor step in", RESUMED, 1) + DOCUMENT
    text = text.replace("range(20)", "range(10)")

    def resumed(source: Path, levels: dict[str, str] | None) -> Ran:
        folder = tmp_path / f"after {source.name} {levels is None}"
        folder.mkdir()
        shutil.copy(source / "out.pt", folder / "start.pt")
        return run(folder, text, levels)

    two, three = ({"ranks": each, "sharding": level} for each in ("2", "3"))
    run(tmp_path / "plain", text)
    run(tmp_path / "written", text, two)
    expected = resumed(tmp_path / "plain", None)
    for found in (resumed(tmp_path / "written", None), resumed(tmp_path / "written", three)):
        assert (found.out, found.code) == (expected.out, expected.code), found.err
        assert difference(found, expected) < 1e-9


@pytest.mark.parametrize(("level", "kinds"), [("zero1", ["state"]), ("full", ["state", "weights"])])
def test_a_rank_keeps_its_share(tmp_path: Path, level: str, kinds: list[str]) -> None:
    plain = run(tmp_path / "plain", LANGUAGE + HELD)
    sharded = run(tmp_path / "sharded", LANGUAGE + HELD, {"ranks": "2", "sharding": level})
    for kind in plain.saved:
        share = sharded.saved[kind] / plain.saved[kind]
        assert 0.4 < share < 0.6 if kind in kinds else share == 1


@pytest.mark.parametrize("level", LEVELS)
def test_an_example(tmp_path: Path, root: Path, level: str) -> None:
    small = ["--batch-size", "4", "--layers", "2", "--width", "64", "--heads", "2", "--steps", "20"]
    options = [*small, "--dtype", "float64", "--device", "cpu", "--losses"]
    script = str(root / "examples" / "char_lm.py")
    levels = {"ranks": "2", "sharding": level}
    (tmp_path / "plan.json").write_text(json.dumps({"plan": levels}))
    plan = ["--plan", "plan.json", "--storage", "sqlite:///store.db"]
    for command in (
        [script, *options, "plain"],
        ["-m", "autofit", "run", *plan, script, "--", *options, "sharded"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert "cannot be used" not in done.stderr
    plain, sharded = (
        [float(line) for line in (tmp_path / each).read_text().split()]
        for each in ("plain", "sharded")
    )
    assert sharded == pytest.approx(plain, rel=0, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            LANGUAGE.replace(
                ONE_GROUP,
                "class Own(torch.optim.Adam):\n    pass\n\n\noptimizer = Own(model.parameters())\n",
            ),
            "Own may update parameters together",
        ),
        (
            SEQUENCES.replace(
                "SGD(model.parameters(), lr=0.1", "SGD(model.parameters(), fused=True"
            ),
            "takes gradients that are scaled",
        ),
    ],
    ids=["class", "scaled"],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    refused = run(tmp_path / "refused", text + TAIL, {"ranks": "2", "sharding": "zero1"})
    assert reason in refused.err
    assert refused.code == 0


@pytest.mark.parametrize(
    ("level", "reason"), [("zero1", "compiles its optimizer's step"), ("full", "functions")]
)
def test_a_compiled_step_is_refused(tmp_path: Path, level: str, reason: str) -> None:
    made = "compiled = torch.compile(optimizer.step, backend='eager')\nschedule ="
    text = WHOLE.replace("optimizer.step()", "compiled()").replace("schedule =", made)
    text = text.replace("range(20)", "range(3)") + DOCUMENT
    refused = run(tmp_path / "refused", text, {"ranks": "2", "sharding": level})
    assert reason in refused.err
