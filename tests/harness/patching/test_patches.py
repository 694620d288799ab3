"""What the harness patches onto torch: undone last in, first out, under the patches of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autofit.worker.harness.patching.patches import Patches

pytestmark = pytest.mark.quick


class Base:
    """Stands for a class of torch."""

    def name(self) -> str:
        """Return a name."""
        return "plain"

    @classmethod
    def made(cls) -> str:
        """Return the name of the class."""
        return cls.__name__


class Derived(Base):
    """Inherits both methods."""


def adding(word: str) -> Callable[[Any], Callable[..., str]]:
    """Return what wraps a function in another one that adds ``word``."""
    return lambda plain: lambda *args: f"{plain(*args)} {word}"


def test_all_is_as_before_once_it_is_undone() -> None:
    before = dict(vars(Base))
    patches = Patches()
    patches.wrap(Base, "name", adding("one"))
    patches.wrap(Base, "name", adding("two"))
    patches.wrap(Base, "made", adding("three"))
    patches.wrap(Derived, "name", adding("four"))
    patches.set(Derived, "extra", 5)
    assert Base().name() == "plain one two"
    assert Derived().name() == "plain one two four"
    assert (Base.made(), Derived.made()) == ("Base three", "Derived three")
    patches.undo()
    assert dict(vars(Base)) == before
    assert not {"name", "extra"} & set(vars(Derived))


@pytest.mark.parametrize("first", [0, 1])
def test_patches_are_undone_in_any_order(first: int) -> None:
    before = vars(Base)["name"]
    undos = [
        Patches().wrap(Base, "name", adding("one")),
        Patches().wrap(Base, "name", adding("two")),
    ]
    undos.pop(first)()
    assert Base().name() == ("plain two", "plain one")[first]
    undos.pop()()
    assert vars(Base)["name"] is before


def test_a_patch_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = Patches()
    with monkeypatch.context() as cleaned:
        cleaned.setattr(Base, "name", Base.name)  # for the end of the test
        patches.wrap(Base, "name", adding("ours"))
        cleaned.setattr(Base, "name", adding("theirs")(Base.name))
        patches.undo()
        assert Base().name() == "plain theirs"


def test_an_undo_works_once() -> None:
    patches = Patches()
    undo = patches.wrap(Base, "name", adding("one"))
    undo()
    patches.wrap(Base, "name", adding("two"))
    undo()
    assert Base().name() == "plain two"
    patches.undo()
    assert Base().name() == "plain"
