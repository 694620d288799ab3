"""One script on one and on several cards: autofit's ranks beside DDP and FSDP2 written by hand.

    python benchmarks/cards.py --out FILE [--cards 4] [--work decoder ...] [--run START]
        [--device cpu] [--seconds N]

A row is one run of a script: as it is on one card, under torchrun with its own DDP or FSDP2, and
unmodified under ``autofit run`` with ``ranks``. Scripts print a line with their loss at each step.
Seconds a step are the median between these lines, without the first ``SETTLING`` steps, so start-up
and autofit's checks are left out. A script may also print its own speed. The peak is the largest
memory in use on any card, as NVML reports it every half second. No row starts after N seconds.
``CUDA_VISIBLE_DEVICES`` selects the cards, by number.
Writes what each row found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from grid import EXAMPLES, HERE

SETTLING = 6
"""Steps at the start that are not timed; at most half of the steps."""
STEPS = 30
LARGE_STEPS = 22
"""Steps of a work whose steps take seconds."""
LIMIT = 400.0
"""Seconds of a row, after which it is stopped."""
LOSS = re.compile(r"loss\W+([\d.]+)")
SPEED = re.compile(r"speed ([\d.]+) samples/s")
"""What a script says that times its own steps."""
BYTES = re.compile(r"allocated (\d+) reserved (\d+) host (\d+)")
"""What ``works/allocated.py`` says at the end of a script."""

VISIBLE = tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
"""The numbers of the cards to use; empty for all."""

DECODER = f"{EXAMPLES / 'decoder_lm.py'} --log-every 1"
FAST = "--precision bf16 --optimizer fused"
FAST_PLAN = {"precision": "bf16", "optimizer": "fused"}
TORCHRUN = "-m torch.distributed.run --nproc-per-node {cards}"
RESNET = f"{HERE / 'works' / 'resnet152.py'} --depth 50 --batch 256 --steps 40 --log-every 1"
ALLOCATED = HERE / "works" / "allocated.py"
VIT = f"{ALLOCATED} {EXAMPLES / 'image_classifier.py'} --preset large --log-every 1 --steps 9"
HOST = f"{ALLOCATED} {DECODER} --preset 1.1b --steps 7"
TRAINER = f"{HERE / 'works' / 'gpt2_trainer.py'} --steps 40"


@dataclass(frozen=True, slots=True)
class Row:
    """A run: a command line of ``python``, and autofit's plan if it runs under one."""

    work: str
    name: str
    line: str
    samples: int
    plan: dict[str, str] | None = None
    options: tuple[str, ...] = ()
    """Options of ``autofit run``."""


def rows(device: str, cards: int) -> list[Row]:
    """Return all rows. On the CPU the decoder is the tiny one, to try this file."""
    if device == "cpu":
        return decoder("tiny", cards, device)
    sizes = ["1.1b", "7b", *(["13b"] if cards >= 4 else []), *(["30b"] if cards >= 8 else [])]
    found = [row for preset in sizes for row in decoder(preset, cards, device)]
    for work, line, samples, plan, by_hand in (
        ("gpt2 trainer", TRAINER, 16, {"precision": "bf16"}, "--bf16"),
        ("resnet-50", RESNET, 256, FAST_PLAN, FAST),
    ):
        found += [
            Row(work, "one card, plan", line, samples, plan),
            Row(work, "ddp, by hand", f"{TORCHRUN} {line} {by_hand}", samples),
            Row(work, f"ranks {cards}", line, samples, {**plan, "ranks": str(cards)}),
        ]
    return found + offloaded()


def decoder(preset: str, cards: int, device: str) -> list[Row]:
    """Return rows of one size of the decoder: by hand, and under autofit.

    The largest sizes have none by hand, because each rank would create the whole model.
    """
    large, work = preset not in ("tiny", "1.1b"), f"decoder {preset}"
    saved = {"checkpointing": "all"} if large else {}
    steps = LARGE_STEPS if large else STEPS
    line = f"{DECODER} --steps {steps} --preset {preset} --device {device}"
    by_hand = f"{line} {FAST} --checkpointing" if large else f"{line} {FAST}"
    found = []
    if preset not in ("13b", "30b"):
        found.append(Row(work, "one card, by hand", by_hand, 16))
        for name in ("fsdp2",) if large else ("ddp", "fsdp2"):
            parallel = f"{TORCHRUN} {by_hand} --parallel {name}"
            found.append(Row(work, f"{name}, by hand", parallel, 16))
    fast = {"weights": "bf16_master"} if preset in ("13b", "30b") else FAST_PLAN
    plan = {**fast, **saved, "ranks": str(cards)}
    most = ("--memory", "76GiB") if large else ()
    if not large:
        found.append(Row(work, f"ranks {cards}", line, 16, plan))
    for level in ("full",) if large else ("zero1", "zero2", "full"):
        sharded = {**plan, "sharding": level}
        found.append(Row(work, f"ranks {cards}, {level}", line, 16, sharded, most))
    if cards >= 4 and preset in ("1.1b", "7b"):
        hybrid = {**plan, "sharding": "hybrid"}
        found.append(Row(work, f"ranks {cards}, hybrid", line, 16, hybrid, most))
    return found


