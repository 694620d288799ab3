"""What a search promises, a run keeps: measured on two GPUs, on scripts that nobody tuned for.

    python benchmarks/promises.py --out FOLDER [--part trainer|t5|ddp]

``trainer``: a search of GPT-2 medium with the Trainer, then a run of 100 steps under its winner: as
fast as it was confirmed, on as many cards. ``t5``, ``ddp``: T5-large, and GPT-2 medium under DDP of
two cards, are split; the losses of 20 steps are those of the whole batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WORKS = Path(__file__).resolve().parent / "works"
AUTOFIT = [sys.executable, "-m", "autofit"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


class Log:
    """Runs commands, and keeps what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Print a line and keep it."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        self.lines.append(line)

    def run(self, command: list[str], seconds: float) -> str:
        """Run a command; return what it printed."""
        shown = " ".join(command).replace(sys.executable, "python").replace(f"{WORKS}/", "")
        started = time.monotonic()
        environment = os.environ | {"AUTOFIT_STORAGE": f"sqlite:///{self.folder}/promises.db"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                cwd=self.folder,
            )
            code, text = str(done.returncode), done.stdout
        except subprocess.TimeoutExpired as late:
            code = "cut off"
            text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        self.say(f"$ {shown}")
        kept = [each for each in text.splitlines() if "it/s" not in each and each.strip()]
        for line in kept[-30:]:
            self.say(f"  {line[:200]}")
        self.say(f"  -> {code}, {time.monotonic() - started:.0f} s")
        return text


def trainer(log: Log) -> None:
    """Search with two cards, run under the winner."""
    script = str(WORKS / "gpt2_trainer.py")
    log.run([*AUTOFIT, "search", script, "--gpus", "2", "--timeout", "150s"], 290)
    found = log.run([*AUTOFIT, "best", script, "--format", "json"], 30)
    text = log.run([*AUTOFIT, "run", script], 200)
    try:
        confirmed = json.loads(found[found.index("{") :])["samples_per_second"]
        speed = float(re.findall(r"speed ([\d.]+)", text)[-1])
        log.say(f"confirmed {confirmed:.1f}, run {speed:.1f}: {speed / confirmed:.3f} of it")
    except (ValueError, KeyError, IndexError) as error:
        log.say(f"no figures: {error}")


def losses(text: str) -> list[float]:
    """Return the losses that a run printed."""
    return [float(each) for each in re.findall(r"^loss ([\d.]+)", text, re.MULTILINE)]


def compared(log: Log, whole: str, split: str) -> None:
    """Say how far the losses of a split run are from those of the whole."""
    one, other = losses(whole), losses(split)
    if not one or len(one) != len(other):
        log.say(f"no figures: {len(one)} and {len(other)} losses")
        return
    apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    log.say(f"{len(one)} losses, largest relative difference {apart:.1e}")


def plan(log: Log, name: str, **levels: str) -> str:
    """Write a plan; return the path of its file."""
    path = log.folder / f"{name}.json"
    path.write_text(json.dumps({"plan": levels}))
    return str(path)


def t5(log: Log) -> None:
    """Split T5-large: 16 samples so that the whole fits beside it, and 32 to be verified."""
    script, size = str(WORKS / "t5_loop.py"), ["--batch", "16"]
    whole = log.run([sys.executable, script, *size], 120)
    held = ["--plan", plan(log, "t5", micro_batch="4")]
    split = log.run([*AUTOFIT, "run", *held, script, "--", *size], 240)
    compared(log, whole, split)
    held = ["--plan", plan(log, "t5-32", micro_batch="8")]
    log.run([*AUTOFIT, "run", "--verify-only", *held, script], 120)


def ddp(log: Log) -> None:
    """Split GPT-2 medium under DDP of two cards; and under bf16."""
    script = str(WORKS / "gpt2_ddp.py")
    line = ["torchrun", "--nproc-per-node", "2", script]
    whole = log.run([*TORCHRUN, script], 120)
    held = ["--plan", plan(log, "ddp", micro_batch="4")]
    split = log.run([*AUTOFIT, "run", *held, "--", *line], 240)
    compared(log, whole, split)
    held = ["--plan", plan(log, "ddp-bf16", micro_batch="4", precision="bf16")]
    log.run([*AUTOFIT, "run", "--verify-only", *held, "--", *line], 120)


PARTS: dict[str, Callable[[Log], None]] = {"trainer": trainer, "t5": t5, "ddp": ddp}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, action="append")
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.part or PARTS:
        log = Log(folder)
        PARTS[name](log)
        (folder / f"promises-{name}.log").write_text("\n".join(log.lines) + "\n")


if __name__ == "__main__":
    main()
