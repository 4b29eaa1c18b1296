"""The timeline stream: an entry for each task that ran, written by the script that ended it.

Field names and their meaning are in docs/timeline.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.asks import BLOCK_S, Ask
from common.stage import DENOISE
from services.timeline.runs import Bar, Row

if TYPE_CHECKING:
    from common.client import Client

PAGE = 1000


def bar_of(fields: Mapping[str, str]) -> Bar:
    """One entry. Raises KeyError or ValueError for one that is none of ours."""
    plan = fields["plan"].split()
    jobs, reached, ends = (fields[name].split() for name in ("jobs", "reached", "ends"))
    rows = []
    for r, (job, stop, end) in enumerate(zip(jobs, reached, ends, strict=True)):
        start, planned, slack = plan[3 * r : 3 * r + 3]
        step = int(stop) if fields["stage"] == DENOISE else 0
        slack_s = None if slack == "-" else float(slack)
        rows.append(Row(job, int(start), step, int(planned), slack_s, end))
    return Bar(
        rank=fields["worker"],
        stage=fields["stage"],
        start_s=int(fields["start"]) / 1000,
        end_s=int(fields["end"]) / 1000,
        rows=tuple(rows),
        seq=int(fields["seq"]),
        model=fields["model"],
        asked=fields["yield"] == "1",
    )


def redis_now(client: Client) -> float:
    """Seconds since the epoch by Redis' clock."""
    [(seconds, micros)] = client.ask(Ask((("TIME",),)))
    return int(seconds) + int(micros) / 1e6


def read(client: Client, since_s: float) -> tuple[list[Bar], str]:
    """Bars that ended after `since_s`, and the id of the last entry there is."""
    bars: list[Bar] = []
    last = "0-0"
    start = str(max(0, int(1000 * since_s)))
    while True:
        command = ("XRANGE", client.keys.timeline, start, "+", "COUNT", PAGE)
        [entries] = client.ask(Ask((command,)))
        bars += _bars(entries)
        if entries:
            last = entries[-1][0].decode()
        if len(entries) < PAGE:
            return bars, last
        start = f"({last}"


def follow(client: Client, last: str, wait_s: float = BLOCK_S) -> Iterator[list[Bar]]:
    """What comes after the entry `last`, as it comes; an empty list after `wait_s` of silence."""
    block = max(1, round(1000 * wait_s))
    while True:
        command = ("XREAD", "COUNT", PAGE, "BLOCK", block, "STREAMS", client.keys.timeline, last)
        [reply] = client.ask(Ask((command,), wait_s))
        entries = reply[0][1] if reply else []
        if entries:
            last = entries[-1][0].decode()
        yield _bars(entries)


def _bars(entries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Bar]:
    return [bar_of(_fields(flat)) for _, flat in entries]


def _fields(flat: Sequence[Any]) -> dict[str, str]:
    words = [word.decode() for word in flat]
    return dict(zip(words[::2], words[1::2], strict=True))
