"""docket: three no-op tasks, each adding the next; the last one writes the job's result key."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

import redis.asyncio
from docket import CurrentDocket, Docket, Worker

url = os.environ.get("PEER_REDIS", "redis://127.0.0.1:6379/0")
results = redis.asyncio.Redis.from_url(url)


async def decode(job: str) -> None:
    await results.set(f"docket-result:{job}", job, ex=600)


async def denoise(job: str, docket: Docket = CurrentDocket()) -> None:  # noqa: B008
    await docket.add(decode, key=f"{job}-decode")(job)


async def encode(job: str, docket: Docket = CurrentDocket()) -> None:  # noqa: B008
    await docket.add(denoise, key=f"{job}-denoise")(job)


async def main() -> None:
    async with Docket(name="peer", url=url, execution_ttl=timedelta(0)) as docket:
        for task in (encode, denoise, decode):
            docket.register(task)
        async with Worker(
            docket, concurrency=100, minimum_check_interval=timedelta(milliseconds=10)
        ) as worker:
            await worker.run_forever()


if __name__ == "__main__":
    asyncio.run(main())
