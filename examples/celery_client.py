"""A Celery program that has a pool make a picture: live states, the result, a cancel.

    slackwater up --celery
    python examples/celery_client.py [redis-url]

It needs Celery and a Redis URL, nothing of Slackwater. Its own tasks and workers, if it has any,
may live on the same Redis.
"""

from __future__ import annotations

import sys
import time

from celery import Celery
from celery.exceptions import TaskRevokedError


def main(url: str = "redis://127.0.0.1:6379/0") -> None:
    app = Celery("example", broker=url, backend=url)
    app.conf.task_routes = {"slackwater.*": {"queue": "slackwater"}}

    task = app.send_task(
        "slackwater.generate",
        kwargs={"prompt": "a large red circle on a blue background", "num_inference_steps": 40},
    )
    seen = ""
    while not task.ready():
        state, info = task.state, task.info
        if state != seen:
            seen = state
            print(f"{state}: {info}")
        time.sleep(0.05)
    result = task.get(timeout=60)
    print(f"{task.state}: {result['outputs'][0]['key']}, seed {result['seed']}")
    picture = app.backend.client.get(result["outputs"][0]["key"])
    print(f"{len(picture)} bytes of {result['outputs'][0]['mime']}")

    wrong = app.send_task("slackwater.generate", kwargs={"prompt": "a red circle", "width": 33})
    try:
        wrong.get(timeout=60)
    except ValueError as error:
        print(f"FAILURE: {error}")

    long = app.send_task(
        "slackwater.generate",
        kwargs={"prompt": "a red circle", "num_inference_steps": 200},
    )
    while long.state != "PROGRESS":
        time.sleep(0.02)
    long.revoke()
    try:
        long.get(timeout=60)
    except TaskRevokedError as error:
        print(f"REVOKED: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
