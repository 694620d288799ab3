"""Prepares the ranks of a single-process script: replicas of it that train as one. No torch.

The script must not notice the other ranks, so its environment has none of the variables of
``torchrun``. Each rank sees one GPU. The ranks find one another by ``ChildSpec.meeting``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autofit.exceptions import UsageError
from autofit.worker.launch.rank_environment import THREADS, free_port
from autofit.worker.meter import nvml
from autofit.worker.records.hosts import LOOPBACK
from autofit.worker.records.trials import ChildSpec, Meeting

HASH_SEED = "PYTHONHASHSEED"
_SEEDS = 1 << 31


def tasks(
    spec: ChildSpec, environment: Mapping[str, str]
) -> tuple[list[ChildSpec], list[dict[str, str]]]:
    """Return the task and the environment of each rank of ``spec.request``.

    If ``spec`` has a scratch folder, each rank gets a folder of its own in it. A rank on another
    host gets its GPU there. Raises ``UsageError`` if fewer GPUs are visible than there are ranks.
    """
    count = spec.request.replicas
    hosts = spec.request.hosts
    places = hosts.ranks if hosts is not None else (None,) * count
    if len(places) < count:
        raise UsageError(f"{count} ranks need as many devices, and {len(places)} are reserved")
    spec = replace(spec, request=replace(spec.request, hosts=None))
    seed = 0 if spec.mode == "trial" else random.SystemRandom().randrange(_SEEDS)
    address = hosts.address if hosts is not None else LOOPBACK
    meeting = Meeting(address=address, port=free_port(), seed=seed)
    specs = [replace(spec, rank=rank, meeting=meeting, host=places[rank]) for rank in range(count)]
    if spec.scratch is not None:
        specs = [replace(each, scratch=_folder(spec.scratch, each.rank)) for each in specs]
    common = {THREADS: "1", HASH_SEED: str(seed), **environment}
    if spec.request.device != "cuda":
        return specs, [common] * count
    cards = nvml.cards(environment)
    here = sum(each.host is None for each in specs)
    if len(cards) < here:
        raise UsageError(f"{here} ranks need as many GPUs, and {len(cards)} are visible here")
    shown = [{**common, nvml.VISIBLE: card.entry} for card in cards[:here]]
    return specs, [*shown, *[common] * (count - here)]


def _folder(scratch: str, rank: int) -> str:
    folder = Path(scratch, f"rank{rank}")
    folder.mkdir()
    return str(folder)
