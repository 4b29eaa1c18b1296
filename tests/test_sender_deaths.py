"""kill −9 of the Celery side while it owes a webhook and a Celery task's end."""

from __future__ import annotations

import base64
import os

from celery import Celery
from standardwebhooks import Webhook

from common.connect import writing
from common.settings import Settings
from services.pool.local import LocalPool
from tests.processes import until
from tests.receiver import receiving
from tests.servers import serving

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
PATIENCE_S = 60.0


def test_what_is_owed_outlives_its_sender() -> None:
    """The webhook had failed once and the task's job ran: the next process delivers both, the
    webhook under the same id."""
    with receiving(lambda _: 500) as receiver, serving() as server:
        settings = Settings(
            noop="step_ms=10", outgoing_hosts=receiver.url, webhook_secret=SECRET,
            webhook_retry_s=0.5,
        )  # fmt: skip
        with (
            LocalPool(settings=settings, redis_url=server.url, celery=True) as pool,
            pool.client() as client,
        ):
            app = Celery("owner", broker=pool.redis_url, backend=pool.redis_url)
            client.submit("x", id="a", callback_url=receiver.url)
            receiver.until(1)
            task = app.send_task(
                "slackwater.generate", ["x"], {"num_inference_steps": 500}, queue="slackwater"
            )
            until(lambda: task.state == "PROGRESS", "its job to run", PATIENCE_S)
            [sender] = [process for process in pool.processes() if process.role == "celery"]
            os.kill(sender.pid, 9)
            receiver.answer = lambda _: 204
            calls = receiver.until(len(receiver.calls) + 1)
            assert len({call.headers["webhook-id"] for call in calls}) == 1
            assert Webhook(SECRET).verify(calls[-1].body, calls[-1].headers)["data"]["id"] == "a"
            assert task.get(timeout=PATIENCE_S)["status"] == "succeeded"
            redis, keys = writing(pool.redis_url), pool.keys
            for name, size in ((keys.deliveries, redis.zcard), (keys.celery, redis.hlen)):
                until(lambda size=size, name=name: not size(name), f"an empty {name}", PATIENCE_S)
            redis.close()
            app.close()
