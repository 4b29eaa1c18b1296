"""Videos as MP4, made when somebody wants one: the workers make animated pictures without loss."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections import OrderedDict
from typing import Any

from common.asks import Ask
from common.job import Result
from services.gateway.client import GatewayClient

log = logging.getLogger("slackwater.gateway")

MP4 = "video/mp4"
# The newest are kept: players fetch a video more than once.
KEPT_BYTES = 64 << 20


class Movies:
    """One is made at a time, on a thread: encoding takes a core for seconds."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client
        self._turn = asyncio.Lock()
        self._can = importlib.util.find_spec("av") is not None
        # By the file too: a job that was deleted may have a successor of the same id.
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    async def of(self, result: Result, n: int, animated: bytes) -> bytes | None:
        """The MP4 of a job's n-th file, `animated`; None for one that is no video, or where PyAV is
        not installed and Celery's `slackwater.mux` has not made it either."""
        key = self._client.keys.movie(result.id, n)
        of_file = (key, result.outputs[n].sha256)
        if of_file in self._kept:  # nobody waits while another one is made
            return self._keep(of_file, self._kept[of_file])
        async with self._turn:
            movie = self._kept.get(of_file)
            if movie is None:
                [movie] = await self._client.ask(Ask((("GET", key),)))
            if movie is None and self._can:
                try:
                    movie = await asyncio.to_thread(_made, animated, result.params)
                except ValueError as error:
                    log.info("job %s: no MP4: %s", result.id, error)
            return None if movie is None else self._keep(of_file, movie)

    def _keep(self, of_file: tuple[str, str], movie: bytes) -> bytes:
        self._kept[of_file] = movie
        self._kept.move_to_end(of_file)
        while sum(map(len, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return movie


def _made(animated: bytes, params: dict[str, Any]) -> bytes:
    from common.movie import asked, to_mp4  # video libraries, which few need

    content, _, _ = to_mp4(animated, **asked(params))
    return content
