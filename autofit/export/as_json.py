"""Writes the whole result as JSON, for programs."""

from __future__ import annotations

import json

from autofit.analysis.result import Result
from autofit.export.document import document


def render(result: Result) -> str:
    """Return the document of ``result`` as indented JSON."""
    return json.dumps(document(result), indent=2) + "\n"
