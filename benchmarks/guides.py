"""The headlines of well-known guides, replayed: the commands, and the page that shows them.

    python benchmarks/guides.py [--only NAME ...] [--seconds N] [--small] [--out FOLDER]
    python benchmarks/guides.py --page     # writes docs/tutorials/guides.md from the results

Each command runs as it is printed, in a folder with the examples and the plan. ``--only`` takes the
start of a name. ``--seconds`` ends the whole call; a later one can run the rest. ``--small`` has
tiny models, to try this file without a GPU. Writes ``guides.json`` and ``guides.md`` after each
command, and keeps what they hold of others.

A search is measured by what it stored. Of a training, samples a second are the median between its
lines with a loss, without the first ``SETTLING``; peaks are what torch and NVML report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cards import LOSS, SETTLING, largest_use
from grid import EXAMPLES, HERE, RESULTS, merged, programs, stored

from autofit.plan import Plan
from autofit.units import format_duration, format_size
from autofit.worker import meter
from autofit.worker.cluster.versions import versions

PAGE = HERE.parent / "docs" / "tutorials" / "guides.md"
AT_EXIT = HERE / "works" / "at_exit"
LIMIT = 540.0
"""Seconds of a command, after which it is stopped."""
GRACE = 5.0
"""Seconds after that until it is killed."""
LOG_LINES = 6
"""Last lines of a training that are kept, with all lines of autofit's own. What ``search`` and
``explain`` print is kept whole."""
SHORTER = (
    (r"--preset (large|bert-large|1\.1b|7b|8b)", "--preset tiny"),
    (r"--preset distilbert", "--preset tiny --model distilbert"),
    (r"--preset bigbird", "--preset tiny --model big_bird"),
    (r"--memory \S+ ", ""),
    (r"--timeout \S+", "--trials 2"),
)
"""What ``--small`` changes in a command."""

VIT = "examples/image_classifier.py"
BERT = "examples/text_classifier_trainer.py"
LLAMA = "examples/decoder_lm.py"
LARGE = "--preset large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the page."""

    name: str
    line: str
    about: str
    """What stands above it on the page."""
    samples: int = 0
    """Samples of a step, if the command trains."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """What ``plan.json`` holds, if the command reads it."""

    @property
    def document(self) -> str:
        """The text of ``plan.json``."""
        return json.dumps({"plan": dict(self.plan)}, indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A section of the page."""

    title: str
    about: str
    commands: tuple[Command, ...]


