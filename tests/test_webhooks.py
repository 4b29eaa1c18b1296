"""Webhooks and uploads of a real pool on no-op stages, to a real receiver and real folders."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from common.client import Client
from common.connect import writing
from common.errors import JobRefused
from common.outgoing import NotAllowed
from common.settings import Settings
from common.stage import ENCODE
from common.uploads import Prefixes
from services.celery_app.attempts import GiveUp
from services.celery_app.copies import _inside
from services.celery_app.webhooks import SecretError, Webhooks, secrets_of
from services.pool.local import LocalPool
from tests.processes import until
from tests.receiver import Call, Receiver, receiving
from tests.scrapes import addresses, scrape
from tests.servers import free_port, serving

OLD, NEW = ("whsec_" + base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Side:
    pool: LocalPool
    client: Client
    redis: Any
    receiver: Receiver
    folder: Path

    def push(self, job: str, **params: Any) -> Any:
        return self.client.submit("x", id=job, **params)

    def owed(self) -> int:
        keys = self.pool.keys
        return int(self.redis.zcard(keys.deliveries) + self.redis.xlen(keys.outbox))

    def until_nothing_is_owed(self) -> None:
        until(lambda: self.owed() == 0, "all deliveries", PATIENCE_S)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    folder = tmp_path_factory.mktemp("out")
    with receiving() as receiver, serving() as server:
        settings = Settings(
            noop="step_ms=2", outgoing_hosts=receiver.url, webhook_secret=f"{NEW} {OLD}",
            webhook_retry_s=0.05, upload_prefixes=f"file://{folder}", refresh_ms=100,
            http_base_url="https://pool.example", metrics_port=free_port(),
        )  # fmt: skip
        with (
            LocalPool(settings=settings, redis_url=server.url, celery=True) as pool,
            pool.client() as client,
        ):
            redis = writing(pool.redis_url)
            yield Side(pool, client, redis, receiver, folder)
            redis.close()


@pytest.fixture
def side(whole: Side) -> Side:
    """The module's pool with a receiver that has heard nothing and says yes to everything."""
    whole.until_nothing_is_owed()
    whole.receiver.calls.clear()
    whole.receiver.answer = lambda _: 204
    return whole


def verified(call: Call, secret: str = NEW) -> dict[str, Any]:
    said: dict[str, Any] = Webhook(secret).verify(call.body, call.headers)
    return said


# -- what arrives --------------------------------------------------------------------------


def test_an_end_arrives_signed_after_two_failures(side: Side) -> None:
    """A receiver that fails twice is told a third time: the same id and body, verified by the
    library that receivers use."""
    side.receiver.answer = lambda n: 503 if n < 2 else 204
    side.push("twice", callback_url=f"{side.receiver.url}/hook?for=me", seed=3)
    calls = side.receiver.until(3)
    side.until_nothing_is_owed()
    assert len(calls) == 3
    said = [verified(call) for call in calls]
    assert {call.path for call in calls} == {"/hook?for=me"}
    assert len({call.headers["webhook-id"] for call in calls}) == 1
    assert said[0] == said[1] == said[2]
    assert said[0]["type"] == "job.succeeded"
    assert said[0]["timestamp"].endswith("+00:00")
    job = said[0]["data"]
    assert (job["id"], job["status"], job["seed"], job["is_terminal"]) == (
        "twice",
        "succeeded",
        3,
        True,
    )
    assert job["outputs"][0]["url"] == "https://pool.example/v1/jobs/twice/output/0"


def test_tries_are_counted_for_prometheus(side: Side) -> None:
    """Each by what came of it, and nothing is owed at the end."""
    at = addresses(side.pool, 5)["celery"]
    before = scrape(at)
    side.receiver.answer = lambda n: 503 if n == 0 else 204 if n == 1 else 410
    side.push("counted", callback_url=side.receiver.url)
    side.receiver.until(2)
    side.until_nothing_is_owed()
    side.push("refused", callback_url=side.receiver.url)
    side.receiver.until(3)
    side.until_nothing_is_owed()
    after = scrape(at)

    def grown(name: str, **labels: str) -> float:
        return after.of(name, **labels) - before.of(name, **labels)

    tries = "slackwater_deliveries_total"
    assert grown(tries, kind="webhook", outcome="again") == 1
    assert grown(tries, kind="webhook", outcome="done") == 1
    assert grown(tries, kind="webhook", outcome="given_up") == 1
    assert grown("slackwater_delivery_seconds_count", kind="webhook") == 1
    assert after.of("slackwater_deliveries_owed") == 0
    assert after.of("slackwater_sender") == 1


