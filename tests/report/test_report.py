"""The report: its figures, its safety, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autofit.cli import main
from autofit.plan import Plan
from autofit.report.content import read
from autofit.report.figures import figures
from autofit.report.page import page
from autofit.storage import Store, StudyRecord
from autofit.worker.records.traces import TracedStep
from autofit.worker.records.trials import OutOfMemory, TrialReport, Verdict
from tests.contrast import FAINT, LEAST, contrast, variables
from tests.report.stored import EVIL, FACTS, GIB, add, measured, opened, trace
from tests.report.stored import figures as measured_figures

pytestmark = pytest.mark.quick
REPORT = "autofit-report.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


# --- what it holds ----------------------------------------------------------------------------


def named(figure: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the traces of a figure by name."""
    return {trace["name"]: trace for trace in figure["data"]}


def test_speed_against_memory(store: Store, study: StudyRecord) -> None:
    found = figures(read(store, study))
    speed = named(found["speed"])
    assert speed["best plan"]["x"] == pytest.approx([18.0])
    assert speed["best plan"]["y"] == pytest.approx([14.0])
    assert "confirmation run: fits" in speed["best plan"]["text"][0]
    assert speed["as it is"]["y"] == pytest.approx([10.0])
    assert len(speed["measured"]["x"]) == 3
    assert speed["frontier"]["x"] == pytest.approx([15.0, 17.0, 18.0])
    (line,) = found["speed"]["layout"]["shapes"]
    assert line["x0"] == line["x1"] == 24.0
    failed = named(found["failed"])
    assert set(failed) == {"out of memory", "refused"}
    assert "the gradients differ" in failed["refused"]["text"][0].replace("<br>", " ")


def test_memory_adds_up_to_the_measured_peak(store: Store, study: StudyRecord) -> None:
    bars = named(figures(read(store, study))["memory"])
    peaks = bars.pop("measured peak")["x"]
    assert peaks == pytest.approx([22.0, 18.0])
    for row, peak in enumerate(peaks):
        assert sum(bar["x"][row] for bar in bars.values()) == pytest.approx(peak)
    predicted = {name for name, bar in bars.items() if "pattern" in bar["marker"]}
    assert predicted == {name for name in bars if "(predicted)" in name}
    assert bars["optimizer state (predicted)"]["x"] == pytest.approx([8.0, 8.0])


def test_the_losses_of_both_processes_begin_at_the_same_step(
    store: Store, study: StudyRecord
) -> None:
    found = figures(read(store, study))
    losses = named(found["losses"])
    assert losses["reference"]["y"] == [3.0, 2.8, 2.6, 2.4, 2.2]
    assert losses["best plan"]["y"] == [3.0, 2.81, 2.6, 2.41, 2.2]
    assert "differ by 0.36 % at most" in page(read(store, study))


def test_step_times_of_the_plans_that_count(store: Store, study: StudyRecord) -> None:
    steps = figures(read(store, study))["steps"]
    names = [trace["name"] for trace in steps["data"]]
    assert names == ["#0 as it is", "#3", "#4", "#6 best"]
    assert all(len(trace["x"]) == 5 for trace in steps["data"])


def test_plotly_accepts_each_figure(store: Store, study: StudyRecord) -> None:
    objects = pytest.importorskip("plotly.graph_objects")
    text = json.dumps(figures(read(store, study)))
    for figure in json.loads(re.sub(r'"--[a-z-]+"', '"#000000"', text)).values():
        layout = {
            key: {**value, "title": {"text": value.get("title", "")}} if "axis" in key else value
            for key, value in figure["layout"].items()
        }
        objects.Figure(data=figure["data"], layout=layout)  # raises for what Plotly does not know


def test_a_study_in_which_nothing_fits(store: Store) -> None:
    study = opened(store)
    short = OutOfMemory(phase="forward", message="no memory")
    report = TrialReport(index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short)
    add(store, study, report)
    assert set(figures(read(store, study))) == {"failed"}
    assert "No plan fits the budget." in page(read(store, study))


# --- axes that fit, and no chart without data -------------------------------------------------


