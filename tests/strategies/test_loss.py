"""The loss in chunks of tokens: plain gradients, fewer bytes, and logits for whoever asks."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, Fidelity, RootFacts, get
from autofit.strategies.base import Deferred
from autofit.strategies.inspection.heads import find_head
from autofit.strategies.loss import chunks
from autofit.worker import meter
from autofit.worker.harness.session import script_facts as learn
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.meter import build
from tests.roots import Rooted

pytestmark = pytest.mark.quick

WORDS = 67
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens in a chunk: several chunks, the last one shorter."""
    monkeypatch.setattr(chunks, "TOKENS", 5)
    monkeypatch.setattr(chunks, "CHUNKS", 1000)


class Net(nn.Module):
    """As people write it: shifted targets, the loss in the forward, logits beside it."""

    def __init__(self, *, bias: bool = False, tied: bool = False, cap: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.cap = cap
        self.after: Call = lambda logits: logits
        self.reduction = "mean"

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        logits = self.after(self.head(x + self.mlp(x)))
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        loss = functional.cross_entropy(
            logits.view(-1, logits.size(-1)),
            targets.view(-1),
            ignore_index=-1,
            reduction=self.reduction,
        )
        return logits, loss


def batch(samples: int = 6) -> dict[str, torch.Tensor]:
    tokens = torch.randint(WORDS, (samples, 9))
    targets = tokens.roll(-1, 1)
    targets[0, 4:] = -1
    targets[3] = -1
    return {"tokens": tokens, "targets": targets}


@pytest.fixture
def root(rooted: Rooted) -> Callable[..., HarnessRoot]:
    """A module's root under a plan with the loss in chunks."""
    return partial(rooted, loss="chunked")


def trained(module: nn.Module, call: Call, steps: int = 3) -> list[torch.Tensor]:
    """Return each step's loss, and the parameters after the last."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        _, loss = call(**batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(p.detach().clone() for p in module.parameters())]


MODELS = {
    "untied": Net,
    "tied": lambda: Net(tied=True),
    "bias": lambda: Net(bias=True),
    "soft cap": lambda: Net(cap=3.0),
}


@pytest.mark.parametrize("levels", [{}, {"micro_batch": "2"}], ids=["whole", "split"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_are_the_plain_models(
    make: Callable[[], Net], reduction: str, levels: dict[str, str], root: Any
) -> None:
    torch.manual_seed(0)
    module = make().double()
    module.reduction = reduction
    twin = copy.deepcopy(module)
    expected = trained(twin, twin)
    held = root(module, **levels)
    found = trained(module, lambda **kwargs: held.running(**kwargs))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def test_gradients_are_added_to_those_that_are_there(root: Any) -> None:
    torch.manual_seed(0)
    module, one, other = Net().double(), batch(), batch()
    expected: list[torch.Tensor] = []
    for levels in (None, {}, {"micro_batch": "2"}):
        module.zero_grad()
        held = None if levels is None else root(module, **levels)
        for kwargs in (one, other):
            output = module(**kwargs) if held is None else held.running(**kwargs)
            (output[1] / 2).backward()
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        expected = expected or gradients
        if held is not None:
            held.take_back()
        for found, plain in zip(gradients, expected, strict=True):
            assert torch.allclose(found, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("frozen", ["head.weight", "embedding.weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str, root: Any) -> None:
    module, kwargs = Net().double(), batch()
    module.get_parameter(frozen).requires_grad_(False)
    if frozen.startswith("embedding"):
        module.mlp.requires_grad_(False)
    module(**kwargs)[1].backward()
    expected = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    root(module).running(**kwargs)[1].backward()
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-11)


def test_a_batch_in_which_no_label_counts(root: Any) -> None:
    module, kwargs = Net(), batch()
    kwargs["targets"].fill_(-1)
    loss = root(module).running(**kwargs)[1]
    loss.backward()
    assert loss.isnan()
    assert module.head.weight.grad is not None
    assert not module.head.weight.grad.any()


def test_in_bfloat16_the_gradient_is_no_further_off_than_the_plain_one(root: Any) -> None:
    torch.manual_seed(0)
    module, kwargs = Net(), batch(40)
    exact = gradient_of(module, module, kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gradient_of(module, module, kwargs)
    held = root(module, precision="bf16")
    found = gradient_of(module, lambda **given: held.running(**given), kwargs)
    assert (found - exact).norm() < 1.2 * (plain - exact).norm()


def gradient_of(module: Net, call: Call, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    module.zero_grad()
    call(**kwargs)[1].backward()
    assert module.head.weight.grad is not None
    return module.head.weight.grad.clone()


@pytest.mark.parametrize("levels", [{}, {"micro_batch": "2"}], ids=["whole", "split"])
def test_the_script_still_gets_logits_where_it_asks(levels: dict[str, str], root: Any) -> None:
    torch.manual_seed(0)
    module, kwargs = Net(), batch()
    expected = module(**kwargs)[0].detach()
    logits = root(module, **levels).running(**kwargs)[0]
    assert isinstance(logits, Deferred)
    answers: Any = logits
    assert answers.shape == expected.shape
    assert (answers.argmax(-1) == expected.argmax(-1)).all()
    assert torch.allclose(functional.softmax(answers, dim=-1), expected.softmax(-1))
    assert torch.allclose(answers[:, -1] * 2 + 1, expected[:, -1] * 2 + 1)
    assert torch.allclose(torch.cat([answers, answers]), torch.cat([expected, expected]))
    assert len(answers) == 6
    assert answers.float().dtype is torch.float32
    with pytest.raises(Refused, match="in place"):
        answers[0] = 0
    with pytest.raises(Refused, match="in place"):
        answers.clamp_(0)


def test_a_loss_of_the_scripts_own_on_the_logits(root: Any) -> None:
    torch.manual_seed(0)
    module, kwargs = Net().double(), batch()
    logits, loss = module(**kwargs)
    (loss + logits.square().mean()).backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    held = root(module)
    logits, loss = held.running(**kwargs)
    (loss + logits.square().mean()).backward()
    for found, plain in zip(module.parameters(), expected, strict=True):
        assert found.grad is not None
        assert torch.allclose(found.grad, plain, rtol=1e-9, atol=1e-11)
    held.take_back()
    logits, loss = root(module, micro_batch="2").running(**kwargs)
    with pytest.raises(Refused, match="differentiates the logits"):
        (loss + logits.square().mean()).backward()


def test_logits_of_weights_that_are_gone_are_refused(root: Any) -> None:
    module = Net()
    logits, loss = root(module).running(**batch())
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(Refused, match="after the weights have changed"):
        logits.argmax(-1)


def test_evaluation_is_the_plain_models(root: Any) -> None:
    module, kwargs = Net().eval(), batch()
    held = root(module)
    with torch.no_grad():
        assert isinstance(held.running(**kwargs)[0], torch.Tensor)
    module.train()
    with torch.no_grad():
        logits, loss = held.running(**kwargs)
        assert torch.allclose(functional.cross_entropy(*rows(logits, kwargs)), loss)


def rows(logits: Any, kwargs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    known = kwargs["targets"] != -1
    return logits.value()[known], kwargs["targets"][known]


class Outside(Net):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits, logits.float().square().mean()


class Headless(Net):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        logits = functional.linear(x, self.head.weight)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten().abs())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Outside, "computes no cross-entropy of its head's output"),
        (Headless, "does not call its head"),
        (lambda: nn.Sequential(nn.Linear(9, 9)), "no linear layer at its end"),
    ],
    ids=["another loss", "no call", "no head"],
)
def test_models_that_compute_no_such_loss(make: Call, reason: str, root: Any) -> None:
    with pytest.raises(Refused, match=reason):
        root(make()).running(**batch())


def test_a_head_that_does_more_is_refused(root: Any) -> None:
    module = Net()
    module.head.register_forward_hook(lambda *args: None)
    with pytest.raises(Refused, match="not a plain linear layer"):
        root(module)


def test_the_loss_is_differentiated_once(root: Any) -> None:
    loss = root(Net()).running(**batch())[1]
    loss.backward(retain_graph=True)
    with pytest.raises(Refused, match="backward twice"):
        loss.backward()
    loss = root(Net()).running(**batch())[1]
    with pytest.raises(Refused, match="create_graph"):
        loss.backward(create_graph=True)


def test_it_is_proven_like_any_other(root: Any) -> None:
    torch.manual_seed(0)
    module, kwargs = Net(), batch()
    held = root(module)
    held.facts = learn.describe(module, (), kwargs)
    facts = Facts(roots=(held.facts,))
    plan = Plan.of({"loss": "chunked"})
    prove(held, plan, (), kwargs, facts)
    module.after = lambda logits: logits.detach() + logits * 0  # of another kind: it is computed
    with pytest.raises(Refused):
        prove(root(module), plan, (), kwargs, facts)


def test_it_is_proven_where_the_model_enters_autocast_by_itself(root: Any) -> None:
    torch.manual_seed(0)
    module, kwargs = Net(), batch()
    plain = module.forward
    module.forward = torch.autocast("cpu", dtype=torch.bfloat16)(plain)  # type: ignore[method-assign]
    held = root(module)
    held.facts = learn.describe(module, (), kwargs)
    facts = Facts(roots=(held.facts,))  # as in a process whose first call it is
    prove(held, Plan.of({"loss": "chunked"}), (), kwargs, facts)
    assert held.proof.autocasts


def test_where_it_is_worth_it() -> None:
    loss, made = get("loss"), learn.describe(Net(), (), batch())
    assert made.classes == WORDS
    assert "67 outputs" in (loss.inapplicable("chunked", Facts(roots=(made,))) or "")
    wide = RootFacts(
        name="M", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", classes=32000
    )
    assert loss.inapplicable("chunked", Facts(roots=(wide,))) is None
    assert loss.fidelity("chunked", Facts(roots=(wide,))) is Fidelity.EXACT
    assert loss.fidelity("chunked", Facts(roots=(wide,), autocast=True)) is Fidelity.ROUNDING
    assert "float16" in (loss.inapplicable("chunked", Facts(roots=(wide,), scaler=True)) or "")


def test_heads_of_models_that_do_not_name_theirs() -> None:
    net = Net()
    assert find_head(net) is net.head
    assert find_head(nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8))) is None


@pytest.mark.full
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere", "Bert", "T5"])
def test_hugging_face_models(family: str, root: Any) -> None:
    module, kwargs = hugging_face(family)
    module.train()
    expected = module(**kwargs)
    expected.loss.backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    for levels in ({}, {"micro_batch": "2"}, {"checkpointing": "all"}):
        module.zero_grad()
        held = root(module, **levels)
        output = held.running(**kwargs)
        output.loss.backward()
        held.take_back()
        assert isinstance(output.logits, Deferred)
        assert torch.allclose(output.loss, expected.loss, rtol=1e-5)
        assert torch.allclose(output.logits.value(), expected.logits, rtol=1e-4, atol=1e-5)
        found = [p.grad for p in module.parameters() if p.grad is not None]
        for one, other in zip(found, gradients, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def hugging_face(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a tiny model of a family and its batch."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "T5":
        own = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2}
        sizes |= own | {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    if family == "Gemma2":
        sizes |= {"head_dim": 8, "final_logit_softcapping": 2.0}
    if family == "Bert":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    suffix = {"Bert": "MaskedLM", "T5": "ConditionalGeneration"}.get(family, "CausalLM")
    model = getattr(transformers, f"{family}For{suffix}")
    module: nn.Module = model(getattr(transformers, f"{family}Config")(**sizes))
    tokens = torch.randint(3, WORDS, (4, 10))
    labels = tokens.clone()
    labels[1, 5:] = -100
    return module, {"input_ids": tokens, "labels": labels}


@pytest.mark.full
def test_fewer_bytes() -> None:
    """Of a step's worst moment; the head of a small model makes nearly all of them."""
    if build.shim() is None:
        pytest.skip("the memory of a CPU is counted to the byte only with a C compiler")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**meter_environment()},
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = json.loads(ran.stdout)
    assert peaks["chunked"] < 0.4 * peaks["as_is"], peaks
    assert peaks["chunked, split"] < 0.5 * peaks["split"], peaks


