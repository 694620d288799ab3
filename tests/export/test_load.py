"""Plans people wrote themselves, and files that hold none."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.exceptions import UsageError
from autofit.export.load import load_plan
from autofit.plan import Plan

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "text",
    [
        '{"plan": {"micro_batch": 8}}',
        "[plan]\nmicro_batch = 8\n",
        '\n {"plan": {"micro_batch": "8"}}',
    ],
)
def test_a_plan_by_hand(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.write_text(text)
    assert load_plan(file) == Plan.of({"micro_batch": "8"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "neither JSON nor TOML"),
        ("precision bf16", "neither JSON nor TOML"),
        ("", "holds no plan"),
        ("[1]", "holds no plan"),
        ('{"plan": ["bf16"]}', "holds no plan"),
        ('{"plan": {"precision": null}}', "holds no plan"),
        ('{"plan": {"precision": true}}', "holds no plan"),
        ('{"plan": ' + '{"a": ' * 100_000, "neither JSON nor TOML"),
        ('{"plan": {"micro_batch": "' + "9" * 5_000 + '"}}', "plan.txt"),
        ('{"plan": {"precison": "bf16"}}', "there is no technique 'precison'"),
        ('{"plan": {"precision": "bf17"}}', "precision has no level 'bf17'"),
    ],
)
def test_no_plan_is_a_usage_error(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        load_plan(file)
    assert "plan.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_plan(tmp_path / "none.json")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is not text"):
        load_plan(file)