def offloaded() -> list[Row]:
    """Return rows of one card that keep weights or optimizer state in host memory."""
    hosted = {"sharding": "full_offload", "checkpointing": "all", "optimizer": "fused"}
    vit, decoder = {**hosted, "micro_batch": "4"}, {**hosted, "micro_batch": "1"}
    least, six = ("--memory", "1.9GiB"), ("--memory", "6GiB")
    streamed = {"optimizer_offload": "streamed", "checkpointing": "all"}
    return [
        Row("host ViT-L", "one card, as it is", VIT, 64),
        Row("host ViT-L", "one card, full_offload", VIT, 64, vit, least),
        Row("host decoder", "one card, as it is", HOST, 16, {"checkpointing": "all"}),
        Row("host decoder", "one card, full_offload", HOST, 16, decoder, six),
        Row("host decoder", "one card, streamed", HOST, 16, streamed),
    ]


@contextmanager
def largest_use() -> Iterator[list[int]]:
    """Yield a list that holds the largest bytes in use on any card since now; 0 without a card."""
    found, ended = [0], threading.Event()

    def watch() -> None:
        with suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            numbers = VISIBLE or range(pynvml.nvmlDeviceGetCount())
            cards = [pynvml.nvmlDeviceGetHandleByIndex(int(number)) for number in numbers]
            while not ended.wait(0.5):
                used = [int(pynvml.nvmlDeviceGetMemoryInfo(card).used) for card in cards]
                found[0] = max(found[0], *used)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def run(row: Row, cards: int) -> dict[str, object]:
    """Run a row; return its seconds a step, samples a second, peak and losses."""
    line, first = row.line.format(cards=cards).split(), (*VISIBLE, "0")[0]
    started = time.monotonic()
    ticks: list[float] = []
    losses: list[float] = []
    last: list[str] = []
    told_by_autofit: list[str] = []
    speed, held = None, {}
    with tempfile.TemporaryDirectory() as folder, largest_use() as used:
        if row.plan is not None:
            (Path(folder) / "plan.json").write_text(json.dumps({"plan": row.plan}))
            plan = ["--plan", f"{folder}/plan.json", "--storage", f"sqlite:///{folder}/a.db"]
            line = ["-m", "autofit", "run", *plan, *row.options, line[0], "--", *line[1:]]
        child = subprocess.Popen(
            [sys.executable, *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=HERE.parent,
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": first} if "one card" in row.name else {}),
        )
        stop = threading.Timer(LIMIT, child.terminate)
        stop.start()
        assert child.stdout is not None
        for text in child.stdout:
            last = [*last[-14:], text.rstrip()]
            if text.startswith("autofit: "):
                told_by_autofit.append(text.rstrip())
            if loss := LOSS.search(text):
                ticks.append(time.monotonic())
                losses.append(float(loss[1]))
            if told := BYTES.search(text):
                names = ("allocated", "reserved", "host")
                held = {name: int(size) for name, size in zip(names, told.groups(), strict=True)}
            if told := SPEED.match(text):
                speed = float(told[1])
        code = child.wait()
        stop.cancel()
    found = {
        "work": row.work,
        "run": row.name,
        "code": code,
        "command_seconds": round(time.monotonic() - started, 1),
        "peak_bytes": used[0],
        "losses": losses[:20],
        "autofit": told_by_autofit,
        **held,
    }
    between = [b - a for a, b in pairwise(ticks)]
    between = between[min(SETTLING, len(between) // 2) :]
    if speed is not None:
        return {**found, "samples_per_second": speed}
    if len(between) < 3:
        return {**found, "said": last}
    seconds = statistics.median(between)
    return {**found, "step_seconds": seconds, "samples_per_second": row.samples / seconds}


def table(found: Sequence[dict[str, object]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| work | run | samples/s | peak of a card | last loss |", "|---|---|---|---|---|"]
    for each in found:
        rate, losses = each.get("samples_per_second"), each["losses"]
        shown = f"{rate:.2f}" if isinstance(rate, float) else f"failed ({each['code']})"
        assert isinstance(losses, list)
        peak = f"{each['peak_bytes'] / (1 << 30):.1f} GiB"  # type: ignore[operator]
        loss = f"{losses[-1]:.6f}" if losses else ""
        lines.append(f"| {each['work']} | {each['run']} | {shown} | {peak} | {loss} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the rows one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", action="append", help="start of a work's name (repeatable)")
    parser.add_argument("--run", default="", help="start of a row's name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row later than this")
    options = parser.parse_args()
    end, found = time.monotonic() + options.seconds, []
    for row in rows(options.device, options.cards):
        wanted = not options.work or row.work.startswith(tuple(options.work))
        wanted = wanted and row.name.startswith(options.run)
        if wanted and time.monotonic() < end:
            found.append(run(row, options.cards))
            sys.stdout.write(json.dumps(found[-1]) + "\n")
            sys.stdout.flush()
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    main()
