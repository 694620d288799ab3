"""How much longer a script takes under ``autofit run``, without what the plan costs in each step.

    python benchmarks/startup.py [--rounds 5]

The examples run on the CPU, plainly and under a plan for which the store has evidence, for one step
and for two, in turn. What the second step adds is what a step costs; it is taken off the first.
The figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = ("char_lm.py", "decoder_lm.py", "image_classifier.py", "text_classifier_trainer.py")
PLAN = {"plan": {"checkpointing": "all"}}


def seconds(command: list[str], folder: Path) -> float:
    """Return how long a command took; end where it fails."""
    started = time.perf_counter()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return time.perf_counter() - started


def main() -> None:
    """Measure each example and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(PLAN))
        run = [sys.executable, "-m", "autofit", "run", "--plan", "plan.json"]
        for script in SCRIPTS:
            path = str(EXAMPLES / script)
            steps = {n: ["--steps", str(n)] for n in (1, 2)}
            for more in steps.values():
                seconds([*run, path, "--", *more], folder)  # which verifies the plan
            taken: dict[tuple[str, int], list[float]] = defaultdict(list)
            for _ in range(options.rounds):
                for n, more in steps.items():
                    taken["plain", n].append(seconds([sys.executable, path, *more], folder))
                    taken["tuned", n].append(seconds([*run, path, "--", *more], folder))
            took = {key: statistics.median(found) for key, found in taken.items()}
            step = {kind: took[kind, 2] - took[kind, 1] for kind in ("plain", "tuned")}
            later = (took["tuned", 1] - step["tuned"]) - (took["plain", 1] - step["plain"])
            sys.stdout.write(
                f"{script:28} plain {took['plain', 1]:5.2f} s, of which a step {step['plain']:.2f};"
                f" under the plan {took['tuned', 1]:5.2f} s, of which a step {step['tuned']:.2f}:"
                f" start {later:+.2f} s\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
