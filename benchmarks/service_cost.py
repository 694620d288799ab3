"""Seconds of a search through a service beside those of the same search in the foreground.

    python benchmarks/service_cost.py [--rounds 2] [--out FILE] [-- WORDS ...]

``WORDS`` follow ``autofit search``, which runs in the folder of the examples. Both searches begin a
new study in each round, and in turn. The service has started before, as a service has; what its own
start takes is printed too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grid import EXAMPLES

WORDS = ["char_lm.py", "--memory", "2GiB", "--trials", "6"]
ADDRESS = re.compile(r"http://[\d.]+:\d+")
AUTOFIT = (sys.executable, "-m", "autofit")


def search(words: list[str], folder: Path) -> float:
    """Return the seconds of one search; exit with its words if it fails."""
    begun = time.monotonic()
    store = f"sqlite:///{folder / 'own.db'}"
    line = [*AUTOFIT, "search", "--fresh", "--storage", store, *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=EXAMPLES)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return time.monotonic() - begun


def main() -> int:
    """Print the seconds of each search as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", default=WORDS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = ["--storage", f"sqlite:///{folder / 'service.db'}"]
        begun = time.monotonic()
        service = subprocess.Popen(
            [*AUTOFIT, "serve", *store, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert service.stdout is not None
            told = []
            for line in service.stdout:
                told.append(line)
                if address := ADDRESS.search(line):
                    break
            else:
                sys.exit(f"the service ended with code {service.wait()}\n{''.join(told)}")
            starting = time.monotonic() - begun
            found: dict[str, object] = {"words": given.words, "service_starts": starting}
            through = ["--server", address[0]]
            seconds: dict[str, list[float]] = {"foreground": [], "service": []}
            for _ in range(given.rounds):
                seconds["foreground"].append(search(given.words, folder))
                seconds["service"].append(search([*through, *given.words], folder))
        finally:
            subprocess.run([*AUTOFIT, "serve", *store, "--stop"], capture_output=True)
            service.wait(60)
    pairs = zip(seconds["service"], seconds["foreground"], strict=True)
    found |= seconds | {"more": [service - own for service, own in pairs]}
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if given.out is not None:
        given.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
