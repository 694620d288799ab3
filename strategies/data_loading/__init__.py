"""Worker processes fetch the next batches while the model computes."""

from __future__ import annotations

import multiprocessing

from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Level,
    Root,
    ScriptPart,
    Setting,
    Strategy,
    Undo,
    Waste,
)

WORKERS = 4


def _in_trainer(*, pinned: bool) -> Setting:
    loader = {"dataloader_num_workers": WORKERS, "dataloader_pin_memory": pinned}
    return Setting(fields=loader)


class DataLoading(Strategy):
    """Forked processes fetch the batches of a ``DataLoader`` without workers ahead of time.

    Samples, their order and all random draws stay the same. The sampler stays in the script's
    process. A data set is refused if its workers would return other data: if it draws random
    numbers, reads from an open file, holds a connection, or keeps state between samples. The
    first batches are fetched both ways and compared. A batch that fails in a worker is fetched
    again in the script's process.

    The workers are forked for each pass over the data. So they see what the script changes in
    the data set between two passes.
    """

    name = "data_loading"
    summary = "worker processes fetch the next batches while the model computes"
    source = "https://docs.pytorch.org/docs/stable/data.html"
    remedies = Waste.DATA_WAIT
    levels = (
        Level(name=AS_IS, summary="the script's own loader"),
        Level(
            name="workers",
            summary="up to four worker processes, two batches ahead each",
            slowdown=0.85,
            settings={"trainer": _in_trainer(pinned=False)},
            refines=True,
        ),
        Level(
            name="pinned",
            summary="the same, into memory from which a GPU copies at full speed",
            slowdown=0.84,
            settings={"trainer": _in_trainer(pinned=True)},
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"loader workers"``, or ``"pinned loader workers"``."""
        return "pinned loader workers" if level == "pinned" else "loader workers"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """The workers are forked, to share the data set. Only CUDA uses pinned memory."""
        if "fork" not in multiprocessing.get_all_start_methods():
            return "this system cannot fork processes"
        if level == "pinned" and hardware.on_host:
            return "pinned memory speeds up copies to a CUDA device only"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The script's loader must have no workers."""
        if facts.workers:
            return f"the script's loader has {facts.workers} workers already"
        return None

    def by_hand(self, level: str) -> ByHand:
        """Return the loader's arguments."""
        pinned = {"pin_memory": "True"} if level == "pinned" else {}
        loader = {"num_workers": str(WORKERS), **pinned}
        given = ", ".join(f"{name}={code}" for name, code in loader.items())
        setting = f"make the training DataLoader with {given}"
        return ByHand(setting=setting, part=ScriptPart.LOADER, loader=loader)

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Fetch the batches of all loaders in workers from now on."""
        from autofit.strategies.data_loading.workers import Reading

        reading = Reading(root, pinned=level == "pinned")
        undos = [root.around_next(reading.next), root.around_forward(reading.watch)]

        def undo() -> None:
            for take_back in reversed(undos):
                take_back()
            reading.close()

        return undo
