"""Figures and traces of one stage worker, as its settings want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.arena import Arena
from common.handles import HandleStore
from common.metrics.handoff import TimedStore
from common.metrics.http import Port, serve
from common.metrics.registry import Registry
from common.metrics.worker import WorkerMetrics
from common.ran import Watcher
from common.settings import Settings
from common.task_traces import TaskTraces
from common.tracing import open_spans
from common.worker import Worker


class Observed:
    """What looks on while a worker works; nothing where nothing is wanted.

    Raises NoTracing, or OSError for a port that cannot be had.
    """

    def __init__(self, settings: Settings, stage: str, worker: str) -> None:
        self._metrics: WorkerMetrics | None = None
        self._port: Port | None = None
        self.watchers: list[Watcher] = []
        self._spans = open_spans(settings, stage, worker)
        if self._spans is not None:
            self.watchers.append(TaskTraces(self._spans, worker))
        if settings.metrics_port:
            registry = Registry()
            self._metrics = WorkerMetrics(registry)
            self._port = serve(registry, settings)
            self.watchers.append(self._metrics.ran)

    @property
    def address(self) -> str:
        """Where the figures are; "" where they are not."""
        return self._port.address if self._port is not None else ""

    def store(self, host: str, **options: Any) -> HandleStore:
        """A handle store, timed if there is anybody to tell."""
        if self._metrics is None:
            return HandleStore(host, **options)
        return TimedStore(host, moved=self._metrics.moved, **options)

    def show(
        self, worker: Worker, arena: Arena, stored: Mapping[str, int],
        counts: Callable[[], Mapping[str, int]],
    ) -> None:  # fmt: skip
        """The worker is there: what stands in it can be told."""
        if self._metrics is not None:
            self._metrics.show(worker, arena, stored, counts)

    def close(self) -> None:
        """Before what is shown is closed."""
        if self._port is not None:
            self._port.close()
        if self._spans is not None:
            self._spans.close()
