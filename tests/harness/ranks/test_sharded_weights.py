"""Whatever a script does with sharded parameters is as in one process, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.ranks.trainings import TAIL, assert_same, deep, run

pytestmark = pytest.mark.full

FULL = {"ranks": "2", "sharding": "full"}
MODEL = (
    """\
import copy, pickle


"""
    + deep(words=17, width=16, inner=32, blocks=3)
    + """

def show(*values):
    print(*(f"{float(value):.8f}" for value in values))


model = Deep()
named = list(model.named_parameters())
params = [p for _, p in named]
optimizer = torch.optim.AdamW(params, lr=1e-2)
"""
)
LOOP = """
for step in range(12):
    x, y = torch.randint(17, (6, 5)), torch.randint(17, (6, 5))
    if step == 4:
        x, y = x[:1], y[:1]
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss = loss + 1e-3 * sum(p.square().sum() for p in params)
    optimizer.zero_grad()
    loss.backward()
    during(step)
    optimizer.step()
    show(loss)
"""
GRADIENTS = """
def during(step):
    show(*(p.grad.norm() for n, p in named if "s.1.mlp" in n), params[0].grad.mean())
    show(nn.utils.clip_grad_norm_(model.parameters(), 2.0))
    nn.utils.clip_grad_value_(params, 0.1)
    held = [p for p in params if p.grad is not None]
    total = torch.stack([p.grad.norm() for p in held]).norm()
    for p in held:
        p.grad.mul_(min(1.0, 0.3 / float(total)))
    params[-1].grad = params[-1].grad * 0.5
    if step == 7:
        model.blocks[0].requires_grad_(False)


"""
VALUES = """
average, shadow = copy.deepcopy(model), [p.detach().clone() for p in params]


def during(step):
    with torch.no_grad():
        for p in params:
            p.data.add_(p.grad.data, alpha=-0.01)
            p.add_(torch.randn_like(p) * 1e-3)
        for one, other in zip(average.parameters(), model.parameters()):
            one.mul_(0.9).add_(other, alpha=0.1)
        torch._foreach_lerp_(shadow, [p.detach() for p in params], 0.1)
        params[0][3] = 0.5
        vector = nn.utils.parameters_to_vector(params)
        nn.utils.vector_to_parameters(vector * 0.999, params)
        if step == 5:
            nn.init.normal_(model.head.weight, std=0.02)
            nn.init.xavier_uniform_(model.blocks[1].mlp[0].weight)
    model.double()
    show(vector.norm(), *(p.sum() for p in average.parameters()), *(p.max() for p in shadow))
    print(torch.equal(params[0], model.tokens.weight), sum(p.numel() for p in params))


"""
COPIES = """
def during(step):
    global saved
    model.eval()
    with torch.inference_mode():
        show(model(x).sum())
    with torch.no_grad():
        show(model.blocks[1](model.tokens(x)).sum())
    model.train()
    if step == 3:
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    if step == 8:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        twin(x).sum().backward()
        show(twin.head.weight.grad.norm(), *(p.norm() for p in again.parameters()))
        print(twin.tokens.weight is twin.head.weight, again.tokens.weight is again.head.weight)
        print(type(model).__name__, model, params[1], model.blocks[0].norm.weight.tolist()[:1])


"""
SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(12):
    x, y = torch.randint(17, (6, 5)), torch.randint(17, (6, 5))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if step == 5:
        with torch.no_grad():
            params[0].grad[16] = float("inf")
    scaler.unscale_(optimizer)
    show(nn.utils.clip_grad_norm_(params, 0.5))
    scaler.step(optimizer)
    scaler.update()
    show(loss, scaler.get_scale())
"""


ONLY_BLOCKS = """
model = nn.Sequential(*[Block() for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(6, 16)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""


SEVERAL_TIMES = """
class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.ModuleList([Block()])
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(3):
            x = self.shared[0](x)
        return self.head(x)


