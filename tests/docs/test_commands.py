"""Every command line in the documentation parses, and runs or says why it does not."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from autofit.cli import cli
from tests.docs.blocks import blocks
from tests.docs.conftest import Bash

BLOCKS = blocks()
ON_A_HEAD = ("docs/tutorials/cluster.md", "docs/how-to/submit-a-job.md")
"""Pages whose commands need a Ray head: see ``test_cluster.py``."""
RUN = sorted({block.page for block in BLOCKS if block.runs} - set(ON_A_HEAD))


def autofits(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``autofit`` on a command line, also within quotes."""
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "autofit" and rest and rest[0] in cli.lazy:
            yield list(itertools.takewhile(lambda each: each not in (">", "&&"), rest))
        elif " autofit " in word:
            yield from autofits(word)


@pytest.mark.quick
def test_every_command_line_parses() -> None:
    lines = [line for block in BLOCKS for line in block.commands.splitlines()]
    asked = [arguments for line in lines for arguments in autofits(line)]
    assert {name for name, *_ in asked} == set(cli.lazy)
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
    comments = {block.comment for block in BLOCKS}
    assert all(re.fullmatch(r"|fails|not run: .{5,}", comment) for comment in comments), comments


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUN)
def test_the_commands_run(page: str, workplace: Path, bash: Bash) -> None:
    for block in BLOCKS:
        if block.page == page and block.runs:
            ran = bash(block.commands, workplace)
            assert (ran.returncode != 0) == block.fails, f"{block}\n{ran.stdout}{ran.stderr}"
