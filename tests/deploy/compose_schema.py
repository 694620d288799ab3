"""Makes ``compose-spec.yaml`` of the schema of Compose files: names and types, no prose.

    python tests/deploy/compose_schema.py compose-spec.json > tests/deploy/compose-spec.yaml

The schema is ``schema/compose-spec.json`` of the repository github.com/compose-spec/compose-spec
(Apache-2.0), at the commit ``COMMIT`` names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

COMMIT = "170098ba07d9"
PROSE = ("description", "title", "$comment", "examples")


def pruned(found: Any) -> Any:
    """Return a part of the schema without its prose."""
    if isinstance(found, list):
        return [pruned(each) for each in found]
    if not isinstance(found, dict):
        return found
    return {
        name: pruned(each)
        for name, each in found.items()
        if not (name in PROSE and isinstance(each, str | list))
    }


if __name__ == "__main__":
    schema = {
        "$comment": f"made of compose-spec {COMMIT} by compose_schema.py",
        **pruned(json.loads(Path(sys.argv[1]).read_text())),
    }
    yaml.safe_dump(schema, sys.stdout, width=100, default_flow_style=None, sort_keys=True)
