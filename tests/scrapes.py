"""What a service tells Prometheus, read as Prometheus reads it."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.metrics.http import PORTS
from common.metrics.registry import Registry
from services.pool.local import LocalPool


class Scrape:
    """One exposition, parsed. `families`: name to kind; a counter's name is without _total."""

    def __init__(self, text: str) -> None:
        found = list(text_string_to_metric_families(text))
        self.families = {family.name: family.type for family in found}
        self._samples = [sample for family in found for sample in family.samples]

    @property
    def labels(self) -> dict[str, set[str]]:
        """By sample name, all names of labels on it."""
        names: dict[str, set[str]] = {}
        for sample in self._samples:
            names.setdefault(sample.name, set()).update(sample.labels)
        return names

    def of(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels; 0 without any."""
        wanted = labels.items()
        return sum(s.value for s in self._samples if s.name == name and wanted <= s.labels.items())

    def tells(self, name: str) -> bool:
        return any(sample.name == name for sample in self._samples)

    def values(self, name: str, label: str) -> set[str]:
        return {s.labels[label] for s in self._samples if s.name == name}


def scrape(address: str) -> Scrape:
    """`address`: host:port."""
    answer = httpx.get(f"http://{address}/metrics", timeout=30)
    assert answer.status_code == 200, answer.text
    return Scrape(answer.text)


def read(registry: Registry) -> Scrape:
    return Scrape(registry.text().decode())


def addresses(pool: LocalPool, count: int) -> dict[str, str]:
    """By service, where each of the pool's `count` processes tells its figures.

    They take the first free ports from `metrics_port` on; between those may lie others' ports.
    """
    found: dict[str, str] = {}
    first: Any = pool.settings.metrics_port
    for port in range(first, first + PORTS):
        address = f"127.0.0.1:{port}"
        if len(found) == count or port == pool.settings.http_port:
            continue
        with contextlib.suppress(httpx.HTTPError):
            [service] = scrape(address).values("slackwater_build_info", "service")
            found[service] = address
    return found
