"""The Celery side from settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.client import Client
from common.connect import writing
from common.metrics.registry import Registry
from common.settings import Settings
from services.celery_app import side
from services.celery_app.app import broker_url, make_app
from services.celery_app.backend import Backends
from services.celery_app.beat import Beat, schedule
from services.celery_app.door import Door
from services.celery_app.following import Following
from services.celery_app.metrics import CeleryMetrics
from services.celery_app.sender import PATIENCE_S, Sender
from services.celery_app.telling import Telling


@dataclass(frozen=True, slots=True)
class Built:
    app: Any
    sender: Sender
    client: Client
    registry: Registry


def build(settings: Settings, sender_only: bool = False) -> Built:
    """`sender_only`: no beat, since nobody here takes what it sends, and perhaps nobody anywhere.
    Raises ValueError for settings that cannot be used."""
    app = make_app(settings)
    client = Client(settings.redis_url, settings.prefix, PATIENCE_S)
    redis = writing(settings.redis_url)
    backends = Backends(app, broker_url(settings))
    registry = Registry()
    metrics = CeleryMetrics(registry, settings)
    Door(client, redis, backends, metrics).register(app)
    side.register(app, client, redis, settings)
    app.conf.beat_schedule = schedule(side.JANITOR)
    following = Following(client, Telling(app, backends))
    sender = Sender(settings, following, None if sender_only else Beat(app), metrics)
    metrics.show(sender)
    return Built(app, sender, client, registry)
