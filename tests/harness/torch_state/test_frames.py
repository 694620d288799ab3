"""Which files hold the user's own code."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from autofit.worker.harness.torch_state import frames

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "name",
    [
        str(torch.__file__),
        str(dataclasses.__file__),
        str(frames.__file__),
        "<string>",
        "/opt/another/lib/python3.11/site-packages/torch/_ops.py",
        "/usr/lib/python3/dist-packages/torch/_ops.py",
    ],
)
def test_libraries_python_and_autofit_are_not_the_users(name: str) -> None:
    assert not frames.is_users(name)


def test_a_file_beside_them_is(tmp_path: Path) -> None:
    assert frames.is_users(str(tmp_path / "train.py"))
    assert frames.is_users(str(Path(sys.prefix) / "train.py"))
