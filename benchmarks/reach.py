"""Searches beside what was written by hand, on the same card in the same run: figures to reach.

    python benchmarks/reach.py --out FOLDER [--case vit-8GiB ...] [--seconds N] [--cards 0,1]

Each case is a script without flags and a budget: a search with a store of its own, then runs with
flags written by hand (`examples/_by_hand.py`) within the same budget. Compiled kernels are kept in
a folder of the case's own, so no search gains from another. With two cards two cases run side by
side, one a card. No case starts after N seconds. Writes to FOLDER for each case: ``CASE.json``,
``CASE.log`` with what the search printed, and its store ``CASE.db``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grid import EXAMPLES, HERE, RESULTS, Figure, Work, command_line, measure

from autofit.storage import Purpose, Store
from autofit.units import format_size, parse_size
from autofit.worker import meter

CARD = "card"
"""The budget of a search that names none."""
FUSED = "--precision bf16 --optimizer fused"
EIGHT_BIT = "--precision bf16 --optimizer 8bit"
SEARCH_SECONDS = 300.0
"""A search is interrupted after so many, as by Ctrl-C."""

VIT = ("image_classifier.py", "--preset large --epochs 100")
BERT = ("text_classifier_trainer.py", "--preset bert-large --steps 4000")
DECODER = ("decoder_lm.py", "--preset 1.1b --steps 2000")
GPT2 = ("gpt2_xl.py", "")
T5 = ("t5_loop.py", "--steps 2000")
RESNET = ("resnet152.py", "")


@dataclass(frozen=True, slots=True)
class Case:
    """A script, a budget, and what one would try by hand."""

    name: str
    script: str
    arguments: str
    memory: str
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where the script is."""
        folder = EXAMPLES if (EXAMPLES / self.script).exists() else HERE / "works"
        return folder / self.script


CASES = (
    Case(
        "vit-card",
        *VIT,
        CARD,
        (f"{FUSED} --compile regional", f"{FUSED} --compile full"),
    ),
    Case(
        "vit-8GiB",
        *VIT,
        "8GiB",
        (
            f"{FUSED} --checkpointing --compile regional",
            f"{FUSED} --micro-batch 16 --compile regional",
            f"{EIGHT_BIT} --checkpointing --compile regional",
        ),
    ),
    Case(
        "vit-10GiB",
        *VIT,
        "10GiB",
        (
            f"{FUSED} --checkpointing --compile regional",
            f"{FUSED} --micro-batch 16 --compile regional",
            f"{EIGHT_BIT} --micro-batch 32 --compile regional",
        ),
    ),
    Case(
        "bert-card",
        *BERT,
        CARD,
        (FUSED, f"{FUSED} --compile regional"),
    ),
    Case(
        "bert-6GiB",
        *BERT,
        "6GiB",
        (f"{EIGHT_BIT} --checkpointing", f"{EIGHT_BIT} --checkpointing --compile regional"),
    ),
    Case(
        "bert-12GiB",
        *BERT,
        "12GiB",
        (
            f"{FUSED} --checkpointing --compile regional",
            f"{FUSED} --micro-batch 8 --compile regional",
            f"{EIGHT_BIT} --micro-batch 16 --compile regional",
        ),
    ),
    Case(
        "decoder-card",
        *DECODER,
        CARD,
        (f"{FUSED} --compile regional", f"{FUSED} --micro-batch 8 --compile regional"),
    ),
    Case(
        "decoder-24GiB",
        *DECODER,
        "24GiB",
        (
            f"{EIGHT_BIT} --checkpointing --micro-batch 8 --compile regional",
            f"{EIGHT_BIT} --checkpointing --micro-batch 4 --compile regional",
            f"{FUSED} --checkpointing --micro-batch 2 --compile regional",
        ),
    ),
    Case(
        "gpt2xl-card",
        *GPT2,
        CARD,
        (f"{FUSED} --compile regional", FUSED),
    ),
    Case(
        "gpt2xl-30GiB",
        *GPT2,
        "30GiB",
        (
            f"{EIGHT_BIT} --checkpointing --compile regional",
            f"{FUSED} --checkpointing --micro-batch 4 --compile regional",
            f"{EIGHT_BIT} --micro-batch 2 --compile regional",
        ),
    ),
    Case(
        "gpt2xl-40GiB",
        *GPT2,
        "40GiB",
        (
            f"{FUSED} --checkpointing --compile regional",
            f"{FUSED} --micro-batch 2 --compile regional",
            f"{EIGHT_BIT} --micro-batch 4 --compile regional",
        ),
    ),
    Case(
        "t5-16GiB",
        *T5,
        "16GiB",
        (
            f"{EIGHT_BIT} --checkpointing --compile regional",
            f"{FUSED} --checkpointing --micro-batch 16 --compile regional",
            f"{EIGHT_BIT} --micro-batch 8 --compile regional",
        ),
    ),
    Case(
        "resnet-card",
        *RESNET,
        CARD,
        (f"{FUSED} --channels-last", f"{FUSED} --channels-last --compile regional"),
    ),
)


