"""Checkpointing: which blocks run again, and in which state."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, RootFacts, get
from autofit.strategies.inspection.blocks import repeated_blocks
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.meter import build
from tests.roots import Rooted
from tests.strategies.contract import MEASURE, meter_environment

quick, full = pytest.mark.quick, pytest.mark.full

LEVELS = ("1", "3", "all")


class Block(nn.Module):
    """Attention that drops at ``drops[0]``, and a layer that drops at ``drops[1]``."""

    def __init__(self, drops: tuple[float, float], inplace: bool = False) -> None:
        super().__init__()
        self.attention_drop = drops[0]
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.up = nn.Linear(16, 32)
        self.act = nn.ReLU(inplace)
        self.drop = nn.Dropout(drops[1])
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attention_drop if self.training else 0.0
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        after: torch.Tensor = x + self.drop(self.down(self.act(self.up(x))))
        return after


class Net(nn.Module):
    """Four of them."""

    def __init__(self, drops: tuple[float, float] = (0.0, 0.0), inplace: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drops, inplace) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def llama() -> nn.Module:
    """Return a Hugging Face model, which checkpoints by itself."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def trained(rooted: Rooted, drops: tuple[float, float], level: str | None) -> list[torch.Tensor]:
    """Return the parameters after some steps of AdamW, dropping as drawn from one seed."""
    torch.manual_seed(5)
    module = Net(drops).double()
    call = module if level is None else rooted(module, checkpointing=level).own_call
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(4):
        loss = call(torch.randn(3, 7, 16, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def flops(module: nn.Module, held: HarnessRoot, x: torch.Tensor) -> int:
    """Return the floating-point operations of a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        held.running(x).sum().backward()
    module.zero_grad()
    return int(counter.get_total_flops())


@quick
@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
@pytest.mark.parametrize(("level", "again"), [("3", [1, 1, 1, 0]), ("all", [1, 1, 1, 1])])
def test_the_blocks_of_stages_run_again_once(
    name: str, level: str, again: list[int], rooted: Rooted
) -> None:
    """The model's own method would run the stages again: in a Swin also, in a Swin-V2 only."""
    transformers = pytest.importorskip("transformers")
    shape = {"image_size": 32, "window_size": 4, "embed_dim": 8}
    config = getattr(transformers, f"{name}Config")(**shape, depths=[2, 2], num_heads=[1, 2])
    module = getattr(transformers, f"{name}Model")(config)
    calls = []
    blocks = repeated_blocks(module)
    for number, block in enumerate(blocks):
        attention = block.get_submodule("attention")
        attention.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    held = rooted(module, checkpointing=level)
    held.running(torch.randn(2, 3, 32, 32)).pooler_output.sum().backward()
    assert [calls.count(number) - 1 for number in range(len(blocks))] == again


@quick
@pytest.mark.parametrize("drops", [(0.0, 0.0), (0.0, 0.3), (0.3, 0.3)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_training_is_the_same_whatever_drops(
    level: str, drops: tuple[float, float], rooted: Rooted
) -> None:
    expected = trained(rooted, drops, None)
    for found, wanted in zip(trained(rooted, drops, level), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


class Stage(nn.Sequential):
    """A part of a network that keeps statistics of its batches."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__(nn.Conv2d(2, 2, 3, padding=1), norm(2), nn.ReLU())


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "cumulative": partial(nn.BatchNorm2d, momentum=None),
    "instance": partial(nn.InstanceNorm2d, track_running_stats=True),
    "without": partial(nn.BatchNorm2d, track_running_stats=False),
}


@quick
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "levels",
    [{"checkpointing": level} for level in ("1", "all")]
    + [{"checkpointing": "all", "compile": "regional"}],
    ids=lambda levels: "+".join(levels.values()),
)
def test_a_batch_is_counted_once(levels: dict[str, str], norm: str, rooted: Rooted) -> None:
    """In training, also where backward goes through it twice; not in evaluation."""

    def after(levels: dict[str, str]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = nn.Sequential(Stage(NORMS[norm]), Stage(NORMS[norm])).double()
        held = rooted(module, **levels)
        for mode in (True, True, False):
            module.train(mode)
            x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
            loss = held.running(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        held.take_back()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return [*gradients, *module.buffers()]

    torch.testing.assert_close(after(levels), after({}), rtol=1e-12, atol=1e-12)


class Dense(nn.Module):
    """A layer that is given all that came before, in a list that grows meanwhile."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, before: list[torch.Tensor], *, more: dict[str, int]) -> torch.Tensor:
        after: torch.Tensor = self.norm(self.layer(torch.cat(before, dim=1))) * more.pop("scale")
        return after


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Dense(4), Dense(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in (self.one, self.two):
            found.append(layer(found, more={"scale": 2}))
        return found[-1]


def stages() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2))
    return nn.Sequential(*layers)


def replaced(module: nn.Module) -> None:
    module.set_submodule("0.1", nn.BatchNorm1d(4).double())


@quick
@pytest.mark.parametrize("level", ["2", "all"])
@pytest.mark.parametrize(
    ("made", "between"),
    [(stages, nn.Module.eval), (Growing, nn.Module.train), (stages, replaced)],
    ids=["in another mode", "lists", "another norm"],
)
def test_what_runs_again_is_what_ran(
    made: Callable[[], nn.Module],
    between: Callable[[nn.Module], object],
    level: str,
    rooted: Rooted,
) -> None:
    """Whatever the script does with modes, lists and modules between forward and backward."""

    def after(**levels: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = made().double().train()
        held = rooted(module, **levels)
        for _ in range(2):
            loss = held.running(torch.randn(6, 4, dtype=torch.float64)).square().sum()
            between(module)
            loss.backward()
            module.train()
        held.take_back()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return [*gradients, *module.buffers()]

    torch.testing.assert_close(after(checkpointing=level), after(), rtol=1e-12, atol=1e-12)


@quick
def test_statistics_that_have_moved_are_no_longer_those_of_an_evaluation(rooted: Rooted) -> None:
    module = stages().eval()
    held = rooted(module, checkpointing="all")
    x = torch.randn(6, 4)
    held.running(x).sum().backward()
    evaluated = held.running(x).sum()
    module.train()
    with torch.no_grad():
        held.running(x)
    with pytest.raises(Refused, match="changed before its backward"):
        evaluated.backward()


@quick
def test_what_runs_again(rooted: Rooted) -> None:
    x = torch.randn(2, 7, 16)
    found = {}
    for level in ("as_is", "1", "3", "all", "9"):
        module = Net()
        found[level] = flops(module, rooted(module, checkpointing=level), x)
    block = (found["all"] - found["as_is"]) / 4
    assert block > 0
    again = {level: (flops - found["as_is"]) / block for level, flops in found.items()}
    assert again == {"as_is": 0, "1": 1, "3": 3, "all": 4, "9": 4}


@quick
@pytest.mark.parametrize("level", ["2", "all"])
def test_two_calls_under_one_autocast(level: str, rooted: Rooted) -> None:
    """The second finds no casts of the first: run again, it would make some it had not made."""
    module = Net()
    x = torch.randn(3, 7, 16)
    found = []
    for levels in ({}, {"checkpointing": level}):
        held = rooted(module, **levels)
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = held.running(x).float().sum() + held.running(2 * x).float().sum()
        loss.backward()
        found.append([p.grad for p in module.parameters()])
        held.take_back()
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)
    assert torch.is_autocast_cache_enabled()


class Casts(TorchDispatchMode):
    """Notes what is cast to bfloat16, while it is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and found.dtype is torch.bfloat16:
            self._made.append(weakref.ref(found))
        return found

    def held(self) -> int:
        """Return the elements of those that are still there."""
        return sum(cast.numel() for cast in (made() for made in self._made) if cast is not None)


@quick
@pytest.mark.parametrize(
    ("made", "given"),
    [(Net, torch.randn(1, 2, 16)), (llama, torch.ones(1, 2, dtype=torch.int64))],
    ids=["blocks", "transformer"],
)
def test_a_block_that_runs_again_leaves_no_casts_of_its_weights(
    made: Callable[[], nn.Module], given: torch.Tensor, rooted: Rooted
) -> None:
    """When forward ends: without, autocast has those of all weights."""
    found = {}
    for level in ("as_is", "all"):
        module = made()
        held = rooted(module, checkpointing=level)
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
            output = held.running(given)
            found[level] = casts.held()
        del output
    (blocks,) = (each for each in module.modules() if isinstance(each, nn.ModuleList))
    weights = sum(weight.numel() for weight in blocks.parameters() if weight.ndim == 2)
    assert found["as_is"] - found["all"] >= weights


@quick
def test_why_it_is_left_out() -> None:
    strategy = get("checkpointing")
    root = RootFacts(
        name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", blocks=2
    )
    alone = replace(root, blocks=1)
    assert strategy.inapplicable("auto", Facts(roots=(root,))) is None
    assert "all is the same" in (strategy.inapplicable("auto", Facts(roots=(alone,))) or "")
    assert not clash(Plan.of({"checkpointing": "7", "compile": "regional"}))


@quick
def test_a_pickled_transformer_checkpoints_plainly(rooted: Rooted) -> None:
    model = llama()
    held = rooted(model, checkpointing="all")
    loaded = pickle.loads(pickle.dumps(model))
    kept = loaded.model.layers[0]._gradient_checkpointing_func
    assert isinstance(kept, partial)
    assert (kept.func, kept.keywords) == (checkpoint, {"use_reentrant": False})
    held.take_back()
    assert not any("_gradient_checkpointing_func" in vars(each) for each in model.modules())


def kept_of(held: HarnessRoot, x: torch.Tensor) -> int:
    """Return how many numbers autograd keeps of a forward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = held.running(x).square().mean()
    loss.backward()
    return sum(kept.values())


@quick
@pytest.mark.parametrize("how", ["wrapped", "in place", "forward", "blocks"])
def test_what_the_script_has_compiled_is_checkpointed_as_well(how: str, rooted: Rooted) -> None:
    """As one graph it shows no call of a block: the block's own ``forward`` is a part of it."""
    torch.manual_seed(2)
    module, x = Net(), torch.randn(6, 7, 16)
    module(x).square().mean().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    called: nn.Module = module
    if how == "wrapped":
        called = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    elif how == "forward":
        module.forward = torch.compile(module.forward, backend="aot_eager")  # type: ignore[method-assign]
    else:
        for each in module.blocks if how == "blocks" else [module]:
            each.compile(backend="aot_eager")
    held = rooted(called)
    kept = []
    for level in ("as_is", "2", "all", "as_is"):
        held.take_back()
        held.apply(Plan.of({"checkpointing": level}))
        kept.append(kept_of(held, x))
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        module.zero_grad()
        with torch.no_grad():
            held.running(x)
    plain, half, whole, again = kept
    assert whole < 0.8 * half < 0.8 * 0.8 * plain
    assert again == plain
    assert not any("forward" in vars(each) for each in module.blocks)


@full
@pytest.mark.skipif(build.shim() is None, reason="bytes are counted only with a C compiler")
def test_each_further_block_frees_as_much_but_the_last() -> None:
    """While the last block runs again, it holds its activations all the same."""
    levels = ("1", "2", "3", "4", "5", "all")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, "checkpointing", *levels],
        env=meter_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = json.loads(ran.stdout)
    ordered = [peaks[level] for level in ("as_is", *levels)]
    freed = [before - after for before, after in itertools.pairwise(ordered)]
    assert freed[0] > 0.1 * ordered[0], peaks
    assert freed[:-1] == pytest.approx([freed[0]] * 5, rel=0.05), peaks
    assert abs(freed[-1]) < 0.05 * freed[0], peaks


class Counts(nn.Module):
    """Counts its calls, and normalizes its weight by a power iteration that goes on each time."""

    count: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(16))
        self.moves = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            with torch.no_grad():
                self.count.add_(1)
                self.seen = self.seen + x.mean((0, 1))
        after: torch.Tensor = x + torch.tanh(self.layer(x)) * (1 + self.count + self.seen)
        return after


def counting(rooted: Rooted, level: str) -> tuple[nn.Sequential, HarnessRoot]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Counts() for _ in range(3)))
    root = rooted(model)
    root.apply(Plan.of({} if level == "as_is" else {"checkpointing": level}))
    return model, root


@quick
@pytest.mark.parametrize("level", ["2", "all"])
def test_buffers_of_a_block_change_once(level: str, rooted: Rooted) -> None:
    """A second run would count again, and go on with the power iteration."""

    def trained(level: str) -> list[torch.Tensor]:
        model, root = counting(rooted, level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(step))
            root.forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.state_dict().values()]

    for found, plain in zip(trained(level), trained("as_is"), strict=True):
        assert torch.equal(found, plain)


@quick
def test_a_buffer_that_begins_to_change_later_is_refused(rooted: Rooted) -> None:
    model, root = counting(rooted, "all")
    blocks = [each for each in model if isinstance(each, Counts)]
    for block in blocks:
        block.moves = False
    root.forward(torch.randn(2, 5, 16)).mean().backward()
    for block in blocks:
        block.moves = True
    with pytest.raises(Refused, match="changes its buffer"):
        root.forward(torch.randn(2, 5, 16))
