"""``autofit doctor``, on whatever this machine is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autofit import doctor
from autofit.cli import main
from autofit.worker import meter
from autofit.worker.meter import nvml

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


def test_memory_of_others_and_what_nobody_measures_are_marked() -> None:
    hardware = meter.Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 << 30)
    holder = nvml.Holder(pid=7, name="python", size=100 << 30)
    card = nvml.Card(
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
    blind = nvml.Card(
        entry="0",
        uuid="",
        hardware=hardware,
        free=140 << 30,
        held=0,
        holders=(),
        measured=False,
    )
    assert "the free memory is unknown" in doctor._card(blind).text
