"""Every figure there is, by service; `python -m services.metrics` prints the table in
docs/operations.md."""

from __future__ import annotations

import common.metrics.worker
from common.metrics import process
from common.metrics.registry import Family
from services.celery_app import metrics as celery_app
from services.coordinator import metrics as coordinator
from services.gateway import metrics as gateway

BY_SERVICE: dict[str, tuple[Family, ...]] = {
    "every service": process.FAMILIES,
    "the coordinator": coordinator.FAMILIES,
    "a worker": common.metrics.worker.FAMILIES,
    "the gateway": gateway.FAMILIES,
    "the Celery side": celery_app.FAMILIES,
}


def families() -> dict[str, Family]:
    """All of them by name."""
    return {family.name: family for group in BY_SERVICE.values() for family in group}


def series(family: Family) -> set[str]:
    """The names under which a query finds it."""
    if family.kind == "histogram":
        return {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
    if family.kind == "gaugehistogram":
        return {f"{family.name}_{part}" for part in ("bucket", "gcount", "gsum")}
    return {family.name}


def table() -> str:
    """Markdown: a part for each service, a row for each figure."""
    parts = []
    for service, group in BY_SERVICE.items():
        lines = [f"### Of {service}", "", "| name | kind | labels | what |"]
        lines.append("| --- | --- | --- | --- |")
        for family in group:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.says} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(table())
