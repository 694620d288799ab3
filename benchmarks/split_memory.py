"""Peak memory and time of a split step beside an accumulation loop cut by hand.

    python benchmarks/split_memory.py                  # every case, writes benchmarks/results/
    python benchmarks/split_memory.py --preset small   # smaller models, prints the table only

Every figure comes from a process of its own, on the CPU as the stand-in device: the preloaded
shim counts the bytes of torch's allocator. The loop runs by itself; the split runs the *uncut*
loop under ``autofit run`` with a plan that names the micro-batch. The first step, in which the
optimizer state is made and the split is proven, does not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    Draw = Callable[[], tuple[torch.Tensor, torch.Tensor]]

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ROOMY = "64GiB"
"""A cap that never binds: it brings the shim, and with it the count."""
PARTS = (2, 4, 8)
"""Micro-batches in a batch."""
PRESETS = ("full", "small")
STEPS = 3
"""Of a process, the one that does not count included."""
THREADS = 1
"""Of torch: what else runs on a machine of two cores then disturbs the times least."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and how its batch is cut."""

    model: str
    """``char_lm`` (the loss inside the model) or ``vit`` (outside)."""
    accumulation: int
    """Forward passes a step in the script itself."""
    parts: int
    """Micro-batches a forward pass is cut into."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one process: bytes, and the seconds of its median step."""

    peak: int
    seconds: float
    loss: float
    """The last; the loop and the split train the same."""


@dataclass(frozen=True, slots=True)
class Row:
    """A case measured both ways."""

    case: Case
    micro_batch: int
    loop: Figures
    split: Figures

    @property
    def ratio(self) -> float:
        """Peak bytes of the split over those of the loop."""
        return self.split.peak / self.loop.peak


# --- the parent: one process a figure --------------------------------------------------------


def measure(case: Case, preset: str, folder: Path) -> Row:
    """Measure one case both ways; raise ``CalledProcessError`` where a process fails."""
    size = batch_size(case.model, preset) // case.parts
    script = [str(HERE / "split_memory.py")]
    words = ["--child", case.model, "--preset", preset, "--accumulation", str(case.accumulation)]
    plan = folder / f"micro_batch_{size}.json"
    plan.write_text(json.dumps({"plan": {"micro_batch": str(size)}}))
    capped = [sys.executable, "-m", "autofit.worker.cap", ROOMY, "--", sys.executable]
    run = [sys.executable, "-m", "autofit", "run", "--memory", ROOMY, "--plan", str(plan)]
    run += ["--storage", f"sqlite:///{folder / 'autofit.db'}"]
    loop = _figures([*capped, *script, *words, "--parts", str(case.parts)])
    split = _figures([*run, *script, "--", *words])
    return Row(case, size, loop, split)


def _figures(command: list[str]) -> Figures:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def cases() -> Iterator[Case]:
    """Yield every case."""
    for model, accumulation, parts in product(("char_lm", "vit"), (1, 2), PARTS):
        yield Case(model, accumulation, parts)


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table; sizes in MiB, times in milliseconds."""
    lines = [
        "| model | accumulation in the script | micro-batch | loop, MiB | split, MiB | ratio "
        "| loop, ms a step | split, ms a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = f"{row.loop.peak / 2**20:.2f} | {row.split.peak / 2**20:.2f} | {row.ratio:.4f}"
        times = f"{row.loop.seconds * 1e3:.0f} | {row.split.seconds * 1e3:.0f}"
        where = f"{row.case.model} | {row.case.accumulation} | {row.micro_batch}"
        lines.append(f"| {where} | {sizes} | {times} |")
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Return what the figures were measured with."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {THREADS} thread",
    }


def save(rows: list[Row]) -> None:
    """Write the table and the figures to ``benchmarks/results``."""
    RESULTS.mkdir(exist_ok=True)
    measured = versions()
    facts = ", ".join(f"{name} {value}" for name, value in measured.items())
    largest = max(row.ratio for row in rows)
    heading = (
        "# A split step beside a loop cut by hand\n\n"
        "Written by `python benchmarks/split_memory.py`; what it measures is said there.\n"
        f"Measured with {facts}.\n\n"
        f"Largest ratio of the peaks: {largest:.4f}.\n\n"
    )
    (RESULTS / "split_memory.md").write_text(heading + table(rows))
    content = {
        "command": "python benchmarks/split_memory.py",
        "versions": measured,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    (RESULTS / "split_memory.json").write_text(json.dumps(content, indent=1) + "\n")


# --- the child: trains, and prints its figures ----------------------------------------------


def batch_size(model: str, preset: str) -> int:
    """Return the samples of a forward pass."""
    return {"char_lm": 32, "vit": 64}[model] if preset == "full" else 16


def train(model: str, preset: str, accumulation: int, parts: int) -> Figures:
    """Train a few steps, each batch in ``parts``; return what those after the first took."""
    import torch

    from autofit.worker.meter import for_device

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    module, loss_of, draw = _char_lm(preset) if model == "char_lm" else _vit(preset)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    gauge = for_device("cpu")
    seconds = []
    for step in range(STEPS):
        if step == 1:
            gauge.reset()
        started = time.perf_counter()
        total = 0.0
        for _ in range(accumulation):
            x, y = draw()
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = loss_of(module, xs, ys) / (accumulation * parts)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    return Figures(gauge.peak().allocated, statistics.median(seconds[1:]), total)


def _char_lm(preset: str) -> tuple[torch.nn.Module, Loss, Draw]:
    import torch

    char_model = import_module("char_lm").CharModel
    width, layers, context = (192, 6, 128) if preset == "full" else (64, 2, 64)
    size = batch_size("char_lm", preset)

    def loss_of(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(x, y)
        return loss

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(32, (size, context + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return char_model(32, context, width, 4, layers, 0.0), loss_of, draw


def _vit(preset: str) -> tuple[torch.nn.Module, Loss, Draw]:
    import torch
    from torch.nn import functional as F

    example = import_module("image_classifier")
    size, chosen = batch_size("vit", preset), example.PRESETS["tiny"]

    def loss_of(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x), y, label_smoothing=0.1)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        pictures = torch.randn(size, 3, chosen.size, chosen.size)
        return pictures, torch.randint(chosen.classes, (size,))

    return example.VisionTransformer(chosen, 0.0), loss_of, draw


def main() -> None:
    """Measure every case, or be the child of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="full")
    parser.add_argument("--child", choices=("char_lm", "vit"), help=argparse.SUPPRESS)
    parser.add_argument("--accumulation", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        sys.path.insert(0, str(HERE.parent / "examples"))
        figures = train(asked.child, asked.preset, asked.accumulation, asked.parts)
        sys.stdout.write(json.dumps(asdict(figures)) + "\n")
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            rows.append(measure(case, asked.preset, Path(folder)))
            sys.stdout.write(table(rows).splitlines()[-1] + "\n")
            sys.stdout.flush()
    if asked.preset == "full":
        save(rows)


if __name__ == "__main__":
    main()
