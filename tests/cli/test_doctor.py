"""``autofit doctor``, on whatever this machine is."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from autofit import doctor
from autofit.cli import main
from autofit.facts import Bandwidth
from autofit.storage import MachineKey, Store
from autofit.worker import meter
from autofit.worker.cluster.versions import versions

pytestmark = pytest.mark.quick


def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("autofit ")
    assert meter.hardware("cpu").name in printed
    for name in ("torch", "NVML", "CPU", "torch.compile", "Ray", "overlay"):
        assert f"  {name}  " in printed
    assert "cannot be imported" not in printed


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == meter.default_device()
    assert len(found["cards"]) == len(meter.cards())
    assert {each["name"] for each in found["findings"]} >= {"torch", "NVML", "Ray"}


def test_it_names_what_each_extra_is_for(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"docs", "dev"}
    assert extras == set(doctor.EXTRAS)
    page = (root / "docs/how-to/install.md").read_text()
    assert all(f"\n| `{extra}` | " in page for extra in extras)
    found = {each.name: each for each in doctor.examine().findings}
    assert all(found[f"extra {extra}"].text.startswith("for ") for extra in extras)


def test_it_names_what_an_extra_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A distribution that needs what is there, and by an extra of an extra what is not."""
    about = tmp_path / "autofit_torch-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: autofit-torch\nVersion: 9\n"
        + "".join(f"Provides-Extra: {extra}\n" for extra in doctor.EXTRAS)
        + "Requires-Dist: torch\n"
        "Requires-Dist: click; extra == 'serve'\n"
        "Requires-Dist: autofit-torch[report]; extra == 'serve'\n"
        "Requires-Dist: no-such-package>=1; extra == 'report'\n"
        "Requires-Dist: another; extra == 'report' and python_version < '3'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for extra, command in (("report", "autofit report"), ("serve", "autofit serve")):
        (line,) = (each for each in lines if f"  extra {extra} " in each)
        assert line.startswith("! ")
        lacks = f"for {command}; missing: no-such-package (pip install 'autofit-torch[{extra}]')"
        assert line.endswith(lacks)
    assert sum(line.startswith("ok  extra") for line in lines) == len(doctor.EXTRAS) - 2


def test_it_shows_the_bandwidth_that_searches_have_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = meter.cards()
    hardware = cards[0].hardware if cards else meter.hardware("cpu")
    machine = MachineKey.of(hardware, versions())
    found = Bandwidth(all_reduce=123e9, all_gather=45.6e9, reduce_scatter=0.789e9)
    path = str(tmp_path / "store.db")
    assert main(["doctor", "--storage", path]) == 0
    assert "bandwidth" not in capsys.readouterr().out
    assert not Path(path).exists()
    with Store(path) as store:
        store.set_bandwidth(machine, 2, found)
        store.set_bandwidth(dataclasses.replace(machine, torch="0.1"), 8, found)
    assert main(["doctor", "--storage", path]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "bandwidth" in each)
    assert line.startswith("ok  bandwidth")
    assert line.endswith("as measured: 2 ranks 123 / 45.6 / 0.789 GB/s")
    assert main(["doctor", "--storage", path, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bandwidths"] == {"2": dataclasses.asdict(found)}


def test_a_store_that_cannot_be_read_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.db"
    path.write_text("no database" * 100)
    assert main(["doctor", "--storage", str(path)]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "!   store" in each)
    assert "not a database" in line


def test_memory_of_others_and_what_nobody_measures_are_marked() -> None:
    hardware = meter.Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 << 30)
    holder = meter.CardHolder(pid=7, name="python", size=100 << 30)
    card = meter.Card(
        entry="0",
        uuid="GPU-0",
        hardware=hardware,
        free=40 << 30,
        held=100 << 30,
        holders=(holder,),
    )
    found = doctor._card(card)
    assert not found.ok
    said = "NVIDIA H200, 40.0 GiB of 140.0 GiB free: process 7 (python) holds 100.0 GiB"
    assert found.text == said
    linked = dataclasses.replace(card, hardware=dataclasses.replace(hardware, link="nvlink"))
    assert doctor._card(linked).text == f"{said}; NVLink to the others"
    blind = meter.Card(
        entry="0",
        uuid="",
        hardware=hardware,
        free=140 << 30,
        held=0,
        holders=(),
        measured=False,
    )
    assert "the free memory is unknown" in doctor._card(blind).text
