"""A model that is too large for its device is created in parts, with the values of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autofit.worker.launch.environment import free_port
from tests.harness.ranks.trainings import TAIL, assert_same, deep

MODEL = (
    """\
import copy


"""
    + deep(words=97, width=128, inner=256, blocks=8)
    + """

with torch.device("meta"):
    WHOLE = sum(p.nbytes for p in Deep().parameters())
"""
)
HEAD = """\
import sys
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from autofit.worker.harness.ranks import group as groups
from autofit.worker.harness.ranks.paged_parameters import PagedParameters
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.torch_state.modules import is_paged
from autofit.worker.records.trials import Meeting
from tests.roots import Bystander

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
rank, size, port = map(int, sys.argv[1:])
group = None
if size > 1:
    group = groups.RankGroup.connect(rank, size, Meeting(port=port, seed=0), "cpu")
seams = Seams(Bystander())


def paging(times):
    # Let half of a device hold so many times the model.
    pages = PagedParameters(seams, group, "cpu", lambda _: int(2 * times * WHOLE))
    undo = pages.attach()
    return pages, undo


def values(model):
    return [p.detach().clone() for p in model.parameters()]


"""
LIMITED = """
class Watch(TorchDispatchMode):
    # Notes after each operation how many bytes of parameters exist.
    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        held = {p.untyped_storage()._cdata: p.untyped_storage() for p in made}
        self.most = max(self.most, sum(each.nbytes() for each in held.values()))
        return found


torch.manual_seed(1)
plain, made = Deep(), []
nn.modules.module.register_module_parameter_registration_hook(lambda *given: made.append(given[2]))
torch.manual_seed(1)
pages, undo = paging(1 / 3)
with Watch() as watch:
    model = Deep()
    x = torch.randint(97, (6, 5))
    assert is_paged(model) and pages.active
    model(x).square().mean().backward()
largest = max(p.nbytes for p in made)
assert WHOLE / 4 < watch.most <= WHOLE / 3 + largest, (watch.most, WHOLE)
plain(x).square().mean().backward()
assert all(map(torch.equal, values(model), values(plain)))
for one, other in zip(model.parameters(), plain.parameters()):
    assert torch.equal(one.grad, other.grad)
assert is_paged(model) and model.head.weight is model.tokens.weight
with Watch() as later:
    model(x).square().mean()
assert later.most <= WHOLE / 12 + 2 * largest, (later.most, WHOLE)

with torch.no_grad():
    norms = torch._foreach_norm(list(model.parameters()))
assert all(map(torch.equal, norms, torch._foreach_norm(list(plain.parameters()))))
other = Deep()
expected = values(other)
model.load_state_dict(other.state_dict())
assert all(map(torch.equal, values(model), expected))
saved, twin = model.state_dict(), copy.deepcopy(model)
del other
assert all(map(torch.equal, saved.values(), [*expected, expected[0]]))
with torch.no_grad():
    torch._foreach_mul_(list(model.parameters()), 2.0)
assert all(map(torch.equal, values(twin), expected))
assert all(torch.equal(a, 2 * b) for a, b in zip(values(model), expected))
assert saved["head.weight"].data_ptr() == saved["tokens.weight"].data_ptr()
assert twin.head.weight is twin.tokens.weight and is_paged(twin)
model.float().double()
assert all(torch.equal(a, (2 * b).float().double()) for a, b in zip(values(model), expected))
assert is_paged(model)

with pages.there(model.blocks[3].parameters()):
    assert not torch._C._len_torch_dispatch_stack()
    assert not is_paged(model.blocks[3]) and is_paged(model.blocks[2])