""" + ONLY_BLOCKS.replace("nn.Sequential(*[Block() for _ in range(3)])", "Turns()")


BETWEEN = """
for step in range(12):
    x, y = torch.randint(17, (6, 5)), torch.randint(17, (6, 5))
    logits = model(x)  # in some steps no backward follows
    if step % 3 == 1:
        with torch.no_grad():
            params[0].mul_(0.9)
            model.blocks[0].norm.weight.add_(0.1)
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""


@pytest.mark.parametrize(
    "text",
    [GRADIENTS + LOOP, VALUES + LOOP, COPIES + LOOP, SCALED, ONLY_BLOCKS, SEVERAL_TIMES],
    ids=["gradients", "values", "copies", "scaled", "only blocks", "several times"],
)
def test_it_is_the_same_training(tmp_path: Path, text: str) -> None:
    assert_same(tmp_path, MODEL + text + TAIL, FULL)


@pytest.mark.parametrize(("ranks", "level"), [("2", "zero2"), ("4", "hybrid")])
def test_other_levels_are_the_same_training(tmp_path: Path, ranks: str, level: str) -> None:
    assert_same(tmp_path, MODEL + GRADIENTS + LOOP + TAIL, {"ranks": ranks, "sharding": level})


@pytest.mark.parametrize("level", ["zero2", "full"])
def test_weights_may_be_used_between_forward_and_backward(tmp_path: Path, level: str) -> None:
    assert_same(tmp_path, MODEL + BETWEEN + TAIL, {"ranks": "2", "sharding": level})


def test_a_step_gathers_no_whole_values(tmp_path: Path) -> None:
    text = """
from torch.distributed.tensor import DTensor

gathers = []
plain = DTensor.full_tensor
DTensor.full_tensor = lambda *args, **kwargs: (gathers.append(1), plain(*args, **kwargs))[1]
"""
    done = run(tmp_path / "counted", MODEL + text + ONLY_BLOCKS + "print(len(gathers))\n", FULL)
    assert done.out.split()[-1] == "0", done.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("params[0].detach()[0].zero_()", "changes a part of a parameter in place"),
        ("params[0].register_hook(lambda gradient: 2 * gradient)", "register_hook"),
        ("model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)", "has replaced"),
        ("model.extra = nn.Linear(2, 2)", "replaced or added parameters"),
        ("torch.autograd.grad(model(x).sum(), params)", "torch.autograd.grad"),
        ("model(x).sum().backward(inputs=params[:1])", "torch.autograd.grad"),
    ],
    ids=["view", "hook", "assign", "extra", "grad", "inputs"],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    text = MODEL + f"\n\ndef during(step):\n    if step == 1:\n        {line}\n\n\n" + LOOP + TAIL
    refused = run(tmp_path / "refused", text, FULL)
    assert reason in refused.err
    assert "continuing under as it is" in refused.err


def test_a_variable_of_a_function_may_hold_no_parameter(tmp_path: Path) -> None:
    loop = LOOP.replace("during(step)", "show(weight.norm())").replace("\n", "\n    ")
    text = MODEL + "\n\ndef main():\n    weight = params[0]" + loop + "\n\nmain()\n"
    refused = run(tmp_path / "refused", text, FULL)
    assert "before the weights were sharded" in refused.err


def test_weights_may_be_gathered_in_bfloat16(tmp_path: Path) -> None:
    text = "torch.set_default_dtype(torch.float32)\n" + MODEL
    text += """
kinds = set()
for block in model.blocks:
    block.mlp.register_forward_pre_hook(lambda mlp, _: kinds.add((mlp[0].weight.dtype)))
"""
    text += LOOP.replace("    during(step)\n", "") + TAIL
    text += (
        "print(kinds, {p.dtype for p in params}, {p.grad.dtype for p in params}, file=sys.stderr)\n"
    )
    masters = {"weights": "bf16_master"}
    alone, sharded = (
        run(tmp_path / name, text, levels)
        for name, levels in {"alone": masters, "sharded": FULL | masters}.items()
    )
    assert "{torch.bfloat16} {torch.float32} {torch.float32}" in sharded.err
    assert {values.dtype for values in sharded.saved.values()} == {torch.float32}
    one, other = ([float(x) for x in ran.out.split()[:12]] for ran in (alone, sharded))
    assert other == pytest.approx(one, rel=1e-2)