def test_a_budget_far_above_the_data_stretches_no_axis(store: Store) -> None:
    study = store.set_facts(opened(store), FACTS)
    tiny = replace(FACTS.roots[0], parameter_bytes=4000, trainable=1000)
    store.set_facts(study, replace(FACTS, roots=(tiny,)))
    half = GIB // 2
    small = replace(measured_figures(10.0, 2.0), peak_device=half, peak_reserved=half)
    add(store, study, measured(Plan(), replace(small, peak_allocated=half)))
    found = figures(read(store, store.study(study.id)))
    for name in ("speed", "memory"):
        layout = found[name]["layout"]
        assert layout["xaxis"]["title"].endswith("(MiB)")
        assert layout["xaxis"]["range"] == [0, pytest.approx(1.08 * 512)]
        assert layout["shapes"] == [], "the budget's line would be beyond the axis"
        (label,) = layout["annotations"]
        assert (label["text"], label["x"]) == ("budget 24.0 GiB →", layout["xaxis"]["range"][1])


def test_a_bar_beyond_the_budget_is_labelled_beside_the_axis(store: Store) -> None:
    study = store.set_facts(opened(store), FACTS)
    large = replace(FACTS.roots[0], trainable=20 * GIB)
    store.set_facts(study, replace(FACTS, roots=(large,)))
    short = OutOfMemory(phase="forward", message="no memory")
    report = TrialReport(index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short)
    add(store, study, report)
    memory = figures(read(store, store.study(study.id)))["memory"]
    assert "activations and others (the rest)" not in named(memory), "nothing is known of it"
    assert "did not fit" in memory["data"][0]["y"][0]
    (line,) = memory["layout"]["shapes"]
    assert 0 < line["x0"] < memory["layout"]["xaxis"]["range"][1]


def test_no_heading_without_a_chart(store: Store) -> None:
    """A script without known losses, and a single plan, whose frontier is no line."""
    study = opened(store)
    plain = measured(Plan(), measured_figures(10.0, 22.0))
    add(store, study, plain, first=replace(trace(3.0), steps=(TracedStep(), TracedStep())))
    content = read(store, study)
    found = figures(content)
    assert set(found) == {"speed", "steps"}
    assert "frontier" not in named(found["speed"])
    text = page(content)
    assert set(re.findall(r'class="plot[^"]*" id="(\w+)"', text)) == {"speed", "steps"}
    assert "<h2>Losses</h2>" not in text
    assert "frontier joins" not in text


def test_a_loss_that_is_not_finite_is_a_gap(store: Store) -> None:
    """JSON has no NaN: with one in it, a browser draws no chart at all."""
    study = opened(store)
    diverged = measured(Plan(), measured_figures(10.0, 22.0, (float("inf"), 2.0)))
    add(store, study, diverged, first=trace(3.0, float("nan")))
    text = page(read(store, study))
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)

    def refuse(constant: str) -> object:
        raise AssertionError(constant)

    found = json.loads(data, parse_constant=refuse)
    assert named(found["losses"])["reference"]["y"] == [3.0, None, None, 2.0]


# --- safety and colours -----------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def test_nothing_from_the_store_becomes_markup(store: Store, study: StudyRecord) -> None:
    text = page(read(store, study))
    elements = Elements()
    elements.feed(text)
    assert "img" not in elements.found
    assert elements.found.count("script") == 3
    assert EVIL not in text
    assert "\x1b" not in text
    for figure in figures(read(store, study)).values():
        assert "<img" not in json.dumps(figure)


def test_nothing_is_fetched(store: Store, study: StudyRecord) -> None:
    text = page(read(store, study))
    without_plotly = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "default-src 'none'" in without_plotly
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", without_plotly)


