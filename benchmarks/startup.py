"""How much later a script is at its end under ``autofit run``, of which most is the start.

    python benchmarks/startup.py [--pairs 5]

The examples take two steps on the CPU, plainly and under a plan for which the store has evidence,
in turn. The figure is the median of the differences.
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
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS: dict[str, list[str]] = {
    "char_lm.py": ["--steps", "2"],
    "decoder_lm.py": ["--steps", "2"],
    "image_classifier.py": ["--steps", "2"],
    "text_classifier_trainer.py": ["--steps", "2"],
}
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
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(PLAN))
        run = [sys.executable, "-m", "autofit", "run", "--plan", "plan.json"]
        for script, arguments in SCRIPTS.items():
            plain = [sys.executable, str(EXAMPLES / script), *arguments]
            tuned = [*run, str(EXAMPLES / script), "--", *arguments]
            seconds(tuned, folder)  # which verifies the plan
            pairs = [(seconds(plain, folder), seconds(tuned, folder)) for _ in range(options.pairs)]
            alone = statistics.median(one for one, _ in pairs)
            later = statistics.median(other - one for one, other in pairs)
            sys.stdout.write(f"{script:28} plain {alone:5.2f} s, under a plan {later:+.2f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
