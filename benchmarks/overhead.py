"""What ``autofit run`` costs under the plan as is: step time over that of plain Python.

    python benchmarks/overhead.py [--device cuda] [--preset baby] [--pairs 9] [--steps 100]

Runs ``gpt.py`` plainly and under ``autofit run``, in turn, alone and as two ranks under
``DistributedDataParallel``. The ratio of a pair is that of the two runs' median steps; the figure
is the median over the pairs. Writes ``results/overhead.json`` and ``results/overhead.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autofit.worker.cluster.versions import versions

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ALLOWED = 1.01


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each kind, one after the other; seconds of the median step."""

    plain: float
    tuned: float

    @property
    def ratio(self) -> float:
        """Return the step time under ``autofit run`` over plain Python's."""
        return self.tuned / self.plain


@dataclass(frozen=True, slots=True)
class Figure:
    """All the pairs of one setting."""

    ranks: int
    pairs: tuple[Pair, ...]

    @property
    def ratio(self) -> float:
        """Return the median ratio."""
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio."""
        ratios = [pair.ratio for pair in self.pairs]
        return min(ratios), max(ratios)


def measure(ranks: int, pairs: int, arguments: Sequence[str]) -> Figure:
    """Run plainly and tuned, ``pairs`` times each; every second pair begins with the other."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(pairs):
            order = (False, True) if index % 2 == 0 else (True, False)
            seconds = {tuned: _median_step(tuned, ranks, arguments, folder) for tuned in order}
            found.append(Pair(seconds[False], seconds[True]))
    return Figure(ranks, tuple(found))


def _median_step(tuned: bool, ranks: int, arguments: Sequence[str], folder: str) -> float:
    """Return the seconds of the first rank's median step."""
    script = [str(HERE / "gpt.py")]
    command = [sys.executable, *script, *arguments]
    if tuned:
        plan = Path(folder) / "plan.json"
        plan.write_text('{"plan": {}}')
        run = [sys.executable, "-m", "autofit", "run", "--plan", str(plan)]
        command = [*run, "--storage", f"sqlite:///{folder}/autofit.db", *script, "--", *arguments]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for environment in _environments(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a run failed: {' '.join(command)}")
    return float(json.loads(outputs[0].splitlines()[-1])["median"])


def _environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [dict(os.environ)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    return [
        os.environ | common | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ]


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| setting | plain, ms | autofit run, ms | ratio | smallest to largest | pairs |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        setting = "alone" if figure.ranks == 1 else f"DDP, {figure.ranks} ranks"
        plain = statistics.median(pair.plain for pair in figure.pairs) * 1e3
        tuned = statistics.median(pair.tuned for pair in figure.pairs) * 1e3
        low, high = figure.spread
        lines.append(
            f"| {setting} | {plain:.2f} | {tuned:.2f} | {figure.ratio:.4f} "
            f"| {low:.4f} to {high:.4f} | {len(figure.pairs)} |"
        )
    return "\n".join(lines) + "\n"


def save(figures: Sequence[Figure], command: str, folder: Path) -> None:
    """Write the figures as JSON and as a page."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
    document = {"command": command, "versions": versions(), "figures": rows}
    (folder / "overhead.json").write_text(json.dumps(document, indent=1) + "\n")
    page = f"""# The cost of `autofit run` under the plan as is

Step time over plain Python's, runs in turn; at most {ALLOWED} is allowed. Made by `{command}`.

{table(figures)}"""
    (folder / "overhead.md").write_text(page)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="cpu", help="a size of gpt.py")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    arguments = ["--preset", options.preset, "--device", options.device]
    arguments += ["--steps", str(options.steps)]
    figures = [measure(ranks, options.pairs, arguments) for ranks in options.ranks]
    save(figures, " ".join(["python", "benchmarks/overhead.py", *sys.argv[1:]]), options.out)
    sys.stdout.write(table(figures))


if __name__ == "__main__":
    main()
