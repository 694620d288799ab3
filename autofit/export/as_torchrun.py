"""Writes a shell script that starts the ranks with ``torchrun`` and applies the plan in each.

If the plan itself has ranks, ``autofit run`` starts them, without ``torchrun``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from autofit.analysis.result import Result
from autofit.export.carried import launched_with, origin
from autofit.export.load import PLAN
from autofit.text import printable

FILE = "autofit-plan.json"
END = "END_OF_PLAN"


def render(result: Result) -> str:
    """Return the script; ``torchrun`` has no setting for a plan, so autofit runs in each rank."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    script = result.script
    yield "#!/bin/sh"
    yield origin(result)
    yield f"# Run it in the folder of the search, {printable(script.cwd)}, or in a copy of it."
    for name, value in launched_with(result).items():
        yield f"export {name}={shlex.quote(value)}"
    start = ["torchrun", "--standalone", "--nproc-per-node", str(result.ranks)]
    module = ["-m"] if script.module else []
    if result.plan.neutral:
        yield shlex.join(["exec", *start, *module, script.target, *script.args])
        return
    yield "# torchrun has no setting for the plan: autofit, which has to be installed, applies it."
    if alone := result.plan.ranks > 1:
        yield "# It also starts the ranks, because the script is written for one process."
    yield f"cat > {FILE} <<'{END}'"
    yield json.dumps({PLAN: dict(result.plan.changes)})
    yield END
    start = [] if alone else [*start, "--no-python"]
    tuned = ["autofit", "run", "--plan", FILE, *module, script.target]
    args = ["--", *script.args] if script.args else []
    yield shlex.join(["exec", *start, *tuned, *args])