assert torch._C._len_torch_dispatch_stack() == 1
kept = model.blocks[0]
del model, twin, saved, made[:], one
pages.settle()
assert not pages.active and not is_paged(kept) and not torch._C._len_torch_dispatch_stack()
assert torch.equal(kept.norm.weight, 2 * expected[1])
undo()
"""
UNLIMITED = """
pages, undo = paging(1.1)
model = Deep()
model(torch.randint(97, (6, 5))).sum().backward()
assert not pages.active and not is_paged(model) and not torch._C._len_torch_dispatch_stack()
pages.settle()
undo()
"""


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("text", [LIMITED, UNLIMITED], ids=["limited", "unlimited"])
def test_parameters_are_whole_for_whoever_uses_them(root: Path, ranks: int, text: str) -> None:
    port = str(free_port())
    program = [sys.executable, "-c", HEAD + MODEL + text]
    running = [
        subprocess.Popen([*program, str(rank), str(ranks), port], stderr=subprocess.PIPE, cwd=root)
        for rank in range(ranks)
    ]
    for each in running:
        _, errors = each.communicate(timeout=60)
        assert each.returncode == 0, errors.decode()


# --- whole trainings ------------------------------------------------------------------------------

FOUND = """
modules = [each for name, each in sys.modules.items() if name.endswith(".ranks.paged_parameters")]
"""
LIMIT = (
    FOUND
    + """
for module in modules:
    module.SHARE = WHOLE / 3 / (256 << 20)
"""
)
MADE = """
model = Deep()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
LOADED = """
start = {name: torch.randn_like(values) for name, values in Deep().state_dict().items()}
start["head.weight"] = start["tokens.weight"]
model = Deep().float()
model.load_state_dict(start)
model = model.double()
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
LOOP = """
for module in modules:
    (pages,) = module._held.values()
    assert pages.active
for step in range(5):
    x, y = torch.randint(97, (6, 5)), torch.randint(97, (6, 5))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{float(loss.detach()):.9f}")
"""
AVERAGED = """
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters()):
            one.lerp_(other, 0.1)
model = nn.ModuleList([model, average])
"""
FROZEN = """
assert WHOLE > 96 << 20
model = Deep()
model.blocks.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
TOKENS = """
torch.save([model.tokens.weight.detach().clone()], "out.pt")
"""
STOPPED = """
assert not any(pages.active for module in modules for pages in module._held.values())
"""
FULL = {"ranks": "2", "sharding": "full"}


@pytest.mark.full
@pytest.mark.parametrize(
    "levels",
    [
        FULL,
        FULL | {"checkpointing": "all"},
        {"ranks": "4", "sharding": "hybrid"},
        {"ranks": "2", "sharding": "full_offload"},
        {"sharding": "full_offload"},
        {"sharding": "full_offload", "micro_batch": "2"},
    ],
    ids=lambda levels: " ".join(levels.values()),
)
def test_it_is_the_same_training(tmp_path: Path, levels: dict[str, str]) -> None:
    assert_same(tmp_path, MODEL + LIMIT + MADE + LOOP + TAIL, levels, memory="256MiB")


@pytest.mark.full
@pytest.mark.parametrize("levels", [FULL, {"sharding": "full_offload"}], ids=["ranks", "alone"])
def test_weights_may_be_loaded_and_copied_before(tmp_path: Path, levels: dict[str, str]) -> None:
    text = MODEL + LIMIT + LOADED + LOOP + AVERAGED + TAIL
    assert_same(tmp_path, text, levels, memory="256MiB")


@pytest.mark.full
def test_a_model_may_be_larger_than_the_memory_of_a_rank(tmp_path: Path) -> None:
    large = MODEL.replace("256", "512").replace("128", "512").replace("range(8)", "range(24)")
    assert_same(tmp_path, large + FOUND + FROZEN + LOOP + TOKENS, FULL, memory="88MiB")


@pytest.mark.full
@pytest.mark.parametrize(
    "levels", [FULL, FULL | {"checkpointing": "all"}], ids=["", "checkpointed"]
)
def test_another_kind_of_call_is_verified_on_a_copy_in_parts(
    tmp_path: Path, levels: dict[str, str]
) -> None:
    later = LOOP.replace("model(x)", "(model(x=x) if step == 1 else model(x))")
    text = MODEL + LIMIT + MADE + later + TAIL
    assert_same(tmp_path, text + STOPPED, levels, memory="256MiB")
