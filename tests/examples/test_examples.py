"""The examples as a person runs them: each trains a few steps in a process of its own."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., list[float]]

CHAR_LM = ("char_lm.py", "--batch-size", "4", "--layers", "2", "--width", "64", "--heads", "2")
IMAGES = ("image_classifier.py", "--pictures", "256", "--batch-size", "32")
TEXTS = ("text_classifier_trainer.py", "--sentences", "640")
DISTILBERT = (*TEXTS, "--model", "distilbert")
BIGBIRD = (*TEXTS, "--model", "big_bird")
DECODER = ("decoder_lm.py",)


@pytest.fixture
def losses_of(root: Path, tmp_path: Path) -> Run:
    """Run an example on the CPU and return the loss of every step."""

    def run(script: str, *arguments: str) -> list[float]:
        file = tmp_path / "losses"
        command = [sys.executable, str(root / "examples" / script), *arguments]
        finished = subprocess.run(
            [*command, "--device", "cpu", "--losses", str(file)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.splitlines()[-1].startswith("done: ")
        assert [path.name for path in tmp_path.iterdir()] == ["losses"]
        return [float(line) for line in file.read_text().splitlines()]

    return run


def mean(values: list[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("example", "steps"),
    [
        pytest.param(CHAR_LM, 24, id="char_lm", marks=pytest.mark.quick),
        pytest.param(IMAGES, 24, id="image_classifier", marks=pytest.mark.full),
        pytest.param(TEXTS, 40, id="text_classifier_trainer", marks=pytest.mark.full),
        pytest.param(DISTILBERT, 60, id="distilbert", marks=pytest.mark.full),
        pytest.param(BIGBIRD, 40, id="bigbird", marks=pytest.mark.full),
        pytest.param(DECODER, 40, id="decoder_lm", marks=pytest.mark.full),
    ],
)
def test_the_loss_goes_down(losses_of: Run, example: tuple[str, ...], steps: int) -> None:
    losses = losses_of(*example, "--steps", str(steps))
    assert len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)
    assert mean(losses[-4:]) < 0.95 * mean(losses[:4])


@pytest.fixture
def over_ranks(root: Path, tmp_path: Path) -> Callable[..., list[float]]:
    """Run the decoder on so many ranks, as torchrun starts them; return every step's loss."""

    def run(ranks: int, *arguments: str) -> list[float]:
        file = tmp_path / "losses"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(ranks)]
        script = [str(root / "examples" / "decoder_lm.py"), "--device", "cpu"]
        command = [*start, *script, "--losses", str(file), "--steps", "4", *arguments]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.count("done: ") == 1
        return [float(line) for line in file.read_text().splitlines()]

    return run


@pytest.mark.full
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_ranks_take_the_steps_of_one(over_ranks: Callable[..., list[float]], way: str) -> None:
    one = over_ranks(1, "--parallel", way)
    assert over_ranks(2, "--parallel", way) == pytest.approx(one, rel=1e-5)
    by_hand = ("--micro-batch", "2", "--checkpointing")
    assert over_ranks(2, "--parallel", way, *by_hand) == pytest.approx(one, rel=1e-5)


@pytest.mark.full
def test_the_commands_in_the_readme_run(root: Path) -> None:
    readme = (root / "examples" / "README.md").read_text()
    over_ranks = [line.split() for line in readme.splitlines() if line.startswith("torchrun ")]
    assert len(over_ranks) == 1
    for _, *words in over_ranks:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words], cwd=root, check=True
        )
    commands = [line for line in readme.splitlines() if line.startswith("python examples/")]
    assert {command.split()[1] for command in commands} == {
        f"examples/{path.name}" for path in (root / "examples").glob("[!_]*.py")
    }
    for command in commands:
        subprocess.run([sys.executable, *command.split()[1:]], cwd=root, check=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "example", [CHAR_LM, IMAGES, TEXTS, DECODER], ids=lambda example: example[0]
)
def test_the_same_seed_gives_the_same_losses(losses_of: Run, example: tuple[str, ...]) -> None:
    first = losses_of(*example, "--steps", "3")
    assert losses_of(*example, "--steps", "3") == first
    assert losses_of(*example, "--steps", "3", "--seed", "1") != first


@pytest.mark.full
@pytest.mark.parametrize("example", [IMAGES, TEXTS], ids=lambda example: example[0])
def test_accumulation_counts_optimizer_steps(losses_of: Run, example: tuple[str, ...]) -> None:
    plain = losses_of(*example, "--steps", "3")
    accumulated = losses_of(*example, "--steps", "3", "--accumulation", "2")
    assert len(accumulated) == 3
    assert mean(accumulated) == pytest.approx(mean(plain), rel=0.1)


@pytest.mark.full
def test_char_lm_does_not_depend_on_how_its_batch_is_split(losses_of: Run) -> None:
    arguments = (*CHAR_LM, "--steps", "3", "--dtype", "float64")
    whole = losses_of(*arguments, "--batch-size", "8")
    split = losses_of(*arguments, "--batch-size", "4", "--accumulation", "2")
    assert split == pytest.approx(whole, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("example", [IMAGES, TEXTS, DECODER], ids=lambda example: example[0])
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        (("--micro-batch", "4", "--checkpointing"), 1e-5),
        (("--optimizer", "fused"), 1e-5),
        (("--precision", "bf16"), 1e-2),
    ],
    ids=["micro-batch", "fused", "bf16"],
)
def test_tuned_by_hand_it_trains_the_same(
    losses_of: Run, example: tuple[str, ...], flags: tuple[str, ...], tolerance: float
) -> None:
    plain = losses_of(*example, "--steps", "3")
    assert losses_of(*example, "--steps", "3", *flags) == pytest.approx(plain, rel=tolerance)
