"""A study in a notebook, as a browser draws it: nothing is cut in a wide and in a narrow column."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autofit.api.study import Study
from autofit.storage import StudyRecord, default_url
from tests.contrast import FAINT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NOTEBOOK = """<!doctype html><meta charset="utf-8">{faint}
<body style="margin: 0; background: {page}; color: {text}">{study}<script>
addEventListener("load", () => parent.postMessage(JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth,
  titles: document.querySelector("thead").clientHeight > 0,
  rows: document.querySelectorAll("tbody tr").length, faint: faint(document),
}), "*"));
</script>"""
FRAME = """<!doctype html><pre id="out"></pre><script>
addEventListener("message", (event) => {
  document.getElementById("out").textContent = event.data;
});
</script><iframe src="notebook.html" style="width: {width}px; border: 0"></iframe>"""


def looked_at(html: str, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """Return what a browser finds in the output of a cell of so many pixels."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    page, text = ("#111111", "#e0e0e0") if dark else ("#ffffff", "#212121")
    cell = NOTEBOOK.replace("{faint}", FAINT).replace("{study}", html)
    (folder / "notebook.html").write_text(cell.replace("{page}", page).replace("{text}", text))
    frame = folder / "frame.html"
    frame.write_text(FRAME.replace("{width}", str(width)))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}"]
    ran = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="out">(.+?)</pre>', ran.stdout, re.DOTALL)
    assert found is not None, ran.stderr
    document: dict[str, Any] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">"))
    return document


@pytest.mark.quick
@pytest.mark.parametrize(("width", "dark"), [(1180, False), (376, True)])
def test_a_study_in_a_notebook(study: StudyRecord, tmp_path: Path, width: int, dark: bool) -> None:
    html = Study.read(default_url(), study.id)._repr_html_()
    found = looked_at(html, tmp_path, width=width, dark=dark)
    assert found["width"] == width
    assert found["needed"] <= width, "nothing needs a horizontal scroll"
    assert found["titles"] == (width > 560), "in a narrow column each cell has its title"
    assert found["rows"] == 3
    assert found["faint"]["texts"] > 20
    assert found["faint"]["found"] == []
