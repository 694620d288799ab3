"""Every block of commands is run as printed and prints what the page says, or says why it is not.

The pages that take long are in ``tests/slow.txt``.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from autofit.cli import COMMANDS, cli
from tests.docs.blocks import Block, blocks, fences
from tests.docs.conftest import Bash, started
from tests.docs.printed import is_printed
from tests.docs.prose import pages

BLOCKS = blocks()
ON_A_HEAD = ("docs/tutorials/cluster.md",)
"""The page whose commands need a Ray head: see ``test_cluster.py``."""
RUN = sorted({block.page for block in BLOCKS if not block.reason} - set(ON_A_HEAD))
LANGUAGES = {"sh", "output", "text", "python", "json", "toml"}
NOT_RUN = {
    "needs a GPU": 24,
    "installs packages": 8,
    "needs a cluster": 5,
    "names studies of an example": 2,
    "needs an upload": 1,
    "takes minutes": 2,
    "the example trains on the CPU": 2,
    "needs fish": 1,
    "needs zsh": 1,
}
"""Why blocks are not run, and how many. ``python -m tests.docs.blocks`` prints this."""


def autofits(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``autofit`` on a command line, also within quotes."""
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "autofit" and rest and rest[0] in COMMANDS:
            yield list(itertools.takewhile(lambda each: each not in (">", "&&"), rest))
        elif " autofit " in word:
            yield from autofits(word)


@pytest.mark.quick
def test_every_command_line_parses() -> None:
    lines = [line for block in BLOCKS for line in block.commands.splitlines()]
    asked = [arguments for line in lines for arguments in autofits(line)]
    assert {name for name, *_ in asked} == set(COMMANDS)
    assert len(asked) > 50
    for name, *rest in asked:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        command.make_context(name, rest)


@pytest.mark.quick
def test_the_files_they_name_are_there(root: Path) -> None:
    named = set(re.findall(r"\b(?:deploy|examples)/[\w.-]+", "".join(b.commands for b in BLOCKS)))
    assert {f"deploy/{name}" for name in ("ray-cluster.yaml", "kuberay.yaml", "slurm.sh")} <= named
    assert all((root / name).exists() for name in named)


@pytest.mark.quick
def test_a_comment_above_a_block_is_one_that_is_understood() -> None:
    comments = {block.comment for block in BLOCKS if not block.reason}
    assert comments <= {"", "fails", "runs until the page ends"}
    assert all(block.output for block in BLOCKS if block.stays)


@pytest.mark.quick
def test_what_is_not_run_is_counted() -> None:
    assert Counter(block.reason for block in BLOCKS if block.reason) == NOT_RUN


@pytest.mark.quick
def test_no_block_hides_its_commands_from_this_test() -> None:
    languages = {language for page in pages() for _, language, _, _ in fences(page)}
    assert languages == LANGUAGES


@pytest.mark.quick
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUN)
def test_the_commands_run(
    page: str, workplace: Path, bash: Bash, request: pytest.FixtureRequest
) -> None:
    mine = [block for block in BLOCKS if block.page == page and not block.reason]
    if any(block.stays for block in mine):
        request.getfixturevalue("network")  # the ports of the page may be taken outside
    with contextlib.ExitStack() as servers:
        for block in mine:
            for name, content in block.files:
                (workplace / name).write_text(content)
            if block.stays:
                servers.enter_context(started(block, workplace))
            else:
                run(block, workplace, bash)


def run(block: Block, workplace: Path, bash: Bash) -> None:
    ran = bash(block.commands, workplace)
    assert (ran.returncode != 0) == block.fails, f"{block}\n{ran.stdout}"
    if block.output:
        assert is_printed(block.output, ran.stdout), f"{block.page} {block.commands}{ran.stdout}"