def test_a_secret_can_be_changed_without_a_gap(side: Side) -> None:
    """Each message is signed with the new one and the old one; any other is none."""
    side.push("changed", callback_url=side.receiver.url)
    [call] = side.receiver.until(1)
    assert verified(call, NEW) == verified(call, OLD)
    other = "whsec_" + base64.b64encode(bytes(32)).decode()
    with pytest.raises(WebhookVerificationError):
        verified(call, other)


def test_every_end_is_told(side: Side) -> None:
    """Also a cancel and an expiry, each with its type and the reason."""
    running = side.push("stopped", callback_url=side.receiver.url, num_inference_steps=1000)
    next(e for e in running.events(PATIENCE_S) if e.type == "step")
    running.cancel()
    [encoder] = side.pool.workers(ENCODE)
    os.kill(encoder, signal.SIGSTOP)  # nobody begins with the next one
    try:
        side.push("late", callback_url=side.receiver.url, queue_timeout_ms=1)
        calls = side.receiver.until(2)
    finally:
        os.kill(encoder, signal.SIGCONT)
    told = {said["data"]["id"]: said for said in map(verified, calls)}
    assert told["stopped"]["type"] == "job.canceled"
    assert told["late"]["type"] == "job.expired"
    assert told["late"]["data"]["error"]["code"] == "queue_timeout"


def test_a_redirect_is_a_failure_and_not_followed(side: Side) -> None:
    side.receiver.answer = lambda n: 307 if n == 0 else 204
    side.push("moved", callback_url=f"{side.receiver.url}/here")
    assert [call.path for call in side.receiver.until(2)] == ["/here", "/here"]
    side.until_nothing_is_owed()


def test_a_receiver_that_is_gone_is_left_alone(side: Side) -> None:
    """410 ends it at once, and what it should have heard can be looked at."""
    side.receiver.answer = lambda _: 410
    side.push("gone", callback_url=side.receiver.url)
    [call] = side.receiver.until(1)
    side.until_nothing_is_owed()
    kept = side.redis.hgetall(side.pool.keys.delivery(call.headers["webhook-id"]))
    assert (kept[b"given_up"], kept[b"job"]) == (b"1", b"gone")
    assert b"410" in kept[b"error"]
    assert side.redis.ttl(side.pool.keys.delivery(call.headers["webhook-id"])) > 0


def test_a_job_nobody_asked_about_leaves_the_outbox_alone(side: Side) -> None:
    """Most jobs: no entry at all, so nothing grows where no sender runs."""
    before = (
        side.redis.xinfo_stream(side.pool.keys.outbox)
        if side.redis.exists(side.pool.keys.outbox)
        else None
    )
    side.push("quiet").wait(PATIENCE_S)
    after = side.redis.xinfo_stream(side.pool.keys.outbox) if before else None
    assert (before or {}).get("last-generated-id") == (after or {}).get("last-generated-id")
    assert side.receiver.calls == []


# -- what is refused -----------------------------------------------------------------------


def test_a_url_that_is_not_listed_is_refused_at_the_push(side: Side) -> None:
    """The field, the host, and whose list it is; nothing is sent."""
    for url, said in {
        "http://127.0.0.1:1/": "outgoing_hosts",
        "ftp://example.com/": "https://",
        "http://169.254.169.254/": "outgoing_hosts",
    }.items():
        with pytest.raises(JobRefused, match=said) as refused:
            side.push(f"no-{len(url)}", callback_url=url).wait(PATIENCE_S).raise_for_status()
        assert refused.value.field == "callback_url"
    with pytest.raises(JobRefused, match="below none of") as refused:
        side.push("no-upload", upload_url="file:///etc/x").wait(PATIENCE_S).raise_for_status()
    assert refused.value.field == "upload_url"
    assert side.receiver.calls == []


