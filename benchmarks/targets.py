"""Searches of the examples under budgets that leave little room: figures to reach.

    python benchmarks/targets.py [--target vit-2.5GiB ...] [--seconds N] [--out FOLDER]

Each has a store of its own. What a search printed is in ``search-TARGET.log``, with its command,
and what it found in ``search-TARGET.json``.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from grid import EXAMPLES, RESULTS


@dataclass(frozen=True, slots=True)
class Target:
    """A search, as it is asked for."""

    name: str
    options: str
    script: str
    arguments: str


VIT = ("image_classifier.py", "--preset large --epochs 100 --no-clip")
BERT = ("text_classifier_trainer.py", "--preset bert-large --batch-size 4 --steps 400")
DECODER = "decoder_lm.py"
ADAPTED = "--allow recipe --only adapters --only precision --only checkpointing --only micro_batch"
TARGETS = (
    Target("bert-15GiB-batch-4-as-it-is", "--memory 15GiB --trials 1", *BERT),
    Target("bert-4.7GiB-batch-4", "--memory 4.7GiB --allow rounding", *BERT),
    Target("vit-2.5GiB-no-clip", "--memory 2.5GiB --allow rounding --trials 5", *VIT),
    Target("vit-2.2GiB-recipe", "--memory 2.2GiB --allow recipe --trials 9", *VIT),
    Target("decoder-lora-12GiB", f"--memory 12GiB {ADAPTED}", DECODER, "--preset 1.1b --steps 200"),
    Target(
        "decoder-qlora-6.5GiB",
        f"--memory 6.5GiB {ADAPTED}",
        DECODER,
        "--preset 1.1b --steps 200 --batch-size 2",
    ),
    Target(
        "decoder-7b-24GiB",
        "--memory 24GiB --allow rounding --timeout 4m",
        DECODER,
        "--preset 7b --no-clip",
    ),
)


def search(target: Target, folder: Path, out: Path, seconds: float) -> bool:
    """Search, interrupted as by Ctrl-C after so many seconds; return whether a plan was found."""
    script = [f"{EXAMPLES.name}/{target.script}", "--", *target.arguments.split()]
    asked = ["search", *target.options.split(), *script]
    storage = ["--storage", f"sqlite:///{folder / target.name}.db"]
    log = out / f"search-{target.name}.log"
    with log.open("w") as printed:
        printed.write(f"$ autofit {' '.join(asked)}\n")
        printed.flush()
        command = [sys.executable, "-m", "autofit", asked[0], *storage, "--json", *asked[1:]]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=printed, text=True, cwd=EXAMPLES.parent
        ) as running:
            try:
                written, _ = running.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGINT)
                written, _ = running.communicate()
    if running.returncode != 0:
        return False
    found = json.loads(written)
    found["script"]["cwd"] = "."
    (out / f"search-{target.name}.json").write_text(json.dumps(found, indent=2) + "\n")
    return True


def main() -> None:
    """Search what was asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=[each.name for each in TARGETS])
    parser.add_argument("--seconds", type=float, default=900.0, help="of each search at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            if not arguments.target or target.name in arguments.target:
                found = search(target, Path(folder), arguments.out, arguments.seconds)
                sys.stderr.write(f"{target.name}: {'found' if found else 'nothing found'}\n")


if __name__ == "__main__":
    main()
