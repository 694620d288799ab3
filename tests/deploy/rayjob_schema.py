"""Makes ``rayjob-v1.yaml`` of KubeRay's CRD: names, types and what is required, no prose.

    python tests/deploy/rayjob_schema.py ray.io_rayjobs.yaml > tests/deploy/rayjob-v1.yaml

The CRD is ``helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml`` of the repository
github.com/ray-project/kuberay (Apache-2.0), at the version ``KUBERAY`` names. Fields below those
of a container are not looked at, nor unusual ones of a pod: the API server does that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

KUBERAY = "1.7.0"
DEPTH = 6
"""Levels of fields below ``spec``."""
POD = {"$ref": "#/definitions/pod"}
WHOLE = {"template": POD, "submitterPodTemplate": POD}
OPEN = (
    "affinity",
    "autoscalerOptions",
    "dnsConfig",
    "ephemeralContainers",
    "headService",
    "initContainers",
    "lifecycle",
    "livenessProbe",
    "metadata",
    "readinessProbe",
    "startupProbe",
    "topologySpreadConstraints",
)
"""Objects of which only the name is looked at."""


def pruned(field: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return what JSON Schema says of a field, without what it is for."""
    if field.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept: dict[str, Any] = {name: field[name] for name in ("type", "enum") if name in field}
    if depth == 0:
        return kept
    if "properties" in field:
        kept["additionalProperties"] = False
        kept["properties"] = {
            name: WHOLE.get(name) or pruned(each, 0 if name in OPEN else depth - 1)
            for name, each in field["properties"].items()
        }
        if "required" in field:
            kept["required"] = field["required"]
    elif isinstance(field.get("additionalProperties"), dict):
        kept["additionalProperties"] = pruned(field["additionalProperties"], depth - 1)
    if "items" in field:
        kept["items"] = pruned(field["items"], depth)
    return kept


def schema(crd: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a RayJob as JSON Schema has it."""
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    pod = spec["properties"]["rayClusterSpec"]["properties"]["headGroupSpec"]["properties"][
        "template"
    ]
    return {
        "$comment": f"made of the CRD of KubeRay {KUBERAY} by rayjob_schema.py",
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": "RayJob"},
            "metadata": {"type": "object", "required": ["name"]},
            "spec": pruned(spec, DEPTH),
        },
        "definitions": {"pod": pruned(pod, 4)},
    }


if __name__ == "__main__":
    made = schema(yaml.safe_load(Path(sys.argv[1]).read_text()))
    print(yaml.safe_dump(made, width=100, default_flow_style=None), end="")