def test_the_http_door_takes_a_callback(side: Side) -> None:
    """`callback_url` is a parameter of `/v1/jobs`; one that is not listed is a 400."""
    from tests.gateway_server import gateway

    with gateway(side.pool) as http:
        taken = http.post("/v1/jobs", json={"prompt": "x", "callback_url": side.receiver.url})
        assert taken.status_code in (200, 202)
        wrong = http.post("/v1/jobs", json={"prompt": "x", "callback_url": "https://a.example/"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "callback_url"
    assert verified(side.receiver.until(1)[0])["data"]["id"] == taken.json()["id"]


def test_a_secret_that_protects_nothing_is_refused() -> None:
    """Too short, not base64, in a file that is not there, or none where hosts are listed."""
    for secret, said in {
        "whsec_AAAA": "shorter", "whsec_***": "base64|shorter", "@/not/there": "webhook_secret",
        "": "outgoing_hosts",
    }.items():  # fmt: skip
        settings = Settings(webhook_secret=secret, outgoing_hosts="example.com")
        with pytest.raises(SecretError, match=said):
            secrets_of(settings)
    assert "whsec" not in repr(Settings(webhook_secret=NEW))


def test_a_secret_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{NEW}\n{OLD}\n")
    assert len(secrets_of(Settings(webhook_secret=f"@{file}"))) == 2
    Webhooks(Settings(webhook_secret=f"@{file}")).close()


# -- uploads -------------------------------------------------------------------------------


def test_files_are_copied_below_the_prefix_and_told(side: Side) -> None:
    """A job's files arrive whole under its own URL; a second message names them."""
    target = f"file://{side.folder}/deep/here"
    job = side.push("copied", upload_url=target, callback_url=side.receiver.url)
    job.wait(PATIENCE_S)
    told = {said["type"]: said for said in map(verified, side.receiver.until(2))}
    assert set(told) == {"job.succeeded", "job.uploaded"}
    files = told["job.uploaded"]["data"]["files"]
    assert files == [f"{target}/copied.json"]
    copied = side.folder / "deep" / "here"
    assert [path.name for path in copied.iterdir()] == ["copied.json"]
    assert json.loads((copied / "copied.json").read_bytes())["job"] == "copied"


def test_a_copy_that_fails_is_tried_again(side: Side) -> None:
    """A folder that cannot be made yet: nothing is lost, and it arrives once it can."""
    blocked = side.folder / "blocked"
    blocked.write_text("a file where a folder should be")
    side.push("patient", upload_url=f"file://{blocked}/x").wait(PATIENCE_S)
    owed = until(
        lambda: list(side.redis.zrange(side.pool.keys.deliveries, 0, -1)),
        "a failed copy", PATIENCE_S,
    )  # fmt: skip
    key = side.pool.keys.delivery(owed[0].decode())
    until(lambda: int(side.redis.hget(key, "attempts") or 0), "a counted failure", PATIENCE_S)
    blocked.unlink()
    side.until_nothing_is_owed()
    assert (blocked / "x" / "patient.json").exists()


def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir(), outside.mkdir()
    (root / "door").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    _inside(root / "a" / "b", root)
    for path in (root / "door" / "x", root / "file"):
        with pytest.raises(GiveUp, match="leads out"):
            _inside(path, root)


def test_an_upload_url_can_be_read_in_one_way_only() -> None:
    """Below the prefix as a folder, no way up, no chain of file systems, nothing escaped."""
    allowed = Prefixes.parse("s3://bucket/out, file:///srv/out/")
    for url in ("s3://bucket/out", "s3://bucket/out/7/", "file:///srv/out/a-b_c.d"):
        assert allowed.check(url).endswith("/out/")
    for url in (
        "s3://bucket/outside", "s3://bucket/out/../x", "s3://other/out", "file:///srv/out//x",
        "simplecache::s3://bucket/out/x", "s3://bucket/out/%2e%2e/x", "s3://bucket/out?x=1",
        "/srv/out/x", "file:///srv/out/./x", "S3://bucket/out", "s3://bucket/out/\n", "",
    ):  # fmt: skip
        with pytest.raises(NotAllowed):
            allowed.check(url)
    for wrong in ("/srv/out", "https://example.com/put", "s3://bucket/../x"):
        with pytest.raises(ValueError, match="upload_prefixes"):
            Prefixes.parse(wrong)
    with pytest.raises(NotAllowed, match="uploads nowhere"):
        Prefixes.parse("").check("s3://bucket/out")


def test_nothing_is_left_for_ever(side: Side) -> None:
    """After all of it: only the permanent keys, Celery's tables and the owed that was given up."""
    permanent = {name.encode() for name in side.pool.keys.permanent()}
    names = [name for name in side.redis.scan_iter(count=1000) if side.redis.ttl(name) == -1]
    assert [n for n in names if n not in permanent and not n.startswith(b"_kombu.binding")] == []