GUIDES = (
    Guide(
        title="ViT-L/16 in a twentieth of its memory",
        about="""\
A popular tutorial trains ViT-L/16 with a batch of 64 pictures. It begins at 26.8 GB and combines
techniques until about a twentieth remains. The script is `examples/image_classifier.py`.""",
        commands=(
            Command(
                name="vit-as-it-is",
                line=f"python {VIT} {LARGE} --steps 24 --log-every 1",
                about="The script as it is:",
                samples=64,
            ),
            Command(
                name="vit-search",
                line=f"autofit search --memory 6GiB --timeout 4m {VIT} -- {LARGE} --epochs 99",
                about="The fastest plan for a card of 6 GiB, which a search finds:",
            ),
            Command(
                name="vit-twentieth",
                line=f"autofit run --plan plan.json {VIT} -- {LARGE} --steps 24 --log-every 1",
                about="The least memory: weights, gradients and optimizer state stay on the host.",
                samples=64,
                plan={
                    "sharding": "full_offload",
                    "checkpointing": "all",
                    "optimizer": "fused",
                    "micro_batch": "8",
                },
            ),
        ),
    ),
    Guide(
        title="BERT-large at batch 4",
        about="""\
The performance guide of Hugging Face trains BERT-large with a batch of 4 and 512 tokens. It goes
from 14.9 GB down to 5.4 GB, and becomes faster. The script uses the `Trainer`.""",
        commands=(
            Command(
                name="bert-as-it-is",
                line=f"python {BERT} --preset bert-large --batch-size 4 --steps 40 --log-every 1",
                about="The script as it is:",
                samples=4,
            ),
            Command(
                name="bert-search",
                line=(
                    f"autofit search --memory 5.2GiB --timeout 3m {BERT} -- --preset bert-large"
                    " --batch-size 4 --steps 400"
                ),
                about="The fastest plan within what the guide reached:",
            ),
        ),
    ),
    Guide(
        title="Llama: 16 bytes a parameter",
        about="""\
Guides to fine-tuning count 16 bytes for each parameter under AdamW in float32. Weights and
gradients take four bytes each, and Adam's two moments eight. `autofit explain` measures what holds
the memory at the peak. Gradients are complete at the end of backward only, when most activations
are free again.""",
        commands=(
            Command(
                name="llama-explain",
                line=f"autofit explain {LLAMA} -- --preset 1.1b --batch-size 1",
                about="1.1 billion parameters, one document a step:",
            ),
            Command(
                name="llama-7b-explain",
                line=f"autofit explain {LLAMA} -- --preset 7b --batch-size 1",
                about="6.7 billion parameters need 100 GiB before the first activation:",
            ),
            Command(
                name="llama-7b-full",
                line=(
                    f"autofit run --plan plan.json --memory 24GiB {LLAMA} -- --preset 7b --no-clip"
                    " --steps 12 --log-every 1"
                ),
                about="A full fine-tune of the same model within 24 GiB:",
                samples=16,
                plan={
                    "weights": "bf16_master",
                    "gradient_release": "hosted",
                    "optimizer": "fused",
                    "optimizer_offload": "streamed",
                    "checkpointing": "all",
                    "micro_batch": "2",
                },
            ),
        ),
    ),
    Guide(
        title="Llama: QLoRA",
        about="""\
QLoRA freezes the weights in 4 bits and trains small matrices beside them. This is another training.
So a search tries it only with `--allow recipe`. The script first creates the whole model, for which
it needs memory. In bfloat16 that is half as much as in float32.""",
        commands=(
            Command(
                name="qlora-7b",
                line=(
                    f"autofit run --plan plan.json --memory 16GiB {LLAMA} -- --preset 7b"
                    " --batch-size 1 --steps 16 --log-every 1"
                ),
                about="6.7 billion parameters, created in bfloat16:",
                samples=1,
                plan={
                    "adapters": "qlora",
                    "weights": "bf16",
                    "checkpointing": "all",
                },
            ),
            Command(
                name="qlora-8b",
                line=(
                    f"autofit run --plan plan.json --memory 24GiB {LLAMA} -- --preset 8b"
                    " --batch-size 1 --steps 16 --log-every 1"
                ),
                about="Eight billion parameters, with the larger vocabulary of Llama 3:",
                samples=1,
                plan={
                    "adapters": "qlora",
                    "weights": "bf16",
                    "checkpointing": "all",
                },
            ),
        ),
    ),
    Guide(
        title="DistilBERT and BigBird from their configs",
        about="""\
Both models are made from their configs, with random weights. The `Trainer` trains them, and nothing
is downloaded.""",
        commands=(
            Command(
                name="distilbert-search",
                line=(
                    f"autofit search --memory 4GiB --timeout 3m {BERT} -- --preset distilbert"
                    " --steps 400"
                ),
                about="DistilBERT, 32 sentences of up to 512 tokens:",
            ),
            Command(
                name="bigbird-search",
                line=(
                    f"autofit search --memory 8GiB --timeout 4m {BERT} -- --preset bigbird"
                    " --steps 400"
                ),
                about="BigBird with its sparse attention, 4 texts of up to 4096 tokens:",
            ),
        ),
    ),
    Guide(
        title="SGD with cosine decay",
        about="""\
SGD keeps one moment for each parameter, Adam two. The level `sgd` scales each tensor's step to the
length of Adam's, and follows the script's schedule. ViT-L decays its rate by a cosine. This is
another training, so its losses differ from those of Adam.""",
        commands=(
            Command(
                name="sgd",
                line=f"autofit run --plan plan.json {VIT} -- {LARGE} --steps 24 --log-every 1",
                about="ViT-L with SGD in place of AdamW:",
                samples=64,
                plan={"optimizer": "sgd"},
            ),
        ),
    ),
)
COMMANDS = {command.name: command for guide in GUIDES for command in guide.commands}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a command did; sizes in bytes."""

    name: str
    command: str
    hardware: str
    versions: Mapping[str, str]
    code: int
    seconds: float
    """Of the whole command."""
    plan: Mapping[str, str]
    samples_per_second: float | None = None
    peak_allocated: int | None = None
    """What tensors held at most."""
    peak_device: int | None = None
    """What the process occupied at most, as NVML reports it."""
    losses: Sequence[float] = ()
    """The first and the last loss."""
    log: Sequence[str] = ()


# --- running ------------------------------------------------------------------------------------


def small(line: str) -> str:
    """Return a command for a machine without a GPU."""
    for pattern, shorter in SHORTER:
        line = re.sub(pattern, shorter, line)
    return line


def run(command: Command, line: str, seconds: float, out: Path) -> Row:
    """Run a command for so many seconds at most; copy the store of a search to ``out``."""
    hardware = meter.hardware(meter.default_device())
    with tempfile.TemporaryDirectory(prefix="guides-") as name:
        folder = Path(name)
        shutil.copytree(EXAMPLES, folder / "examples")
        if command.plan:
            (folder / "plan.json").write_text(command.document)
        ran = _Ran.of(line, folder, seconds)
        found = _searched(line, folder) if " search " in line and ran.code == 0 else {}
        if (store := folder / "autofit.db").exists():
            shutil.copy(store, out / f"{command.name}.db")
    whole = line.startswith(("autofit search", "autofit explain"))
    told = [each for each in ran.lines[:-LOG_LINES] if each.startswith("autofit: ")]
    plan = Plan.of(found.get("plan", command.plan))
    return Row(
        name=command.name,
        command=line,
        hardware=hardware.name,
        versions=dict(versions()),
        code=ran.code,
        seconds=round(ran.seconds, 1),
        plan=dict(plan.changes),
        samples_per_second=found.get("samples_per_second", ran.rate(command.samples)),
        peak_allocated=found.get("peak_allocated_bytes", ran.allocated),
        peak_device=found.get("peak_bytes", None if whole else ran.device),
        losses=[ran.losses[0], ran.losses[-1]] if ran.losses else [],
        log=ran.lines if whole else [*told, *ran.lines[-LOG_LINES:]],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """A process that has ended."""

    code: int
    seconds: float
    lines: list[str]
    losses: list[float]
    ticks: list[float]
    """When each loss was printed."""
    allocated: int | None
    device: int | None

    @classmethod
    def of(cls, line: str, folder: Path, seconds: float) -> _Ran:
        """Run a command line in a folder."""
        peaks, tools = folder / "peaks", str(programs(folder))
        paths = [str(AT_EXIT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "COLUMNS": "120",
            "GUIDES_PEAKS": str(peaks),
            "PATH": os.pathsep.join([tools, os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        environment.pop("AUTOFIT_STORAGE", None)
        lines: list[str] = []
        losses: list[float] = []
        ticks: list[float] = []
        started = time.monotonic()
        with largest_use() as used:
            time.sleep(1.0)  # what others hold on the card
            others = used[0]
            child = subprocess.Popen(
                shlex.split(line),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env=environment,
            )
            stops = [
                threading.Timer(seconds, child.terminate),
                threading.Timer(seconds + GRACE, child.kill),
            ]
            for stop in stops:
                stop.start()
            assert child.stdout is not None
            for text in child.stdout:
                lines.append(text.rstrip().replace(f"{folder}/", ""))
                if loss := LOSS.search(text):
                    losses.append(float(loss[1]))
                    ticks.append(time.monotonic())
            code = child.wait()
            for stop in stops:
                stop.cancel()
        last = peaks.read_text().splitlines()[-1].split() if peaks.exists() else None
        return cls(
            code=code,
            seconds=time.monotonic() - started,
            lines=_cleaned(lines),
            losses=losses,
            ticks=ticks,
            allocated=int(last[0]) if last else None,
            device=max(0, used[0] - others) or None,
        )

    def rate(self, samples: int) -> float | None:
        """Return samples a second, if enough steps were printed."""
        between = [b - a for a, b in pairwise(self.ticks)][SETTLING:]
        return samples / statistics.median(between) if samples and len(between) > 2 else None


def _cleaned(lines: Iterable[str]) -> list[str]:
    """Return lines without warnings of libraries and without the paths of this machine."""
    kept = [each for each in lines if "Warning" not in each and "warnings.warn" not in each]
    return [each.replace(sys.prefix, "ENV").replace(str(HERE.parent), "autofit") for each in kept]


def _searched(line: str, folder: Path) -> dict[str, Any]:
    """Return the result that a search has stored, as ``autofit best`` shows it."""
    script, _, arguments = line[line.index("examples/") :].partition(" -- ")
    best = [sys.executable, "-m", "autofit", "best", "--format", "json", script, "--"]
    shown = subprocess.run(
        [*best, *shlex.split(arguments)], capture_output=True, text=True, cwd=folder
    )
    document: dict[str, Any] = json.loads(shown.stdout) if shown.returncode == 0 else {}
    return document


# --- the page -----------------------------------------------------------------------------------

INTRODUCTION = """\
<!-- Written by `python benchmarks/guides.py --page`. Change that file, then run it again. -->

