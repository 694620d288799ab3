"""JSON: the whole result, for programs."""

from __future__ import annotations

import json

from autofit.export.document import document
from autofit.tuning.notices import Result


def render(result: Result) -> str:
    """Return the document of ``result`` as indented JSON."""
    return json.dumps(document(result), indent=2) + "\n"
