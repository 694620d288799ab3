"""A single-process script under ``ranks`` is the same training as in one process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.ranks.trainings import (
    ADVERSARIES,
    CENTRED,
    IMAGES,
    LANGUAGE,
    SEQUENCES,
    STOP,
    TAIL,
    TOWERS,
    VIEWS,
    WITHOUT_OVERLAY,
    assert_same,
    difference,
    run,
)


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize(
    "text",
    [LANGUAGE + TAIL, IMAGES + TAIL, ADVERSARIES + TAIL + STOP, SEQUENCES + TAIL],
    ids=["language", "images", "adversaries", "sequences"],
)
def test_it_is_the_same_training(tmp_path: Path, text: str, ranks: str) -> None:
    assert_same(tmp_path, text, {"ranks": ranks})


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["2", "4"])
@pytest.mark.parametrize("text", [TOWERS, VIEWS, CENTRED], ids=["towers", "views", "centred"])
def test_parts_of_a_model_that_compares_its_samples_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, ranks: str
) -> None:
    monkeypatch.setenv("NOTES", "1")
    assert_same(tmp_path, text + TAIL, {"ranks": ranks})
    whole, parts = (
        [int(size) for size in (tmp_path / name / "notes").read_text().split()]
        for name in ("plain", "ranked")
    )
    assert max(parts[-5:]) <= -(-max(whole) // int(ranks))


@pytest.mark.full
def test_a_slice_may_run_in_chunks(tmp_path: Path) -> None:
    assert_same(tmp_path, LANGUAGE + TAIL, {"ranks": "2", "micro_batch": "2"})


@pytest.mark.full
def test_each_rank_sees_its_slice_and_only_rank_0_leaves_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES", "1")
    run(tmp_path / "ranked", LANGUAGE + TAIL, {"ranks": "2"})
    notes = (tmp_path / "ranked" / "notes").read_text().split()
    assert notes[-40:] == ["3"] * 40  # those before are rank 0's, which looks for the samples


@pytest.mark.full
def test_only_rank_0_leaves_files_where_no_overlay_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("unshare") or subprocess.run([*WITHOUT_OVERLAY, "true"]).returncode:
        pytest.skip("the system does not let this test forbid overlays")
    monkeypatch.setenv("NOTES", "1")
    plain = run(tmp_path / "plain", LANGUAGE + TAIL)
    ranked = run(tmp_path / "ranked", LANGUAGE + TAIL, {"ranks": "2"}, WITHOUT_OVERLAY)
    assert (ranked.out, ranked.code) == (plain.out, 0), ranked.err
    assert ranked.files == plain.files
    assert difference(plain, ranked) < 1e-9
    notes = (tmp_path / "ranked" / "notes").read_text().split()
    assert notes[-40:] == ["3"] * 40  # those before are rank 0's of the verification