# The well-known guides, replayed

Several guides show how to train a model in less memory. This page takes their headlines and trains
the same models with autofit. No script is changed. The scripts create random weights, so nothing is
downloaded.
"""
MEASURED = """\
The figures come from `benchmarks/guides.py`, which runs each command of this page. *Tensors* is the
peak that PyTorch's allocator reports, and *device* the peak that the process occupied on the card.
"""
MISSING = """\
Commands without figures have not been measured yet.
"""
HEAD = ("run", "samples/s", "tensors", "device", "loss, first and last", "whole command")


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the page with the figures of ``rows``; a command without a row has none."""
    known = {row["name"]: Row(**row) for row in rows if row["name"] in COMMANDS}
    parts = [INTRODUCTION, *([MEASURED] if known else [])]
    parts += [MISSING] if 0 < len(known) < len(COMMANDS) else []
    for guide in GUIDES:
        parts += [f"## {guide.title}\n", f"{guide.about}\n"]
        for command in guide.commands:
            parts += _shown(command, known.get(command.name))
        if found := [known[each.name] for each in guide.commands if each.name in known]:
            parts.append(table(found))
    return "\n".join(parts)


def _shown(command: Command, row: Row | None) -> Iterator[str]:
    yield f"{command.about}\n"
    if command.plan:
        yield f'```json title="plan.json"\n{command.document}```\n'
    yield f"<!-- not run: needs a GPU -->\n```sh\n{command.line}\n```\n"
    if row is not None:
        text = "\n".join(each.rstrip() for each in row.log)
        yield f"```text\n{text}\n```\n"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown, and below it the plans and the devices."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        rate = "" if row.samples_per_second is None else f"{row.samples_per_second:.4g}"
        cells = [
            f"`{row.name}`",
            rate if row.code == 0 else f"ended with exit code {row.code}",
            _size(row.peak_allocated),
            _size(row.peak_device),
            " to ".join(f"{loss:.4g}" for loss in row.losses),
            format_duration(row.seconds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- `{row.name}`: {Plan.of(row.plan)}, on one {row.hardware}" for row in rows]
    return "\n".join(lines) + "\n"


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def main() -> None:
    """Run what was asked for and keep it as it comes, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="start of a command's name (repeatable)")
    parser.add_argument("--seconds", type=float, default=1e9, help="end of the whole call")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(stored(options.out / "guides.json", "rows")))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    for name, command in COMMANDS.items():
        left = end - time.monotonic()
        if left > 0 and (not options.only or name.startswith(tuple(options.only))):
            line = small(command.line) if options.small else command.line
            row = run(command, line, min(LIMIT, left), options.out)
            sys.stdout.write("\n".join([f"$ {line}", *row.log, table([row])]) + "\n")
            sys.stdout.flush()
            _keep(row, options.out)


def _keep(row: Row, folder: Path) -> None:
    """Write a row to the others."""
    path = folder / "guides.json"
    rows = merged(stored(path, "rows"), [asdict(row)], "name")
    order = list(COMMANDS)
    rows = sorted(
        (each for each in rows if each["name"] in order), key=lambda r: order.index(r["name"])
    )
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    written = table([Row(**each) for each in rows])
    (folder / "guides.md").write_text(f"# The guides, replayed\n\n{written}")


if __name__ == "__main__":
    main()