def search(case: Case, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Search; return what the command and its store say."""
    storage = f"sqlite:///{(out / case.name).resolve()}.db"
    asked = [] if case.memory == CARD else ["--memory", case.memory]
    script = [str(case.path.relative_to(HERE.parent)), "--", *case.arguments.split()]
    command = [sys.executable, "-m", "autofit", "search", "--json", "--storage", storage]
    started = time.monotonic()
    with (out / f"{case.name}.log").open("w") as printed:
        child = subprocess.Popen(
            [*command, *asked, *script],
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            cwd=HERE.parent,
            env=environment,
        )
        try:
            text, _ = child.communicate(timeout=SEARCH_SECONDS)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            text, _ = child.communicate()
    seconds = time.monotonic() - started
    document = json.loads(text) if child.returncode == 0 else {}
    return {"code": child.returncode, "command_seconds": seconds, **facts_of(storage), **document}


def facts_of(storage: str) -> dict[str, Any]:
    """Return what the store says of the launches: number, start-up seconds, lost to memory."""
    with Store(storage) as store:
        studies = store.studies()
        trials = store.trials(studies[-1]) if studies else []
    starts: dict[int, float] = {}
    lost = set()
    for trial in trials:
        if trial.report is None:
            continue
        starts.setdefault(trial.launch, trial.report.startup_seconds)
        if str(trial.verdict) == "out_of_memory" and trial.purpose is Purpose.SEARCH:
            lost.add(trial.launch)
    return {
        "start_seconds": sum(starts.values()),
        "launches_of_search": len({t.launch for t in trials if t.purpose is Purpose.SEARCH}),
        "launches_lost": len(lost),
        "trials_told": [
            [str(t.plan), str(t.verdict), t.measurement.samples_per_second if t.measurement else 0]
            for t in trials
        ],
    }


def run(case: Case, card: str, out: Path) -> None:
    """Search one case on one card, then run by hand there; write what was found."""
    kernels = out / f"kernels-{case.name}"
    seen = {"CUDA_VISIBLE_DEVICES": card} if card else {}
    environment = os.environ | seen | {"TORCHINDUCTOR_CACHE_DIR": str(kernels)}
    found = search(case, out, environment)
    _write(case, out, found, [])
    done = subprocess.run(
        [sys.executable, __file__, "--by-hand", case.name],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=HERE.parent,
    )
    figures = [Figure(**json.loads(line)) for line in done.stdout.splitlines() if line[:1] == "{"]
    _write(case, out, found, figures)


def by_hand(case: Case) -> None:
    """Run the case's flags, and print a line of JSON for each."""
    device = meter.default_device()
    card = meter.hardware(device).total_bytes
    memory = meter.free_bytes(device) if case.memory == CARD else min(card, parse_size(case.memory))
    work = Work(case.name, str(case.path), tuple(case.arguments.split()), ())
    for flags in case.flags:
        sys.stdout.write(json.dumps(asdict(measure(work, flags, memory=memory))) + "\n")
        sys.stdout.flush()


def _write(case: Case, out: Path, found: dict[str, Any], figures: Sequence[Figure]) -> None:
    document = {
        "case": case.name,
        "memory": case.memory,
        "command": command_line(),
        "found": found,
        "by_hand": [asdict(each) for each in figures],
    }
    (out / f"{case.name}.json").write_text(json.dumps(document, indent=1) + "\n")


def table(documents: Sequence[dict[str, Any]]) -> str:
    """Return the cases as a table in Markdown."""
    lines = [
        "| case | card | plan | samples/s | peak | best by hand | of it | launches (lost) "
        "| seconds | seconds to start the script |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in documents:
        found = each["found"]
        speeds = {f["flags"]: f["samples_per_second"] or 0.0 for f in each["by_hand"]}
        flags = max(speeds, key=lambda name: speeds[name], default="")
        best = speeds.get(flags, 0.0)
        hand = f"{best:.1f} ({flags or 'as it is'})" if best else "none fits"
        total = found.get("launches", found["launches_of_search"])
        counts = f"{total} ({found['launches_lost']})"
        clock = f"{found['command_seconds']:.0f} | {found['start_seconds']:.0f}"
        if "plan" not in found:
            lines.append(f"| {each['case']} | | no plan | | | {hand} | | {counts} | {clock} |")
            continue
        plan = ", ".join(f"{k} {v}" for k, v in found["plan"].items() if v != "as_is")
        rate = found["samples_per_second"]
        share = f"{rate / best:.2f}" if best else ""
        lines.append(
            f"| {each['case']} | {found['hardware']['name']} | {plan} | {rate:.1f} "
            f"| {format_size(found['peak_bytes'])} | {hand} | {share} | {counts} | {clock} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases, one at a time on each card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case later than this")
    parser.add_argument("--cards", default="", help="indices, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS / "reach")
    parser.add_argument("--by-hand", help=argparse.SUPPRESS)
    options = parser.parse_args()
    named = {case.name: case for case in CASES}
    if options.by_hand:
        by_hand(named[options.by_hand])
        return
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for name in options.case or named:
        todo.put(named[name])
    end = time.monotonic() + options.seconds

    def work(card: str) -> None:
        while time.monotonic() < end:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                return
            run(case, card, options.out)
            sys.stderr.write(f"{time.monotonic() - end + options.seconds:.0f} s: {case.name}\n")

    threads = [threading.Thread(target=work, args=(card,)) for card in options.cards.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    documents = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    sys.stdout.write(table(documents))


if __name__ == "__main__":
    main()
