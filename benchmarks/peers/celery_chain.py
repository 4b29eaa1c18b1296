"""A Celery application whose chain of three no-op tasks stands for encode, denoise, decode.

Set as Celery's own optimizing guide says for many short tasks: a high prefetch multiplier, no
results but the last one's, msgpack, no rate limits, no events. Without Celery's `[redis]` extra.
"""

from __future__ import annotations

import os

from celery import Celery

app = Celery("peer", broker=os.environ.get("PEER_REDIS"), backend=os.environ.get("PEER_REDIS"))
app.conf.update(
    task_serializer="msgpack",
    result_serializer="msgpack",
    accept_content=["msgpack"],
    worker_prefetch_multiplier=64,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
    result_expires=600,
)


@app.task(ignore_result=True)
def encode(job: str) -> str:
    return job


@app.task(ignore_result=True)
def denoise(job: str) -> str:
    return job


@app.task
def decode(job: str) -> str:
    return job
