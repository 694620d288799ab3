"""Which cards CUDA shows, read as CUDA reads it. The driver is made up: cards as it lists them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from autofit.worker.meter import Load, nvml

pytestmark = pytest.mark.quick


class NVMLError(Exception):
    """As pynvml raises them."""


@dataclass(frozen=True)
class Device:
    uuid: str
    name: str = "NVIDIA H200"
    instances: tuple[Device, ...] = ()
    mig: bool = False
    board: str = "bridged"


class Driver:
    """The part of pynvml that the list of cards is made from."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    nvmlMemory_v2 = 2

    def __init__(self, *devices: Device) -> None:
        self._devices = devices

    def nvmlDeviceGetCount(self) -> int:
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self._devices[index]

    def nvmlDeviceGetName(self, device: Device) -> str:
        return device.name

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetMigMode(self, device: Device) -> tuple[int, int]:
        if device.uuid.startswith("MIG-"):
            raise NVMLError("Invalid Argument")
        return (int(device.mig), int(device.mig))

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        if index % 2 or index // 2 >= len(device.instances):  # places need not be in a row
            raise NVMLError("Not Found")
        return device.instances[index // 2]

    def nvmlDeviceGetMemoryInfo(self, device: Device, version: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, free=40, used=60)

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> SimpleNamespace:
        if device.uuid.startswith("MIG-"):
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=93, memory=12)

    def nvmlDeviceGetP2PStatus(self, one: Device, other: Device, kind: int) -> int:
        assert one != other
        if "MIG-" in one.uuid + other.uuid:
            raise NVMLError("Not Supported")
        assert kind == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if {one.board, other.board} == {"bridged"} else 5


A, B, C = Device("GPU-aaaa"), Device("GPU-bbbb"), Device("GPU-bccc")
CUT = Device("GPU-dddd", instances=(Device("MIG-1111"), Device("MIG-2222")), mig=True)
EMPTY = Device("GPU-eeee", mig=True)


def shown(driver: Driver, visible: str | None) -> list[tuple[str, str]]:
    environment = {} if visible is None else {nvml.VISIBLE: visible}
    return [(entry, device.uuid) for entry, device in nvml._handles(driver, environment)]


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        (None, ["0 GPU-aaaa", "1 GPU-bbbb", "2 GPU-bccc"]),
        ("", []),
        ("-1", []),
        ("2, 0", ["2 GPU-bccc", "0 GPU-aaaa"]),
        ("1,7,0", ["1 GPU-bbbb"]),  # what follows an entry that names nothing is ignored
        ("GPU-bc", ["GPU-bc GPU-bccc"]),
        ("GPU-bbbb,0", ["GPU-bbbb GPU-bbbb", "0 GPU-aaaa"]),
    ],
)
def test_entries_are_numbers_or_beginnings_of_uuids(
    visible: str | None, entries: list[str]
) -> None:
    assert [" ".join(pair) for pair in shown(Driver(A, B, C), visible)] == entries


def test_cards_of_several_models_go_by_uuid() -> None:
    """CUDA numbers them by speed, the driver by place."""
    other = Device("GPU-ffff", name="NVIDIA T4")
    assert shown(Driver(other, A), None) == [("GPU-ffff",) * 2, ("GPU-aaaa",) * 2]


def test_each_instance_of_a_cut_card_is_a_card() -> None:
    driver = Driver(A, CUT, EMPTY)
    pairs = [("0", "GPU-aaaa"), ("MIG-1111",) * 2, ("MIG-2222",) * 2]
    assert shown(driver, None) == pairs
    assert shown(driver, "MIG-2222") == [("MIG-2222",) * 2]
    assert shown(driver, "1") == [("MIG-1111",) * 2], "CUDA takes the first"
    assert shown(driver, "2") == []


def links(*devices: Device) -> list[str]:
    driver = Driver(*devices)
    handles = [handle for _, handle in nvml._handles(driver, {})]
    return [nvml._link(driver, handle, handles) for handle in handles]


def test_what_joins_a_card_to_the_others_that_are_shown() -> None:
    alone = Device("GPU-9999", board="in a slot of its own")
    assert links(A) == [""]
    assert links(A, B, C) == ["nvlink"] * 3
    assert links(A, B, alone) == ["pcie"] * 3
    assert links(CUT) == ["", ""], "nobody says how instances are joined"


MIB = 1 << 20


class Moving:
    """A card on which others come and go between one question and the next; sizes in MiB."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2

    def __init__(self, processes: Iterable[dict[int, int]], held: Iterable[int]) -> None:
        self._processes, self._held = iter(processes), iter(held)

    def nvmlDeviceGetComputeRunningProcesses(self, device: object) -> list[SimpleNamespace]:
        named = next(self._processes).items()
        return [SimpleNamespace(pid=pid, usedGpuMemory=size * MIB) for pid, size in named]

    def nvmlDeviceGetMemoryInfo(self, device: object, version: int) -> SimpleNamespace:
        used = next(self._held) * MIB
        return SimpleNamespace(total=143771 * MIB, free=143771 * MIB - used, used=used)


@pytest.mark.parametrize(
    ("processes", "held", "others"),
    [
        ([{1: 586, 2: 900}] * 2, [1500], 900),
        ([{1: 586, 2: 900}, {1: 586}, {1: 586}], [1500, 595], 0),  # one ended: looked at again
        ([{1: 586, 2: size} for size in (900, 300, 800, 200, 700)], [1500] * 4, 700),  # never still
    ],
)
def test_what_others_give_back_meanwhile_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, processes: list[dict[int, int]], held: list[int], others: int
) -> None:
    monkeypatch.setattr(nvml, "_initialised", lambda: Moving(processes, held))
    found = nvml.shares(object(), 1)
    assert found.own == 586 * MIB
    assert found.others == others * MIB
    assert found.held == held[-1] * MIB


@pytest.mark.parametrize(
    ("held", "others", "processes", "managed"),
    [
        (595, 0, 0, 0),
        (613, 0, 0, 0),  # another starts, and is not named yet
        (634, 0, 0, 39),
        (586 + 7 * 586 + 48 + 18, 7 * 586, 7, 0),  # seven have come, and one more starts
        (586 + 7 * 586 + 48 + 1024, 7 * 586, 7, 1063),
    ],
)
def test_what_nobody_is_said_to_hold(held: int, others: int, processes: int, managed: int) -> None:
    """Figures of an H200: 8.8 MiB of a process by itself, 5.6 more of each that comes."""
    first = nvml.Shares(held=595 * MIB, own=586 * MIB, others=0, processes=0)
    now = nvml.Shares(held=held * MIB, own=586 * MIB, others=others * MIB, processes=processes)
    assert now.managed(first) == managed * MIB


def test_the_load_of_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_initialised", lambda: Driver(A, CUT))
    monkeypatch.setenv(nvml.VISIBLE, "1")
    assert nvml.loads() == (
        Load(card="GPU 0", total=100, held=60, busy=93),
        Load(card="GPU MIG-1111", total=100, held=60, busy=None),
        Load(card="GPU MIG-2222", total=100, held=60, busy=None),
    )
