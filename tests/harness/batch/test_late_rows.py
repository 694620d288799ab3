"""Large outputs beside the loss take memory only if the script uses them, and are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.batch import late_rows
from autofit.worker.harness.batch.call_state import CallState, Rows
from autofit.worker.harness.batch.late_output import LateOutput
from autofit.worker.harness.session.real_run import RealRun
from tests.harness.real_runs import running

pytestmark = pytest.mark.quick

SAMPLES, TOKENS, WORDS = 8, 64, 4096
LOGITS = SAMPLES * TOKENS * WORDS * 4


class Model(nn.Module):
    """A language model that returns its loss and its logits."""

    def __init__(self, words: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, words)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.dropout(torch.tanh(self.tokens(x))))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Live(TorchDispatchMode):
    """Notes the most bytes that operations have made and that exist together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.device.type == "cpu":
                reference = StorageWeakRef(each.untyped_storage())
                self._made[reference.cdata] = reference, each.untyped_storage().nbytes()
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return found


def state_of(run: RealRun) -> CallState:
    """Return what the calls of the run's root have shown."""
    chunked = run.roots[0].splits.chunked
    assert chunked is not None
    return chunked.state


def batch(words: int) -> Tensor:
    return torch.randint(words, (SAMPLES, TOKENS))


@pytest.fixture
def split() -> Iterator[RealRun]:
    with running(Plan.of({"micro_batch": "1"})) as run:
        yield run


@pytest.mark.parametrize("named", [False, True], ids=["dropped", "named"])
def test_logits_that_nobody_reads_take_no_memory(
    monkeypatch: pytest.MonkeyPatch, split: RealRun, named: bool
) -> None:
    monkeypatch.setattr(late_rows, "LARGE", LOGITS)
    model, x = Model(WORDS), batch(WORDS)
    model(x, x)["loss"].backward()
    for _ in range(2):
        model.zero_grad()
        with Live() as live:
            output = model(x, x)
            loss = output["loss"]
            if not named:
                del output
            loss.backward()
        assert 2 * LOGITS / SAMPLES < live.most < (4 / SAMPLES if not named else 1.75) * LOGITS
    assert state_of(split).rows is (Rows.ON_DEVICE if named else Rows.NOWHERE)


def before_backward(output: Any) -> list[Tensor]:
    found = [output["logits"].argmax(-1), output["logits"][1:3].detach().clone()]
    output["loss"].backward()
    return found


def after_backward(output: Any) -> list[Tensor]:
    output["loss"].backward()
    return [output["logits"].detach().clone(), output["logits"].mean().detach()]


def differentiated(output: Any) -> list[Tensor]:
    (output["loss"] + output["logits"].square().mean()).backward()
    return []


def alone(output: Any) -> list[Tensor]:
    logits = output["logits"]
    del output
    logits.logsumexp(-1).mean().backward()
    return [logits.detach().clone()]


@pytest.mark.parametrize("use", [before_backward, after_backward, differentiated, alone, None])
@pytest.mark.parametrize("micro_batch", ["1", "3"])
def test_a_script_that_uses_them_trains_the_same(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Any], list[Tensor]] | None, micro_batch: str
) -> None:
    monkeypatch.setattr(late_rows, "LARGE", 0)

    def train(*, split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = Model(17).double(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            x = batch(17)
            output = model(x, x)
            assert step or (type(output["logits"]) is LateOutput) is split
            assert output["logits"].shape == (SAMPLES, TOKENS, 17)
            if use is not None and step != 1:
                found += use(output)
            else:
                output["loss"].backward()
            optimizer.step()
            if use is None and step != 2:
                found.append(output["logits"].detach().clone())
            optimizer.zero_grad()
            found.append(output["loss"].detach())
        return [*found, *(p.detach() for p in model.parameters())]

    with running(Plan.of({"micro_batch": micro_batch})):
        found = train(split=True)
    expected = train(split=False)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("read", [True, False], ids=["read", "left"])
def test_they_belong_to_the_loss_where_numbers_are_drawn(
    monkeypatch: pytest.MonkeyPatch, split: RealRun, read: bool
) -> None:
    monkeypatch.setattr(late_rows, "LARGE", 0)
    model, x = Model(17, dropout=0.5), batch(17)
    for _ in range(3):
        output = model(x, x)
        drawn = torch.get_rng_state()
        if not read:
            output["loss"].backward()
        logits = output["logits"].detach().flatten(0, 1)
        loss = functional.cross_entropy(logits, x.flatten())
        assert torch.equal(torch.get_rng_state(), drawn)
        torch.testing.assert_close(loss, output["loss"].detach())


def test_each_chunk_runs_once_when_it_is_known_what_is_read(
    monkeypatch: pytest.MonkeyPatch, split: RealRun
) -> None:
    monkeypatch.setattr(late_rows, "LARGE", 0)
    model, x = Model(17), batch(17)
    calls: list[int] = []

    def step(*, reads: bool) -> int:
        before = len(calls)
        output = model(x, x)
        output["loss"].backward()
        if reads:
            assert output["logits"].isfinite().all()
        model.zero_grad()
        return len(calls) - before

    step(reads=False)
    plain = functional.cross_entropy
    monkeypatch.setattr(functional, "cross_entropy", lambda *a: calls.append(1) or plain(*a))  # type: ignore[func-returns-value]
    assert state_of(split).rows is Rows.ON_DEVICE
    assert step(reads=False) == SAMPLES
    assert step(reads=True) == SAMPLES
    assert state_of(split).rows is Rows.ON_DEVICE
    assert step(reads=True) == SAMPLES


def test_what_has_changed_meanwhile_is_not_read(
    monkeypatch: pytest.MonkeyPatch, split: RealRun
) -> None:
    monkeypatch.setattr(late_rows, "LARGE", 0)
    model, x = Model(17), batch(17)
    output = model(x, x)
    x.zero_()
    with pytest.raises(Refused, match="changed between its call and the use"):
        output["logits"].sum()
    output = model(x, x)
    with torch.no_grad():
        model.head.bias.add_(1.0)
    with pytest.raises(Refused, match="changed between its call and the use"):
        output["logits"].sum()


def test_they_go_to_the_host_before_chunks_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_rows, "LARGE", 0)
    short: list[bool] = []

    class Short(Model):
        """Runs out of memory once."""

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if short:
                short.clear()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().forward(x, labels)

    model, x = Short(17), batch(17)
    with running(Plan.of({"micro_batch": "2"})) as run:
        for step in range(3):
            if step == 1:
                short.append(True)
            output = model(x, x)
            output["loss"].backward()
            model.zero_grad()
        assert (state_of(run).rows, run.roots[0].splits.micro_batch) == (Rows.ON_HOST, 2)
        logits = output["logits"].clone()
        assert state_of(run).rows is Rows.ON_DEVICE
    torch.testing.assert_close(logits, model(x, x)["logits"])
