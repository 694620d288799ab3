"""The decorators as a type checker sees them: mypy reads this file, nothing runs it."""

from typing import assert_type

import autofit


@autofit.resilient(batch_size=256)
def sized(batch_size: int, name: str, *, epochs: int = 1) -> float:
    """Train."""
    return batch_size * 1.0


@autofit.resilient(batch_size=256)
def accumulating(batch_size: int, accumulation: int, name: str) -> float:
    """Train."""
    return batch_size * 1.0


@autofit.resilient(batch_size=256)
async def coroutine(batch_size: int, name: str) -> float:
    """Train."""
    return batch_size * 1.0


class Trainer:
    """Has a method of each form."""

    @autofit.resilient(batch_size=256)
    def sized(self, batch_size: int, name: str) -> float:
        """Train."""
        return batch_size * 1.0


assert_type(sized("x", epochs=2), float)
assert_type(accumulating("x"), float)
assert_type(Trainer().sized("x"), float)
sized(32, "x")  # type: ignore[call-arg, arg-type]
sized(3)  # type: ignore[arg-type]
Trainer().sized(32, "x")  # type: ignore[call-arg, arg-type]


async def awaited() -> None:
    """A coroutine function stays one."""
    assert_type(await coroutine("x"), float)


@autofit.resilient(batch_size=256)  # type: ignore[arg-type]
def takes_no_size(name: str) -> None:
    """Train."""
