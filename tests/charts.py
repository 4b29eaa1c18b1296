"""The Helm chart, rendered by Helm's own engine, as manifests that tests look into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_python import chart

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "slackwater"
Manifest = dict[str, Any]


def render(
    values: Manifest | None = None, name: str = "pool", namespace: str = "pictures"
) -> list[Manifest]:
    """What `helm install NAME` would create with these values. Raises HelmError."""
    with chart.Chart.load(CHART) as loaded:
        files = loaded.render(values=values or {}, name=name, namespace=namespace)
    return [
        manifest
        for file, text in sorted(files.items())
        if file.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def one(manifests: list[Manifest], kind: str, part: str) -> Manifest:
    """The manifest of a kind whose name ends in `part`."""
    [found] = [
        m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith("-" + part)
    ]
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod specification of whatever makes pods."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


# What our custom resources have of KEDA's, by its documentation (2.13): a part of its schema, with
# nothing else allowed.
_TRIGGER = {
    "type": "object",
    "required": ["type", "metadata"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": ["redis", "prometheus"]},
        # Every value is text: a number is refused by the cluster.
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "authenticationRef": {"type": "object", "required": ["name"]},
    },
}
KEDA: dict[str, Manifest] = {
    "ScaledObject": {
        "type": "object",
        "required": ["scaleTargetRef", "triggers"],
        "additionalProperties": False,
        "properties": {
            "scaleTargetRef": {"type": "object", "required": ["name"]},
            "pollingInterval": {"type": "integer"},
            "cooldownPeriod": {"type": "integer"},
            "initialCooldownPeriod": {"type": "integer"},
            "minReplicaCount": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "advanced": {"type": "object"},
            "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
        },
    },
    "TriggerAuthentication": {
        "type": "object",
        "required": ["secretTargetRef"],
        "additionalProperties": False,
        "properties": {
            "secretTargetRef": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["parameter", "name", "key"],
                    "additionalProperties": False,
                    "properties": {
                        name: {"type": "string"} for name in ("parameter", "name", "key")
                    },
                },
            }
        },
    },
}
