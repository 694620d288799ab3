"""Nothing that a store, a script or another machine holds acts on the user's terminal."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autofit.cli
from autofit.analysis.result import Result
from autofit.export import FORMATS, render
from autofit.plan import Plan
from autofit.storage import Owner, Store, StudyKey
from autofit.strategies import Hardware
from autofit.text import printable
from autofit.tuning.notices import StudyStarted, TrialEnded
from autofit.view.transcript import Transcript
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\nautofit: all is well"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def test_what_is_written_out() -> None:
    assert printable("\x1b[31mred\x1b[0m\x1b[2J") == "red\\x1b[2J"
    assert printable("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert printable("é 漢 a\nb\x00\x85\u2066\udc80") == "é 漢 a\\nb\\x00\\x85\\u2066\\udc80"


def test_there_is_one_way_out() -> None:
    """``out`` cleans what it writes; ``render`` and ``live`` write what ``Transcript`` cleans."""
    folder = Path(autofit.cli.__file__).parent
    for file in folder.glob("*.py"):
        if file.stem in ("out", "render", "live"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert name not in ("click.echo", "click.secho", "print"), file
            assert not re.fullmatch(r"sys\.std(out|err)\.write", name), file


def test_a_transcript_is_clean(opened: StudyStarted) -> None:
    evil = replace(opened, hardware=replace(opened.hardware, name=EVIL))
    failed = TrialReport(index=0, plan=Plan(), verdict=Verdict.PLAN_FAILED, reason=EVIL)
    transcript = Transcript()
    told = [
        line.text
        for notice in (evil, TrialEnded(number=0, slot=0, report=failed, best=False))
        for line in transcript.lines(notice)
    ]
    assert len(told) > 2
    assert not [line for line in told if ACTS.search(line) or "\n" in line]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store whose study has been edited by somebody who means no good."""
    script = Script(
        target="train.py",
        args=("--name", EVIL),
        cwd=f"/tmp/{EVIL}",
        environment=(("LD_PRELOAD", "/tmp/evil.so"), ("ACCELERATE_MIXED_PRECISION", "bf16")),
    )
    (tmp_path / "train.py").write_text("")
    hardware = Hardware(device="cpu", name=f'{EVIL}"""\nimport evil', total_bytes=1 << 34)
    key = StudyKey(script=str(tmp_path / "train.py"), digest="", gpu="CPU", gpus=2, allow="exact")
    measured = Measurement(
        micro_batch=8,
        effective_batch=8,
        step_seconds=(1.0,),
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
    )
    with Store(str(tmp_path / "autofit.db")) as opened:
        terms = {"script": script, "hardware": hardware, "budget": 1 << 30, "versions": {}}
        study = opened.open_study(key, **terms)  # type: ignore[arg-type]
        (trial,) = opened.add_trials(study, [Plan()], launch=0, owner=Owner.current())
        report = TrialReport(
            index=0, plan=Plan(), verdict=Verdict.MEASURED, best=Plan(), measurements=(measured,)
        )
        opened.finish(trial, report)
    return tmp_path


def on_a_terminal(folder: Path, *words: str) -> str:
    """Return what a command shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "autofit", *words], cwd=folder, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, shown
    return shown.decode()


def test_an_edited_store_writes_nothing_but_text_to_a_terminal(store: Path) -> None:
    for words in (("best",), ("best", "--format", "torchrun")):
        shown = on_a_terminal(store, *words).replace("\r\n", "\n")
        assert "train.py" in shown
        assert not ACTS.search(shown), words
        assert "LD_PRELOAD" not in shown


@pytest.mark.parametrize("form", FORMATS)
def test_no_export_takes_what_loads_code(form: str, store: Path) -> None:
    from autofit.analysis.ranking import best

    result: Result = best(str(store / "autofit.db"))[0]
    text = render(form, result)
    assert "LD_PRELOAD" not in text
    if form == "python":
        assert "evil" not in [
            name.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for name in node.names
        ]
    if form == "torchrun":
        assert "export ACCELERATE_MIXED_PRECISION=bf16" in text
        heads = [line for line in text.splitlines() if line.startswith("autofit:")]
        assert len(heads) == 1  # within the quotes of the argument, and nowhere else
