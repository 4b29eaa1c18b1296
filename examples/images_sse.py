"""A job by HTTP and its server-sent events, with the standard library alone.

    slackwater up --http 8000
    python examples/images_sse.py http://127.0.0.1:8000 star.png

A stream that breaks can be taken up again behind the last event seen (Last-Event-ID).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

JOB = {
    "prompt": "a large blue star on a yellow background",
    "width": 128,
    "height": 128,
    "num_inference_steps": 12,
    "slo_ms": 30_000,
}


def main(url: str, file: str) -> None:
    push = Request(f"{url}/v1/jobs", json.dumps(JOB).encode(), {"Content-Type": "application/json"})
    with urlopen(push) as answer:
        job = json.load(answer)["id"]
    print(f"job {job}")
    for name, event in events(f"{url}/v1/jobs/{job}/events"):
        if name == "step":
            print(f"step {event['step']} of {event['steps']}")
        elif "job" in event:  # the last one
            ended = event["job"]
            print(f"{ended['status']}, on time: {ended['on_time']}")
            with urlopen(ended["outputs"][0]["url"]) as picture:
                Path(file).write_bytes(picture.read())
            print(file)


def events(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and data of each event, until the stream ends."""
    with urlopen(Request(url, headers={"Accept": "text/event-stream"})) as stream:
        name = ""
        for line in map(bytes.decode, stream):
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
