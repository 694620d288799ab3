"""Prints the oldest releases that ``pyproject.toml`` allows, as constraints for pip.

Of what the package needs and of the libraries whose scripts it is for; not of torch, of which
``constraints-cpu.txt`` has a build, nor of the tools that only tests need.
"""

import re
import sys
import tomllib
from pathlib import Path

LIBRARIES = ("peft", "transformers")
BOUND = re.compile(r"([\w.-]+)(?:\[.*?\])?>=([\w.]+)")


def bounds() -> list[str]:
    """Return ``name==version`` for each."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    project = project["project"]
    optional = [each for extra in project["optional-dependencies"].values() for each in extra]
    wanted = [*project["dependencies"], *(each for each in optional if each.startswith(LIBRARIES))]
    found = [match.groups() for match in map(BOUND.match, wanted) if match]
    return [f"{name}=={version}" for name, version in found if name != "torch"]


if __name__ == "__main__":
    sys.stdout.write("\n".join(bounds()) + "\n")
