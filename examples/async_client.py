"""Several jobs at once with the asyncio client: events, a deadline, a cancel, an error.

slackwater up
python examples/async_client.py
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from slackwater import AsyncClient, JobRefused

SMALL: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 8}


async def main(url: str = "redis://127.0.0.1:6379/0") -> None:
    async with AsyncClient(url) as client:
        await asyncio.gather(
            follow(client, "a large red circle on a blue background", slo_ms=30_000),
            follow(client, "a large green ring on a pink background", slo_ms=60_000),
            cancel(client),
            refused(client),
        )


async def follow(client: AsyncClient, prompt: str, **params: Any) -> None:
    job = await client.submit(prompt, **SMALL, **params)
    async for event in job.events():
        if event.type == "step":
            print(f"{prompt}: step {event.step}")
    result = await job.wait()
    print(f"{prompt}: {result.status}, on time: {result.on_time}, {len(await job.output())} bytes")


async def cancel(client: AsyncClient) -> None:
    job = await client.submit("a picture nobody waits for", **{**SMALL, "num_inference_steps": 50})
    await job.cancel()
    print(f"a picture nobody waits for: {(await job.wait()).status}")


async def refused(client: AsyncClient) -> None:
    job = await client.submit("a red circle", width=33, height=64)
    try:
        (await job.wait()).raise_for_status()
    except JobRefused as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
