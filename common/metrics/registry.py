"""Figures of one process: counted as they come, written out for Prometheus when it asks.

Counting is in the way of every task, so it is a dict and no lock: a Count or a Spread has one
thread that writes it. What can be read off the process is not counted at all but asked for then.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

log = logging.getLogger("slackwater.metrics")

Labels = tuple[str, ...]
# From a step of a small model to a video; from a hand-over in memory to one through Redis.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
BRIEF_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)


@dataclass(frozen=True, slots=True)
class Family:
    """One name in the exposition and in docs/operations.md.

    A `histogram` gathers all that was ever observed, a `gaugehistogram` is of what is there now.
    `bounds` are the upper ends of their buckets, without infinity.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "gaugehistogram"]
    says: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


class Count:
    """Only ever grows. What is in it from the start is 0, so that its first event is a growth."""

    def __init__(self, family: Family, *known: str) -> None:
        """`known`: values of its one label that are told before the first of them came."""
        start: list[Labels] = [(value,) for value in known]
        if not family.labels:
            start = [()]
        self.family, self._values = family, dict[Labels, float].fromkeys(start, 0.0)

    def add(self, *labels: str, by: float = 1.0) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + by

    def collect(self) -> Metric:
        return _plain(self.family, dict(self._values))


class Spread:
    """How often values fell into each bucket."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._buckets: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        if not family.labels:
            self._empty(())

    def observe(self, value: float, *labels: str) -> None:
        buckets = self._buckets.get(labels)
        if buckets is None:
            buckets = self._empty(labels)
        buckets[bisect_left(self.family.bounds, value)] += 1
        self._sums[labels] += value

    def _empty(self, labels: Labels) -> list[int]:
        self._sums[labels] = 0.0
        buckets = self._buckets[labels] = [0] * (len(self.family.bounds) + 1)
        return buckets

    def collect(self) -> Metric:
        family = self.family
        make = GaugeHistogramMetricFamily if family.kind == "gaugehistogram" else None
        metric = (make or HistogramMetricFamily)(family.name, family.says, labels=family.labels)
        ends = [*map(_number, family.bounds), "+Inf"]
        for labels, buckets in list(self._buckets.items()):
            filled = list(zip(ends, accumulate(map(float, buckets)), strict=True))
            metric.add_metric(labels, filled, self._sums[labels])
        return metric


Asked = Callable[[], Mapping[Labels, float]]


class Registry:
    """The one registry of a process."""

    def __init__(self) -> None:
        self.prometheus = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.prometheus)
        self._collected: list[tuple[str, Callable[[], Metric]]] = []
        self.prometheus.register(self)

    def count(self, family: Family, *known: str) -> Count:
        made = Count(family, *known)
        self._collected.append((family.name, made.collect))
        return made

    def spread(self, family: Family) -> Spread:
        made = Spread(family)
        self._collected.append((family.name, made.collect))
        return made

    def ask(self, family: Family, values: Asked) -> None:
        """`values` is called at each scrape, on a thread of its own."""
        self._collected.append((family.name, lambda: _plain(family, values())))

    def ask_spread(self, family: Family, fill: Callable[[Spread], None]) -> None:
        """As `ask`: `fill` is given an empty spread at each scrape."""

        def collect() -> Metric:
            fresh = Spread(family)
            fill(fresh)
            return fresh.collect()

        self._collected.append((family.name, collect))

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls. One figure that cannot be had hides no other."""
        for name, collect in self._collected:
            try:
                yield collect()
            except Exception:
                log.exception("%s cannot be told", name)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.prometheus)


def _plain(family: Family, values: Mapping[Labels, float]) -> Metric:
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, family.says, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric


def _number(bound: float) -> str:
    return "+Inf" if bound == inf else f"{bound:g}"
