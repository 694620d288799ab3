"""A search gets its devices at once, or waits for them; the GPUs of this cluster are Ray's only."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.exceptions import UsageError
from autofit.worker.cluster.local_ray import RaySession
from autofit.worker.cluster.reservation import reserve


@pytest.mark.full
def test_a_search_waits_until_its_gpus_are_free(ray_cluster: Any) -> None:
    from ray.util import remove_placement_group

    ray_cluster.add("CPU=1 GPU=2")
    ray_cluster.add("CPU=1 GPU=2")
    environment = {"HOME": "/home/u", "RAY_JOB_ID": "01", "CUDA_VISIBLE_DEVICES": ""}
    with RaySession(address=ray_cluster.address):
        first = reserve(2, 1, environment)
        assert first.ready(30)
        assert first.environment == {"HOME": "/home/u"}
        assert first.name == "2 GPUs"
        places = first.places()
        assert (places.device, sum(places.slots.values())) == ("cuda", 2)
        assert sorted(number for each in first.bundles().values() for number in each) == [0, 1]

        second = reserve(4, 2, environment)
        assert not second.ready(1.0)
        remove_placement_group(first.group)
        assert second.ready(30)
        assert sorted(second.places().slots.values()) == [1, 1], "a training stays on one machine"

        with pytest.raises(UsageError, match="none of the cluster's has more than 2 GPUs"):
            reserve(None, 3, environment)
        with pytest.raises(UsageError, match="--gpus 8: the cluster has 4"):
            reserve(8, 1, environment)
        with pytest.raises(UsageError, match="too few GPUs"):
            reserve(1, 2, environment)
        remove_placement_group(second.group)
