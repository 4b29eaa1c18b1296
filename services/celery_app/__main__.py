"""`python -m services.celery_app`: a Celery worker for the door and side jobs, and the sender.

`--sender-only` (the first argument) leaves the worker out: then webhooks and uploads are sent and
Celery's programs are told, but nobody takes new tasks. Any number of either may run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from celery import signals

from common.handed import say_ready
from common.logs import set_up
from common.metrics.http import serve
from common.settings import Settings, from_command_line
from services.celery_app.build import Built, build
from services.celery_app.revoking import take_over

log = logging.getLogger("slackwater.celery")

SENDER_ONLY = "--sender-only"
# Each task is a few round trips to Redis.
THREADS = 4


def main() -> int:
    words = sys.argv[1:]
    alone = words[:1] == [SENDER_ONLY]
    settings = from_command_line("python -m services.celery_app", words[1:] if alone else words)
    set_up(settings.log_level, settings.log_format)
    try:
        built = build(settings, sender_only=alone)
        port = serve(built.registry, settings) if settings.metrics_port else None
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return send(built) if alone else work(built, settings)
    finally:
        if port is not None:
            port.close()


def send(built: Built) -> int:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    built.sender.run(stopping)
    return 0


def work(built: Built, settings: Settings) -> int:
    """Until SIGTERM. Celery sets its own signal handlers."""
    stopping = threading.Event()
    sender = threading.Thread(target=built.sender.run, args=(stopping,), name="sender")

    def ready(**_: object) -> None:
        say_ready()
        log.info("takes tasks from the queue %s", settings.celery_queue)

    def leave_logging(**_: object) -> None:
        """Connected, it keeps Celery from setting up its own."""

    signals.worker_ready.connect(ready, weak=False)
    signals.setup_logging.connect(leave_logging, weak=False)
    take_over(built.client)
    worker = built.app.Worker(
        hostname=f"slackwater-{os.getpid()}@{settings.host}",
        pool="threads",
        concurrency=THREADS,
        queues=[settings.celery_queue],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        redirect_stdouts=False,
        quiet=True,
    )
    sender.start()  # at once: webhooks need not wait for Celery's broker
    try:
        worker.start()
    finally:
        stopping.set()
        sender.join()
    return int(worker.exitcode or 0)


if __name__ == "__main__":
    raise SystemExit(main())
