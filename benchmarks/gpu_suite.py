"""Run the tests that need a GPU as they have to be run, and keep their log.

    python benchmarks/gpu_suite.py [--part beside ...] [--seconds N] [--out FOLDER]

Most stand beside one another on one card (eight workers of pytest-xdist). Those that look at the
whole of it, or at seconds, have it to themselves, and the one that fills it comes last; some need
two. Writes ``gpu_suite-PART.log`` of each part; exits with 1 where a test failed.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grid import RESULTS

from autofit.worker import meter

OUTCOME = re.compile(r"(?:\[gw\d+\].*?)?(PASSED|FAILED|ERROR|SKIPPED)")
TEST = re.compile(r"tests/\S+\.py::\S+?(?:\[.*?\])?(?= |$)")
KEPT = re.compile(r"^(E  |FAILED |ERROR |SKIPPED |[\d.]+s (call|setup)|=+ .* in [\d.]+s)")
"""Lines of pytest's end that are kept, beside each test's outcome."""
CHUNKS = "tests/gpu/test_heads.py::test_logits_in_chunks"
OVERLAPS = "tests/gpu/test_activations.py::test_it_waits_less_than_torchs_own"


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that are run in one go."""

    name: str
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    workers: int = 0
    cards: int = 1


PARTS = (
    Part(
        "beside",
        (
            *(f"tests/gpu/test_{each}.py" for each in ("weights", "activations", "compile")),
            *(f"tests/gpu/test_{each}.py" for each in ("catalogue", "data", "heads")),
            *(f"tests/gpu/test_{each}.py" for each in ("host_state", "stages")),
            "tests/resilience/test_cuda.py",
            "tests/harness/patching/test_optimizer_runs.py",
        ),
        without=(CHUNKS, OVERLAPS),
        workers=8,
    ),
    Part(
        "alone",
        tuple(f"tests/gpu/test_{each}.py" for each in ("meter", "others", "shortages")),
    ),
    Part("seconds", (CHUNKS, OVERLAPS)),
    Part("pairs", ("tests/strategies/test_pairs_launched.py",)),
    Part(
        "two-cards",
        (
            *(f"tests/gpu/test_{each}.py" for each in ("topology", "search", "run_ranks")),
            "tests/resilience/test_ranks.py",
            "tests/gpu/test_ranks.py",
        ),
        cards=2,
    ),
)


def run(part: Part, log: Path, seconds: float) -> bool:
    """Run a part; return whether all passed."""
    spread = ["-n", str(part.workers), "--dist", "worksteal"] if part.workers else []
    left_out = [word for each in part.without for word in ("--deselect", each)]
    asked = ["-m", "gpu", "-v", "--durations=12", *spread, *left_out, *part.tests]
    command = [sys.executable, "-m", "pytest", *asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pytest:
        try:
            printed, _ = pytest.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.terminate()
            printed = pytest.communicate()[0] + f"\n== ended after {seconds:.0f} s =="
    lines = printed.splitlines()
    hardware = meter.hardware(meter.default_device()).name
    head = [f"# {hardware}, Python {platform.python_version()}, torch {_torch()}"]
    head.append(f"$ python {' '.join(command[1:])}")
    kept = [line.strip("= ") for line in lines if KEPT.match(line)]
    log.write_text("\n".join([*head, *outcomes(lines), *kept]) + "\n")
    return pytest.returncode == 0


def outcomes(lines: Sequence[str]) -> list[str]:
    """Return each test with its outcome, in the order of their names; of a worker's lines too."""
    found: dict[str, str] = {}
    for line in lines:
        test, outcome = TEST.search(line), OUTCOME.search(line)
        if test and outcome and not line.startswith(("FAILED", "ERROR")):
            found[test[0]] = outcome[1]
    return [f"{test} {found[test]}" for test in sorted(found)]


def _torch() -> str:
    import torch

    return str(torch.__version__)


def main() -> None:
    """Run the parts asked for, as far as there are cards for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--seconds", type=float, default=1200.0, help="of each part at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cards, passed = len(meter.cards()), True
    if not cards:
        parser.error("no NVIDIA GPU is visible here")
    for part in PARTS:
        if part.cards > cards or (arguments.part and part.name not in arguments.part):
            continue
        log = arguments.out / f"gpu_suite-{part.name}.log"
        passed &= run(part, log, arguments.seconds)
        sys.stderr.write(f"{part.name}: {log.read_text().splitlines()[-1]}\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
