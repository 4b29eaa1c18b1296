"""Sweeping up what deaths and accidents leave in Redis, without ever touching what a job needs."""

from services.janitor.service import Janitor, sweep

__all__ = ["Janitor", "sweep"]
