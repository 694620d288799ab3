"""What keeps ranks alike, without a script: meetings, sums, statistics. Threads cannot be ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autofit.worker.launch.environment import free_port

pytestmark = pytest.mark.quick

HEAD = """\
import sys
import torch
import torch.distributed as dist
from torch import nn
from autofit.exceptions import Refused
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.ranks import group as groups
from autofit.worker.harness.ranks.batch_norm import SharedStatistics
from autofit.worker.harness.ranks.lockstep import LabelCheck, own_draws
from autofit.worker.harness.ranks.reduction import Reductions
from autofit.worker.records.trials import Meeting

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
rank, port = int(sys.argv[1]), int(sys.argv[2])
group = groups.RankGroup.connect(rank, 2, Meeting(port=port, seed=0), "cpu")
torch.manual_seed(0)
"""
ALIKE = """
assert not dist.is_initialized() and dist.get_world_size() == 1 and dist.get_rank() == 0
try:
    dist.init_process_group("gloo")
except Refused as refusal:
    assert refusal.strategy == "ranks"
else:
    raise AssertionError("a group of the script's own")
assert group.meet("a question", "x" * (3000 * rank)) == ["", "x" * 3000]

one, other, none = map(nn.Parameter, (torch.ones(3), torch.ones(2, 2), torch.ones(1)))
one.grad, other.grad = torch.ones(3), torch.ones(2, 2) if rank else None
found = Reductions(group).of([one, other, none]).finish([torch.ones(2)])
assert torch.equal(found[0], torch.full((3,), 2.0)) and torch.equal(found[1], torch.ones(2, 2))
assert found[2] is None and torch.equal(found[3], torch.full((2,), 2.0)) and one.grad is None
parts = group.gather(torch.full((1 + rank, 2), rank == 1), [torch.Size([1, 2]), torch.Size([2, 2])])
assert [part.tolist() for part in parts] == [[[False, False]], [[True, True]] * 2]

with own_draws(group):
    drawn = float(torch.rand(()))
mine = group.meet("what was drawn", drawn)
assert mine[0] != mine[1]
after = group.meet("what is drawn next", float(torch.rand(())))
assert after[0] == after[1]

check = LabelCheck(group)
check([torch.randn(100), None], 1, due=True)
check([torch.randn(100) + rank, None], 1, due=False)
try:
    check([torch.randn(100) + (torch.arange(100) == 7 * rank) * 10.0, None], 1, due=True)
except Refused as refusal:
    assert "not the same in every process" in str(refusal)
else:
    raise AssertionError("other labels were not noticed")
"""
SUMS = """
from autofit.worker.harness.ranks import reduction as reductions

reductions.BUCKET = 1  # each gradient has a sum of its own
first, last = nn.Linear(4, 4), nn.Linear(4, 2)
rare = nn.Parameter(torch.ones(4))
image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
tensors = [*first.parameters(), *last.parameters(), rare, image]
all_sums = Reductions(group)
started = []
begin = groups.RankGroup.start_sum


def start(group, values, channel):
    started.append(len(values))
    return begin(group, values, channel)


groups.RankGroup.start_sum = start


def whole(x, uses_rare):
    hidden = first(x).tanh() * (rare if uses_rare else 1)
    return last(hidden).square().sum() + (image * x.sum()).sum()


def one_pass(*uses_rare, learns=False, twice=False):
    x = torch.randn(4, 4)
    started.clear()
    sums = all_sums.of(tensors, learns=learns)
    with sums.during():
        output = whole(x[2 * rank : 2 * rank + 2], uses_rare[rank])
        output.backward()
        if twice:  # as a checkpoint does that runs within another one
            whole(x[2 * rank : 2 * rank + 2], uses_rare[rank]).backward()
    before = len(started)
    found = sums.finish()
    parts = [whole(x[2 * each : 2 * each + 2], uses_rare[each]) for each in range(2)]
    expected = torch.autograd.grad(sum(parts), tensors, allow_unused=True)
    for each, other in zip(found, expected):
        assert (each is None) == (other is None)
        if each is not None:
            torch.testing.assert_close(each, (1 + twice) * other, rtol=0, atol=1e-12)
    assert found[-1].stride() == image.stride()
    return before, len(started)


assert one_pass(True, True) == (0, 6)  # the first pass finds the order
assert one_pass(True, True) == (6, 6)  # later, all sums start inside the backward pass
assert one_pass(True, True, twice=True)[0] == 6
assert one_pass(False, True)[1] == 6
one_pass(False, False, learns=True)
assert one_pass(False, False) == (5, 5)
assert one_pass(True, False) == (5, 6)  # one that was not planned
reductions.BUCKET = 300
one_pass(True, True, learns=True)
assert one_pass(True, True) == (2, 2)
"""
STATISTICS = """
plain, shared = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
statistics = SharedStatistics(Patches(), shared)
with torch.no_grad():
    plain.weight.copy_(torch.randn(3))
    shared.weight.copy_(plain.weight)
x = (3 * torch.randn(5, 3, 4, 4) + 2).requires_grad_()
wanted = torch.randn(5, 3, 4, 4)
(plain(x) * wanted).sum().backward()
cut = slice(0, 2) if rank == 0 else slice(2, 5)
own = x.detach()[cut].requires_grad_()
with statistics.together():
    output = shared(own)
(output * wanted[cut]).sum().backward()
close = torch.testing.assert_close
expected = nn.functional.batch_norm(
    x, None, None, plain.weight, plain.bias, True
)[cut]
close(output, expected, rtol=0, atol=1e-12)
close(own.grad, x.grad[cut], rtol=0, atol=1e-12)
weight, bias = Reductions(group).of([*shared.parameters()]).finish()
close(weight, plain.weight.grad, rtol=0, atol=1e-12)
close(bias, plain.bias.grad, rtol=0, atol=1e-12)
close(shared.running_mean, plain.running_mean, rtol=0, atol=1e-12)
close(shared.running_var, plain.running_var, rtol=0, atol=1e-12)
"""
ELSEWHERE = """
try:
    group.meet("a call" if rank else "the end", None)
except groups.Diverged as error:
    assert "rank 0 is at the end, rank 1 is at a call" in str(error)
else:
    raise AssertionError("they met")
try:
    group.meet("a call")
except groups.RankGone:
    pass
else:
    raise AssertionError("they met again")
"""
GONE = """
import os
if rank:
    os._exit(0)
try:
    group.meet("a call")
except groups.RankGone as error:
    assert "at a call" in str(error)
else:
    raise AssertionError("it met nobody")
"""


@pytest.mark.parametrize(
    "text",
    [ALIKE, SUMS, STATISTICS, ELSEWHERE, GONE],
    ids=["alike", "sums", "statistics", "elsewhere", "gone"],
)
def test_two_ranks(text: str) -> None:
    port = str(free_port())
    command = [sys.executable, "-c", HEAD + text]
    ranks = [
        subprocess.Popen([*command, str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
