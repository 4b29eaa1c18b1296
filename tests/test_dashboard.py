"""The dashboard: its stream of events, and the page in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from common.record import JobRecord
from common.settings import Settings
from services.gateway.dashboard.board import HISTORY_S, Board
from services.gateway.dashboard.feed import MOST_BEHIND, Feed, Viewer
from services.gateway.dashboard.sight import Sight, ended_json, memory_json
from services.gateway.links import Links
from services.pool.local import LocalPool
from services.timeline.runs import Bar, Row
from tests.browser import Watched, chromium
from tests.gateway_server import NOOP, Http, end_of, error_of, events, gateway, push, until_step
from tests.processes import until

KEY = "a-key-of-the-dashboard-tests"
HOSTILE = '<img src=x onerror="window.pwned=1;alert(1)"><script>alert(2)</script>\' " & ${1}'
LONG: dict[str, Any] = {"width": 256, "height": 256, "num_inference_steps": 200}

# -- what viewers are told -----------------------------------------------------------------


def a_sight(now: float, **news: Any) -> Sight:
    blank: dict[str, Any] = {
        "active": 1, "leads": True, "policy": "slack", "bars": [], "last": "1-0", "workers": [],
        "jobs": {}, "ended": [], "running": {}, "previews": {}, "memory": {},
    }  # fmt: skip
    return Sight(now=now, **(blank | news))


def a_bar(rank: str, end_s: float, job: str = "a") -> Bar:
    return Bar(rank, "denoise", end_s - 1, end_s, (Row(job, 0, 2, 2, 1.5),))


def test_a_change_has_only_what_is_new() -> None:
    board = Board()
    board.fold(a_sight(1.0, jobs={"a": {"step": 1, "prompt": "x"}, "b": {"step": 0}}))
    change = board.fold(a_sight(2.0, jobs={"a": {"step": 2, "prompt": "x"}}))
    assert change == {"now": 2.0, "jobs": {"a": {"step": 2}, "b": None}}
    assert board.snapshot()["jobs"] == {"a": {"step": 2, "prompt": "x"}}


def test_the_chart_forgets_what_is_long_past() -> None:
    board = Board()
    board.fold(a_sight(10.0, bars=[a_bar("d", 9.0)]))
    change = board.fold(a_sight(20.0, bars=[a_bar("d", 19.0, "b")]))
    assert [bar[5][0][0] for bar in change["bars"]] == ["b"]
    assert len(board.snapshot()["bars"]) == 2
    board.fold(a_sight(15.0 + HISTORY_S))
    assert [bar[5][0][0] for bar in board.snapshot()["bars"]] == ["b"]


def test_a_rank_keeps_its_number_while_others_come_and_go() -> None:
    board = Board()

    def worker(name: str) -> dict[str, Any]:
        return {"name": name, "stage": "denoise"}

    def numbers() -> dict[str, int]:
        return {rank["name"]: rank["number"] for rank in board.snapshot()["ranks"]}

    board.fold(a_sight(1.0, workers=[worker("w-1"), worker("w-2")], bars=[a_bar("w-2", 0.5)]))
    assert numbers() == {"w-1": 1, "w-2": 2}
    board.fold(a_sight(2.0, workers=[worker("w-3")]))
    assert numbers() == {"w-2": 2, "w-3": 1}, "one that is gone stays while its bars are shown"
    gone = {rank["name"]: rank["gone"] for rank in board.snapshot()["ranks"]}
    assert gone == {"w-2": True, "w-3": False}


def test_a_job_ends_once_however_often_it_is_seen() -> None:
    board = Board()
    record = JobRecord("a", "succeeded", True, stage="decode", finished_s=1.0)
    ended = [ended_json(record, None, Links("", None, 1.0))]
    assert len(board.fold(a_sight(1.0, ended=ended))["ended"]) == 1
    assert "ended" not in board.fold(a_sight(2.0, ended=ended))
    assert "a" in board.seen


def test_one_arena_a_host_is_counted_once() -> None:
    counts = b'{"arena_used_bytes": 5, "arena_bytes": 100, "spilled": 2}'
    worker = {b"host": b"h", b"stage": b"encode", b"counts": counts}
    found = memory_json({"one": worker, "two": worker}, [])
    assert found["arenas"] == {"h": {"used": 5, "size": 100}}
    assert found["so_far"]["spilled"] == 4


def test_a_viewer_that_falls_behind_gets_a_snapshot_and_holds_no_memory() -> None:
    viewer = Viewer()
    for n in range(3 * MOST_BEHIND):
        viewer.tell(b"%d" % n)
    assert viewer.behind
    assert viewer.news.qsize() == MOST_BEHIND
    viewer.catch_up()
    assert (viewer.behind, viewer.news.qsize()) == (False, 0)


class Pond:
    """A client whose every plan comes to the next of some sights."""

    keys = None

    def __init__(self) -> None:
        self.looks = 0

    async def do(self, plan: Any) -> Sight:
        plan.close()
        self.looks += 1
        return a_sight(float(self.looks), jobs={"a": {"step": self.looks}})


def test_all_viewers_share_one_reader_and_it_rests_when_nobody_watches() -> None:
    async def watch() -> None:
        pond: Any = Pond()
        feed = Feed(pond, Links("", None, 1.0))
        crowd: list[AsyncIterator[bytes]] = [feed.watch() for _ in range(20)]
        first = [await anext(viewer) for viewer in crowd]
        assert all(frame.startswith(b"event: snapshot\n") for frame in first)
        changes = [await anext(viewer) for viewer in crowd]
        assert len(set(changes)) == 1, "they are told the same, made once"
        assert changes[0].startswith(b"event: change\n")
        assert pond.looks <= 3
        for viewer in crowd:
            await viewer.aclose()  # type: ignore[attr-defined]
        assert feed.viewers == 0
        assert feed._reader is not None
        await asyncio.wait_for(feed._reader, 10)
        again = feed.watch()
        assert (await anext(again)).startswith(b"event: snapshot\n")
        closing = asyncio.ensure_future(_rest(again))
        await asyncio.sleep(0)  # it waits for news by the time the feed closes
        await feed.close()
        await asyncio.wait_for(closing, 10)

    asyncio.run(watch())


async def _rest(frames: AsyncIterator[bytes]) -> None:
    async for _ in frames:
        pass


# -- over HTTP, with no-op stages ----------------------------------------------------------


@pytest.fixture(scope="module")
def noop_pool() -> Iterator[LocalPool]:
    with LocalPool(denoisers=2, settings=Settings(noop=NOOP)) as running:
        yield running


@contextlib.contextmanager
def following(http: Http, **headers: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The dashboard's events as they come."""
    with http.stream("GET", "/dashboard/events", headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        yield ((event["event"], json.loads(event["data"])) for event in events(stream.iter_lines()))


def test_the_stream_begins_with_how_it_stands_and_follows_a_job_to_its_end(
    noop_pool: LocalPool,
) -> None:
    with gateway(noop_pool) as http:
        before = push(http, "before", num_inference_steps=3)
        end_of(http, before)
        with following(http) as told:
            kind, snapshot = next(told)
            assert kind == "snapshot"
            assert [job["prompt"] for job in snapshot["ended"]] == ["before"]
            assert snapshot["pool"] == {"active": 0, "leads": True, "policy": "slack"}
            stages = sorted(rank["stage"] for rank in snapshot["ranks"])
            assert stages == ["decode", "denoise", "denoise", "encode"]
            assert any(bar[5][0][0] == before for bar in snapshot["bars"])
            assert snapshot["memory"]["arenas"], "workers count their host's arena"

            job = push(http, HOSTILE, num_inference_steps=300)
            steps: list[int] = []
            seen: dict[str, Any] = {}
            for kind, change in told:
                assert kind == "change"
                news = change.get("jobs", {}).get(job)
                seen |= news or {}
                steps += [news["step"]] if news and "step" in news else []
                if any(one["id"] == job for one in change.get("ended", [])):
                    break
            assert seen["prompt"] == HOSTILE, "it is data here; the page makes it text"
            assert steps == sorted(steps)
            assert len(steps) > 1
            assert news is None, "and it is active no more"
            [ended] = [one for one in change["ended"] if one["id"] == job]
            assert (ended["status"], ended["on_time"]) == ("succeeded", True)


def test_a_canceled_job_leaves_the_stream_and_counts_for_no_share(noop_pool: LocalPool) -> None:
    with gateway(noop_pool) as http:
        job = push(http, num_inference_steps=1000)
        until_step(http, job)
        with following(http) as told:
            _, snapshot = next(told)
            assert job in snapshot["jobs"]
            http.delete(f"/v1/jobs/{job}")
            for _, change in told:
                ended = [one for one in change.get("ended", []) if one["id"] == job]
                if ended:
                    break
        assert (ended[0]["status"], ended[0]["on_time"]) == ("canceled", None)


def test_the_stream_outlives_a_lost_connection_to_redis(noop_pool: LocalPool) -> None:
    with gateway(noop_pool) as http, following(http) as told:
        assert next(told)[0] == "snapshot"
        database = redis.Redis.from_url(noop_pool.redis_url)
        database.client_kill_filter(_type="normal", skipme=True)
        job = push(http, num_inference_steps=3)
        for _, change in told:
            if any(one["id"] == job for one in change.get("ended", [])):
                break


def test_with_keys_nothing_is_told_without_one(noop_pool: LocalPool) -> None:
    with gateway(noop_pool, http_keys=f"me {KEY}") as http:
        assert error_of(http.get("/dashboard/events"), 401)["code"] == "invalid_api_key"
        with following(http, Authorization=f"Bearer {KEY}") as told:
            assert next(told)[0] == "snapshot"
        page = http.get("/")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        for name in ("main.js", "style.css"):
            assert http.get(f"/dashboard/{name}").status_code == 200
        error_of(http.get("/dashboard/../routes.py"), 404)
        error_of(http.get("/dashboard/routes.py"), 404)


def test_the_page_loads_nothing_from_elsewhere(noop_pool: LocalPool) -> None:
    with gateway(noop_pool) as http:
        policy = http.get("/").headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        for name in ("", "dashboard/main.js", "dashboard/style.css"):
            text = http.get(f"/{name}").text
            assert "http://" not in text
            assert "https://" not in text


# -- in a browser, with the bundled model ----------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(settings=Settings()) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Any]:
    """One a test: it starts processes of its own whenever it likes, and all of them end with it."""
    with chromium() as running:
        yield running


@contextlib.contextmanager
def opened(browser: Any, http: Http, **options: Any) -> Iterator[Watched]:
    watched = Watched(browser, str(http.base_url), **options)
    try:
        watched.page.goto(f"{http.base_url}/")
        yield watched
    finally:
        watched.close()


def row_of(page: Any, job: str) -> Any:
    return page.locator(f'#jobs tr[data-job="{job}"]')


def test_a_pool_at_work_is_watched_and_used(browser: Any, pool: LocalPool) -> None:
    """Under load: the chart moves, a picture grows, one is submitted and arrives, one canceled."""
    with gateway(pool) as http, opened(browser, http) as watched:
        page = watched.page
        page.locator("#standing", has_text="live").wait_for()
        long = push(http, "a large green ring on a pink background", **LONG)
        row_of(page, long).wait_for()
        page.locator(f'#pictures figure[data-job="{long}"] .growing img').wait_for()
        chart = "document.getElementById('gantt').toDataURL()"
        before = page.evaluate(chart)
        page.wait_for_function(f"before => {chart} !== before", arg=before)
        page.wait_for_function(PAINTED)

        prompt = "a small white square on a blue background"
        page.fill("#submit textarea", prompt)
        page.fill("#submit input[name=width]", "64")
        page.fill("#submit input[name=height]", "64")
        page.fill("#submit input[name=num_inference_steps]", "4")
        page.fill("#submit input[name=due_s]", "60")
        page.click("#submit button[type=submit]")
        page.locator("#submit-said", has_text="taken as").wait_for()
        page.wait_for_function(SHOWN, arg=prompt)
        page.locator("#shares", has_text="64×64").wait_for()

        row_of(page, long).get_by_role("button").click()
        row_of(page, long).wait_for(state="detached")
        assert end_of(http, long)["status"] == "canceled"
        assert watched.complaints == []
        assert watched.strangers == []


# A finished picture of 64 px, with this prompt, has been loaded.
SHOWN = "alt => document.querySelector(`#pictures a img[alt='${alt}']`)?.naturalWidth === 64"
# Some pixel of the chart has the color of a job: far from gray.
PAINTED = """() => {
  const canvas = document.getElementById("gantt"), pen = canvas.getContext("2d");
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < data.length; i += 4) {
    const color = [data[i], data[i + 1], data[i + 2]];
    if (data[i + 3] > 200 && Math.max(...color) - Math.min(...color) > 60) return true;
  }
  return false;
}"""


def test_what_the_pool_refuses_is_said_beside_the_form(browser: Any, pool: LocalPool) -> None:
    with gateway(pool) as http, opened(browser, http) as watched:
        page = watched.page
        page.fill("#submit textarea", "x")
        page.evaluate("document.getElementById('submit').noValidate = true")
        page.fill("#submit input[name=width]", "33")
        page.click("#submit button[type=submit]")
        page.locator("#submit-said.wrong", has_text="33 is not a multiple of 16").wait_for()


def test_a_hostile_prompt_is_text_wherever_it_is_shown(browser: Any, pool: LocalPool) -> None:
    """While it runs, as it grows, in the tooltip, and beside its picture."""
    with gateway(pool) as http, opened(browser, http) as watched:
        page = watched.page
        long = push(http, HOSTILE, **LONG)
        row = row_of(page, long)
        row.wait_for()
        assert row.locator("td").nth(1).inner_text() == HOSTILE
        page.locator(f'#pictures figure[data-job="{long}"] .growing img').wait_for()
        tip = page.locator("#tip b", has_text="<img src=x")

        def told() -> bool:
            """The bar is where the mouse is a moment after it was asked for, or is not yet."""
            page.locator("#gantt").hover(position=page.evaluate(NEWEST_BAR))
            return bool(tip.is_visible())

        until(told, "the tooltip")
        done = push(http, HOSTILE, width=64, height=64, num_inference_steps=2)
        caption = page.locator(f'#pictures figure[data-job="{done}"] .prompt')
        caption.wait_for()
        assert caption.inner_text() == HOSTILE
        assert page.evaluate("window.pwned") is None
        assert page.locator("img[src='x'], main script").count() == 0
        assert (watched.dialogs, watched.strangers, watched.complaints) == ([], [], [])
        http.delete(f"/v1/jobs/{long}", headers={"Prefer": "wait=20"})


# A point a little left of the line that is now, in the first lane.
NEWEST_BAR = """() => {
  const width = document.getElementById("gantt").clientWidth;
  return { x: 86 + (width - 86) * (60 / 75) - 3, y: 34 };
}"""


def test_light_and_dark_follow_the_system_and_a_switch(browser: Any, pool: LocalPool) -> None:
    """The switch is remembered."""

    def ground(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with gateway(pool) as http:
        with opened(browser, http, color_scheme="light") as light:
            bright = ground(light.page)
        with opened(browser, http, color_scheme="dark") as dark:
            page = dark.page
            assert ground(page) != bright
            page.click("#theme")
            assert ground(page) == bright
            page.reload()
            assert ground(page) == bright
            page.locator("#standing", has_text="live").wait_for()
            assert dark.complaints == []


def test_a_narrow_page_does_not_scroll_sideways(browser: Any, pool: LocalPool) -> None:
    with gateway(pool) as http:
        end_of(http, push(http, "x" * 300, width=64, height=64, num_inference_steps=2))
        narrow = {"width": 380, "height": 800}
        with opened(browser, http, viewport=narrow) as watched:
            page = watched.page
            page.locator("#pictures figure").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_with_keys_the_page_asks_for_one_and_then_shows_pictures(
    browser: Any, pool: LocalPool
) -> None:
    with gateway(pool, http_keys=f"me {KEY}") as http, opened(browser, http) as watched:
        page = watched.page
        page.locator("#key").wait_for()
        assert page.locator("main").is_hidden()
        page.fill("#key-text", "a-key-that-nobody-knows")
        page.click("#key button")
        page.locator("#key .wrong", has_text="not known").wait_for()
        page.fill("#key-text", KEY)
        page.click("#key button")
        page.locator("main").wait_for()
        page.fill("#submit textarea", "a black star")
        page.fill("#submit input[name=width]", "64")
        page.fill("#submit input[name=height]", "64")
        page.fill("#submit input[name=num_inference_steps]", "2")
        page.click("#submit button[type=submit]")
        page.wait_for_function(SHOWN, arg="a black star")
        assert watched.strangers == []
        page.click("#forget-key")
        page.locator("#key").wait_for()
        assert page.locator("#pictures figure").count() == 0
