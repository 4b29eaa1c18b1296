"""taskiq on Redis streams: three no-op tasks, each kicking the next, the last one's result kept.

Kicking by hand is faster than the taskiq-pipelines package (which wraps every result), so the
peer gets that.
"""

from __future__ import annotations

import os

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

url = os.environ.get("PEER_REDIS", "redis://127.0.0.1:6379/0")
broker = RedisStreamBroker(url, consumer_id="0").with_result_backend(
    RedisAsyncResultBackend(url, result_ex_time=600)
)


@broker.task
async def decode(job: str) -> str:
    return job


@broker.task
async def denoise(job: str) -> None:
    await decode.kicker().with_task_id(job).kiq(job)


@broker.task
async def encode(job: str) -> None:
    await denoise.kiq(job)
