"""The harness waits for the script's own import of torch, however libraries look for it first."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.worker.harness.process.import_hooks import after_import

pytestmark = pytest.mark.quick

NAME = "a_module_to_wait_for"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"{NAME}.py"
    file.write_text("VALUE = 1\n")
    importlib.invalidate_caches()
    yield file
    sys.modules.pop(NAME, None)
    sys.meta_path[:] = before


def test_acts_once_after_the_import_and_leaves(module: Path) -> None:
    seen: list[bool] = []
    before = list(sys.meta_path)
    after_import(NAME, lambda: seen.append(hasattr(sys.modules[NAME], "VALUE")))
    assert not seen
    importlib.import_module(NAME)
    assert seen == [True]
    assert sys.meta_path == before
    assert "exec_module" not in vars(sys.modules[NAME].__spec__.loader)  # type: ignore[union-attr]


def test_a_look_without_an_import_does_not_count(module: Path) -> None:
    seen: list[int] = []
    after_import(NAME, lambda: seen.append(1))
    assert importlib.util.find_spec(NAME) is not None
    assert importlib.util.find_spec(NAME) is not None
    assert not seen
    importlib.import_module(NAME)
    assert seen == [1]


def test_an_import_that_fails_is_waited_for_again(module: Path) -> None:
    seen: list[int] = []
    after_import(NAME, lambda: seen.append(1))
    module.write_text("raise ImportError('not now')\n")
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module(NAME)
    assert not seen
    module.write_text("VALUE = 'something longer'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == [1]


def test_acts_at_once_when_it_is_there(module: Path) -> None:
    importlib.import_module(NAME)
    seen: list[int] = []
    after_import(NAME, lambda: seen.append(1))
    assert seen == [1]


def test_two_may_wait_for_the_same_module(module: Path) -> None:
    seen: list[str] = []
    before = list(sys.meta_path)
    after_import(NAME, lambda: seen.append("one"))
    after_import(NAME, lambda: seen.append("other"))
    importlib.import_module(NAME)
    assert seen == ["one", "other"]
    assert sys.meta_path == before
