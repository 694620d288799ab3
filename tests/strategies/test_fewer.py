"""A part of the samples, or of each sample's tokens: the gradients are those of that part alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, Fidelity, RootFacts
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport
from tests.roots import Rooted

pytestmark = pytest.mark.quick


class Net(nn.Module):
    """Returns the loss itself, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        if position_ids is not None:
            x = x + position_ids[..., None] / 100
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.randint(32, (samples, length), generator=torch.Generator().manual_seed(3))


def batch(samples: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    x = tokens(samples, length)
    return {
        "input_ids": x,
        "labels": x.roll(1),
        "attention_mask": (x % 3 > 0).long(),
        "position_ids": torch.arange(length)[None],
    }


def gradients(call: Callable[..., Any], net: nn.Module, kwargs: Any) -> torch.Tensor:
    net.zero_grad()
    call(**kwargs)["loss"].backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def called(root: HarnessRoot) -> Callable[..., Any]:
    return lambda **kwargs: root.running(**kwargs)


@pytest.mark.parametrize("split", [{}, {"micro_batch": "2"}], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("levels", "samples", "length"),
    [
        ({"batch_size": "half"}, 4, 6),
        ({"batch_size": "quarter"}, 2, 6),
        ({"sequence_length": "half"}, 8, 3),
        ({"batch_size": "half", "sequence_length": "half"}, 4, 3),
    ],
)
def test_the_gradients_are_those_of_what_is_left(
    rooted: Rooted, levels: dict[str, str], samples: int, length: int, split: dict[str, str]
) -> None:
    net, whole = Net(), batch()
    part = {
        name: each[:samples, :length] if len(each) > 1 else each[:, :length]
        for name, each in whole.items()
    }
    expected = gradients(net, net, part)
    root = rooted(net, **levels, **split)
    found = gradients(called(root), net, whole)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)
    root.take_back()
    assert torch.allclose(gradients(called(root), net, whole), gradients(net, net, whole))


def test_evaluation_sees_the_whole(rooted: Rooted) -> None:
    net = Net()
    root = rooted(net, batch_size="quarter", sequence_length="half")
    with torch.no_grad():
        assert root.running(**batch())["logits"].shape == (8, 6, 32)


def test_what_is_refused(rooted: Rooted) -> None:
    net = Net()
    with pytest.raises(Refused, match="loss outside the model"):
        rooted(net, batch_size="half").running(tokens(8, 6))
    with pytest.raises(Refused, match="same number of samples"):
        rooted(net, batch_size="half").running(tokens(8, 6), tokens(4, 6))
    with pytest.raises(Refused, match="no argument of the model looks like token ids"):
        rooted(net, sequence_length="half").running(torch.randn(8, 6))
    facts = Facts(
        roots=(
            RootFacts(
                name="N", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=2
            ),
        )
    )
    strategies = dict(Plan.of({"batch_size": "quarter"}))
    assert [s.inapplicable("half", facts) for s in strategies] == [None]
    assert [s.inapplicable("quarter", facts) for s in strategies] == [
        "the model sees fewer than 4 samples at a time"
    ]


def test_the_effective_batch_is_what_has_trained() -> None:
    root = RootFacts(
        name="N", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=10
    )
    facts = Facts(roots=(root,), calls_per_step=2)
    assert Plan().effective_batch(facts) == facts.effective_batch == 20
    assert Plan.of({"batch_size": "half"}).effective_batch(facts) == 10
    assert Plan.of({"batch_size": "quarter"}).effective_batch(facts) == 6
    assert Plan.of({"sequence_length": "half"}).effective_batch(facts) == 10
    assert Plan.of({"batch_size": "half"}).fidelity() is Fidelity.RECIPE


SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return (self.layers(x).squeeze(-1) - x.mean(-1)).square().mean()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(12, 16)).backward()
    optimizer.step()
"""


@pytest.mark.full
def test_reports_say_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(), Plan.of({"batch_size": "quarter"})),
        device="cpu",
        budget=1 << 32,
        timeout=60,
        steps=3,
    )
    reports = [each for each in launch(request) if isinstance(each, TrialReport)]
    measured = [each.measurement for each in reports if each.measurement]
    found = [(each.effective_batch, each.micro_batch) for each in measured]
    assert found == [(12, 12), (3, 3)]