def meter_environment() -> dict[str, str]:
    import os

    return {**os.environ, **meter.environment("cpu", None)}


MEASURE = """
import json
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from torch import nn
from autofit.plan import Plan
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.patching.observers import Calls, Seams

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8192, 16)
        self.head = nn.Linear(16, 8192)
    def forward(self, x, y):
        logits = self.head(self.embedding(x))
        return logits, nn.functional.cross_entropy(logits.view(-1, 8192), y.view(-1))

class Handler:
    def __getattr__(self, name):
        return lambda *args: args[-1]() if name == "backward" else None

gauge.arm()
model = Net()
x = torch.randint(8192, (32, 64))
split = {"micro_batch": "8"}
plans = {"as_is": {}, "chunked": {"loss": "chunked"}, "split": split,
         "chunked, split": {"loss": "chunked", **split}}
peaks = {}
for name, levels in plans.items():
    root = HarnessRoot(model, Seams(Handler()), Calls(), lambda *args: False)
    root.apply(Plan.of(levels))
    for _ in range(2):  # the probe of the first call is not what is measured
        model.zero_grad()
        before = gauge.current()
        gauge.reset()
        output = root.running(x, x)
        output[1].backward()
        peaks[name] = gauge.peak().allocated - before
        del output
    root.take_back()
print(json.dumps(peaks))
"""
