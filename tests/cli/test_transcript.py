"""What a search says, at fixed widths."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.tuning.notices import (
    Confirmed,
    FactsKnown,
    LevelsLeftOut,
    Line,
    Notice,
    Remeasuring,
    SizeMeasured,
    StudyStarted,
    TrialEnded,
    TrialStarted,
)
from autofit.view.render import PlainLines
from autofit.view.transcript import Transcript
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict

pytestmark = pytest.mark.quick
Measured = Callable[..., TrialReport]
BF16 = Plan.of({"precision": "bf16", "checkpointing": "all", "micro_batch": "8"})
SPLIT = Plan.of({"checkpointing": "all", "micro_batch": "8"})


OUT = TrialReport(
    index=0,
    plan=Plan(),
    verdict=Verdict.OUT_OF_MEMORY,
    out_of_memory=OutOfMemory(phase="backward", message="CUDA out of memory", requested=2 << 30),
)


def ended(number: int, report: TrialReport, *, best: bool = False) -> TrialEnded:
    return TrialEnded(number=number, slot=0, report=report, best=best)


@pytest.fixture
def search(opened: StudyStarted, facts: Facts, measured: Measured) -> list[Notice]:
    """Return the notices of a small search whose script does not fit as it is."""
    return [
        opened,
        TrialStarted(slot=0, plan=Plan()),
        FactsKnown(facts=facts),
        ended(0, OUT),
        LevelsLeftOut(
            reasons=(("precision", "tf32", "no use here"), ("precision", "fp16", "no use here"))
        ),
        ended(1, measured(SPLIT, 18.0, 23.5), best=True),
        SizeMeasured(slot=0, plan=BF16, measurement=measured(BF16, 1.0, 1.0).measurements[0]),
        ended(2, measured(BF16, 20.34, 12.0), best=True),
        Remeasuring(plan=BF16),
        Confirmed(
            number=3,
            plan=BF16,
            measurement=measured(BF16, 20.1, 12.0).measurements[0],
            searched=measured(BF16, 20.34, 12.0).measurements[0],
        ),
        Line(text="the search ended"),
    ]


def test_plain_lines(search: list[Notice]) -> None:
    stream = io.StringIO()
    with PlainLines(stream, verbose=True) as listener:
        for notice in search:
            listener(notice)
    assert stream.getvalue() == PLAIN


def test_what_cannot_be_used_here_is_for_verbose(search: list[Notice], facts: Facts) -> None:
    transcript = Transcript()
    said = [line.text for notice in search for line in transcript.lines(notice)]
    assert not any("not tried" in text for text in said)
    known = replace(facts, calls_per_step=2)
    assert transcript.lines(FactsKnown(facts=known)) == []


PLAIN = """\
1 x NVIDIA H200, 139.8 GiB, budget 24.0 GiB as requested; allowed: exact, redraw, rounding; study \
3f9c0000 (new)
train.py: Hugging Face model LlamaForCausalLM, 1.10 B parameters, 22 blocks, AdamW, 16 samples \
a step (from the script)

  #  plan                                                    samples/s   vs now  peak of 24.0 \
GiB         verdict
  0  as it is                                                        -        -   > 24.0 \
##############>  out of memory in backward (2.0 GiB requested)
not tried: tf32, fp16: no use here
  1  checkpointing, micro 8                                  18.0 ±0.0      new     23.5 \
##############   fits  <- best
  2  bf16, checkpointing, micro 8                            20.3 ±0.0    +13 %     12.0 \
