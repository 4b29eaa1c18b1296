"""Revoking a task cancels its job. And what other programs' broadcasts may not do to this worker.

All Celery programs on a broker share one broadcast channel: a `control.revoke` sent by any of
them arrives here, and so does a `control.shutdown` that its sender meant for its own workers.
"""

from __future__ import annotations

from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.control import Panel

from common.asks import Ask
from common.client import Client

# Left out is what would stop or resize this worker, or have it take other programs' tasks, which
# it could only throw away.
KEPT = frozenset(
    {
        "ping", "report", "conf", "dump_conf", "stats", "dump_tasks", "registered", "active",
        "dump_active", "reserved", "dump_reserved", "scheduled", "dump_schedule", "revoked",
        "dump_revoked", "active_queues", "query_task", "clock", "hello",
    }
)  # fmt: skip


def take_over(client: Client) -> None:
    """Put this process' remote control commands in place; call once, before the worker starts."""

    def revoke(state: Any, task_id: Any, **more: Any) -> Any:
        """Cancel the jobs of these tasks, whether they run or not."""
        # Nothing here is to be terminated: no task of ours takes longer than a moment.
        answer = control.revoke(state, task_id, **{**more, "terminate": False})
        cancel(client, [str(one) for one in maybe_list(task_id) or ()])
        return answer

    def terminate(state: Any, signal: Any, task_id: Any, **more: Any) -> Any:
        """As revoke."""
        return revoke(state, task_id, **more)

    def refused(state: Any, **_: Any) -> dict[str, str]:
        """Not done here."""
        return {"error": "not by broadcast: this worker serves all programs of its broker"}

    for name in list(Panel.data):
        if name not in KEPT:
            Panel.data[name] = refused
    Panel.data.update(revoke=revoke, terminate=terminate)


def cancel(client: Client, tasks: list[str]) -> None:
    """Cancel those of `tasks` that became jobs and go on; other programs' tasks are none."""
    if not tasks:
        return
    [found] = client.ask(Ask((("HMGET", client.keys.celery, *tasks),)))
    for task, there in zip(tasks, found, strict=True):
        if there is not None:
            client.cancel(task)
