"""The folders show what the program does: names in strings resolve, packages stay small."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import autofit
from autofit import strategies

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
LIBRARY = ("autofit", "storage", "strategies", "worker")
MOST = 25
"""Modules of one package, at one level."""
NO_MODULES = {"autofit.db", "autofit.script_args"}
"""Strings that look like the name of a module, and are the names of a file and of keys."""
DOTTED = re.compile(r"autofit(\.[A-Za-z_]\w*)+")


def sources() -> list[Path]:
    """Return the library's files, each under its real folder."""
    found = (path for name in LIBRARY for path in (ROOT / name).rglob("*.py"))
    real = {path.resolve() for path in found}
    return sorted(path for path in real if "versions" not in path.parts)  # of the database's schema


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each string of a file that is a dotted name of ours, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if DOTTED.fullmatch(node.value) and node.value not in NO_MODULES:
            yield node.lineno, node.value


def resolves(name: str) -> bool:
    """Return whether ``name`` is a module of ours, or what one holds."""
    module, rest = name, ""
    while not _is_module(module):
        module, _, last = module.rpartition(".")
        if not module:
            return False
        rest = last
    return not rest or hasattr(importlib.import_module(module), rest)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_every_module_that_a_string_names_exists() -> None:
    found = [(path, line, name) for path in sources() for line, name in strings(path)]
    assert len(found) >= 3, "the search for strings finds none"
    lost = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, line, name in found
        if not resolves(name)
    ]
    assert lost == []


def test_packages_stay_small() -> None:
    modules = Counter(path.parent for path in sources() if path.name != "__init__.py")
    assert {str(p.relative_to(ROOT)): n for p, n in modules.items() if n > MOST} == {}


def test_no_module_hides_a_public_function() -> None:
    """Importing ``autofit.x`` would put the module in the place of the function ``autofit.x``."""
    modules = {path.stem for path in (ROOT / "autofit").iterdir()}
    assert {"search", "best", "run", "resilient"} <= set(autofit.__all__)
    assert modules & set(autofit.__all__) == set()


NOT_WORDS = re.compile(
    "crew|muster|flights?|footing|ground|rungs?|ledger|endings|asked|awaited|shown|moved|unmet|opened|"
    "outside|means|leaves|takes|stands|journey|away|once|instead|telling|kept|room"
)
"""They told a reader nothing who had not seen the code."""


def named() -> Iterator[tuple[Path, str]]:
    """Yield each module, class and function of the library."""
    for path in sources():
        yield path, path.stem
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield path, node.name


def test_names_are_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in named()
        if any(
            NOT_WORDS.fullmatch(word.lower())
            for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        )
    ]
    assert found == []


OTHER_MEANINGS = {
    "compile": "torch.compile, which the harness watches, and the phase of that name",
    "loss": "the key of a loss in a model's output or in a log",
    "ranks": "the number of processes, in documents, tables and command lines",
    "weights": "a kind of memory",
}
"""Names of techniques that are words of others too, and what they are outside of ``strategies``."""
NOT_TECHNIQUES = {
    ("autofit/export/as_patch.py", "batch_size"): "the argument of a DataLoader",
    ("autofit/export/as_patch.py", "precision"): "the argument of lightning.Trainer",
    ("autofit/export/as_json.py", "micro_batch"): "the samples of a chunk in a result's document",
    ("autofit/resilience/decorator.py", "batch_size"): "the argument of the user's function",
    ("autofit/resilience/fallback.py", "batch_size"): "the same, in a table of remembered values",
    ("autofit/running/run.py", "micro_batch"): "the samples of a chunk in a line of JSON",
}
"""Other strings that are equal to the name of a technique, by file."""
LOOKUPS = re.compile(r"plan|levels|choices|strateg|replace|express|hand|changes", re.IGNORECASE)
"""In a line with one of these, such a string is the technique."""


def names_of_techniques() -> Iterator[tuple[str, str, str]]:
    """Yield where the library outside of ``strategies`` names a technique: file, name and line."""
    known = set(strategies.NAMES)
    for path in sources():
        if path.is_relative_to(ROOT / "strategies"):
            continue
        file, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in known:
                yield file, str(node.value), lines[node.lineno - 1]
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("plan.replace"):
                yield from ((file, k.arg, "plan") for k in node.keywords if k.arg in known)


def test_only_a_technique_knows_its_name() -> None:
    """Elsewhere a plan is asked what its levels do: see ``Level`` and ``Strategy``."""
    found = list(names_of_techniques())
    assert len(found) > len(NOT_TECHNIQUES), "the search finds none"
    lookups = {
        (file, name, line.strip())
        for file, name, line in found
        if (file, name) not in NOT_TECHNIQUES
        and (name not in OTHER_MEANINGS or LOOKUPS.search(line))
    }
    assert lookups == set()
    assert {(file, name) for file, name, _ in found} >= set(NOT_TECHNIQUES), "no longer there"