def palettes() -> Iterator[dict[str, str]]:
    css = Path(sys.modules["autofit.report.page"].__file__ or "").with_name("report.css")
    for block in re.findall(r":root \{(.*?)\}", css.read_text(), re.DOTALL):
        yield dict(re.findall(r"--([a-z-]+): (#\w{6});", block))


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast(dark: bool) -> None:
    light_and_dark = list(palettes())
    assert len(light_and_dark) == 2
    palette = light_and_dark[dark]
    for text in ("text", "muted", "best", "bad", "warn", "frontier", "as-is"):
        for ground in ("page", "panel"):
            one, other = sorted((luminance(palette[text]), luminance(palette[ground])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, (text, ground)


# --- the command ------------------------------------------------------------------------------


def test_the_command_writes_one_file(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report"]) == 0
    assert f"{REPORT}: study {study.id}" in capsys.readouterr().out
    assert main(["report", f"{EVIL}.py", "-o", "a.html"]) == 0
    assert main(["report", "--study", study.id[:3], "-o", "b.html"]) == 0
    assert Path(REPORT).read_text() == Path("a.html").read_text() == Path("b.html").read_text()


def test_a_mistake_is_one_line(
    store: Store, study: StudyRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.py").touch()
    for line, said in (
        (["report", "other.py"], "no study of other.py is stored"),
        (["report", "--study", "zz"], "the store has no study 'zz'"),
        (["report", "other.py", "--study", study.id], "give SCRIPT or --study, not both"),
        (["report", "-o", "no/such/folder.html"], "'no/such/folder.html' cannot be written"),
    ):
        assert main(line) == 2
        assert said in capsys.readouterr().err


def test_without_plotly_one_line_says_what_to_install(store: Store, study: StudyRecord) -> None:
    code = """
import sys
from autofit.cli import main
sys.modules["plotly"] = None
sys.exit(main(["report"]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("autofit: a report needs Plotly")
    assert "pip install 'autofit-torch[report]'" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_text_stands_out_from_what_is_behind_it(root: Path) -> None:
    """Of the report and of the service's pages, which have the same variables."""
    sheets = [root / "autofit/report/report.css", root / "autofit/service/style.css"]
    css = "".join(sheet.read_text() for sheet in sheets)
    texts = set(re.findall(r"(?<![\w-])(?:color|fill): var\((--[\w-]+)\)", css))
    grounds = set(re.findall(r"background: var\((--[\w-]+)\)", css))
    assert texts >= {"--text", "--muted", "--best", "--bad", "--warn"}
    assert grounds == {"--page", "--panel"}
    for colours in variables(css):
        pairs = {(a, b): contrast(colours[a], colours[b]) for a in texts for b in grounds}
        assert not {pair: each for pair, each in pairs.items() if each < LEAST}


# --- in a browser -----------------------------------------------------------------------------

WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
for (const name of ["error", "warn"]) console[name] = (...all) => problems.push(all.join(" "));
</script>"""
ACT = """<script>
addEventListener("load", () => setTimeout(() => {
  const column = (at) => [...document.querySelectorAll("#trials tbody tr")].map(
    (row) => row.cells[at].textContent);
  const click = (at) => document.querySelectorAll("#trials th button")[at].click();
  const orders = [column(0)];
  for (const at of [2, 2, 1, 0]) { click(at); orders.push(column(at)); }
  parent.postMessage(JSON.stringify({
    problems, orders,
    width: innerWidth, needed: document.documentElement.scrollWidth,
    plots: Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.id,
      plot.querySelectorAll(".points path.point, .scatterlayer path, .bars path").length])),
    wide: [...document.querySelectorAll(".main-svg")].map((svg) => svg.clientWidth),
    ground: getComputedStyle(document.body).backgroundColor,
    faint: faint(document),
  }), "*");
}, 500));
</script>"""
FRAME = """<!doctype html><pre id="out"></pre><script>
addEventListener("message", (event) => {
  document.getElementById("out").textContent = event.data;
});
</script><iframe src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>"""


@pytest.fixture
def in_browser(store: Store, study: StudyRecord, tmp_path: Path) -> Any:
    """Return what a browser finds in the report, in a window of some width."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    text = page(read(store, study)).replace("<head>", f"<head>{WATCH}{FAINT}", 1)
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{ACT}</body>"))

    def look(width: int, *, dark: bool = False) -> dict[str, Any]:
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.replace("{width}", str(width)))
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [f"--window-size={width + 40},900"]
        command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        ran = subprocess.run(
            [*command, frame.as_uri()], capture_output=True, text=True, timeout=120
        )
        found = re.search(r'<pre id="out">(.*?)</pre>', ran.stdout, re.DOTALL)
        assert found is not None, ran.stderr
        assert found[1], ran.stderr
        document: dict[str, Any] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">"))
        return document

    return look


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_browser_draws_and_sorts_it(in_browser: Any, width: int, dark: bool) -> None:
    found = in_browser(width, dark=dark)
    assert found["problems"] == []
    assert found["width"] == width
    assert found["needed"] <= width, "nothing needs a horizontal scroll"
    assert set(found["plots"]) == {"speed", "failed", "memory", "steps", "losses"}
    assert all(found["plots"].values()), found["plots"]
    assert found["wide"]
    assert max(found["wide"]) <= width
    assert found["ground"] == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
    assert found["faint"]["texts"] > 100
    assert found["faint"]["found"] == []
    before, up, down, by_plan, by_number = found["orders"]
    assert before == by_number == [str(number) for number in range(7)]
    assert all(float(a.split()[0]) <= float(b.split()[0]) for a, b in pairwise(up[:5]))
    assert up[5:] == down[5:] == ["-", "-"], "trials without a speed stay last"
    assert down[:5] == up[:5][::-1]
    assert by_plan == sorted(by_plan, key=str.casefold)