#######          fits  <- best
confirming in a new process: bf16, checkpointing, micro 8
confirmed: 20.1 ±0.0 samples/s (20.3 ±0.0 in the search) in 12.0 of 24.0 GiB: bf16, \
checkpointing, micro 8
the search ended
"""


@pytest.mark.parametrize("width", [60, 80, 99, 100, 120, 200])
def test_rows_fit_the_terminal(search: list[Notice], width: int) -> None:
    transcript = Transcript()
    said = {
        type(notice): [line.text for line in transcript.lines(notice, width)] for notice in search
    }
    assert all(len(text) <= width for text in said[TrialEnded])
    words = " ".join(said[TrialEnded]).split()
    assert {"bf16,", "micro", "20.3", "fits", "best"} <= set(words)


def test_a_row_names_a_plan_as_every_other_line_does(opened: StudyStarted) -> None:
    fused = BF16.replace(optimizer="fused")
    transcript = Transcript()
    transcript.lines(opened)
    (said,) = transcript.lines(Remeasuring(plan=fused))
    report = TrialReport(index=0, plan=fused, verdict=Verdict.DRIFTED)
    row = transcript.lines(ended(1, report))[-1]
    assert str(fused) in said.text
    assert str(fused) in row.text


def test_a_change_is_told_against_the_script_as_it_is(
    opened: StudyStarted, measured: Measured
) -> None:
    transcript = Transcript()
    transcript.lines(opened)
    first = transcript.lines(ended(0, measured(Plan(), 10.0, 20.0), best=True))
    slower = transcript.lines(ended(1, measured(SPLIT, 8.4, 9.0)))
    assert " now " in first[-1].text
    assert " -16 % " in slower[-1].text
    assert (first[-1].style, slower[-1].style) == ("best", "")


def test_a_change_within_the_spread_is_marked(opened: StudyStarted, measured: Measured) -> None:
    transcript = Transcript()
    transcript.lines(opened)
    transcript.lines(ended(0, measured(Plan(), 10.0, 20.0, spread=0.1)))
    row = transcript.lines(ended(1, measured(SPLIT, 10.5, 9.0, spread=0.1)))[-1]
    assert " 10.5 ±1.1 " in row.text
    assert " ~+5 % " in row.text


def test_a_plan_that_steps_have_measured_again_says_so(
    opened: StudyStarted, measured: Measured
) -> None:
    transcript = Transcript()
    transcript.lines(opened)
    notice = replace(ended(1, measured(SPLIT, 10.0, 9.0)), after="real steps")
    assert transcript.lines(notice)[-1].text.endswith("  fits, after real steps")


def test_facts_are_told_once(opened: StudyStarted, facts: Facts) -> None:
    transcript = Transcript()
    transcript.lines(opened)
    assert len(transcript.lines(FactsKnown(facts=facts))) == 1
    assert transcript.lines(FactsKnown(facts=facts)) == []
    assert transcript.lines(FactsKnown(facts=Facts())) == []


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            TrialReport(index=0, plan=SPLIT, verdict=Verdict.REFUSED, reason="BatchNorm"),
            "refused: BatchNorm",
        ),
        (
            TrialReport(
                index=0,
                plan=SPLIT,
                verdict=Verdict.PLAN_FAILED,
                reason="KeyError: 1\nmore",
                blamed="checkpointing",
            ),
            "failed (checkpointing): KeyError: 1",
        ),
        (TrialReport(index=0, plan=SPLIT, verdict=Verdict.TIMED_OUT), "timed out"),
        (TrialReport(index=0, plan=SPLIT, verdict=Verdict.INTERRUPTED), "interrupted"),
        (TrialReport(index=0, plan=SPLIT, verdict=Verdict.DRIFTED), "drifted"),
        (TrialReport(index=0, plan=Plan(), verdict=Verdict.SCRIPT_FAILED), "the script failed"),
        (TrialReport(index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY), "out of memory"),
    ],
)
def test_every_other_verdict(opened: StudyStarted, report: TrialReport, said: str) -> None:
    transcript = Transcript()
    transcript.lines(opened)
    row = transcript.lines(ended(3, report))[-1]
    assert row.text.endswith(f"  {said}")
    assert row.style == "bad"


def test_every_verdict_has_words(opened: StudyStarted, measure: Callable[..., Measurement]) -> None:
    transcript = Transcript()
    transcript.lines(opened)
    for verdict in Verdict:
        report = TrialReport(
            index=0, plan=SPLIT, verdict=verdict, measurements=(measure(1.0, 1.0),)
        )
        assert transcript.lines(ended(0, report))
