"""Which policy leads a live pool: seen, changed under load, and brought along by a package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.client import Client
from common.settings import Settings
from services.cli.terminal import Exit
from services.policies import POLICIES
from services.pool.local import LocalPool
from tests.commands import Run, commands

PLUGIN = Path(__file__).parent.parent / "examples" / "policy_plugin"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The example policy, installed where the coordinator finds it; a broken one beside it."""
    source, site = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--target", str(site), str(source)],
        check=True,
    )  # fmt: skip
    (site / "broken.py").write_text(
        "from by_priority import ByPriority\n"
        "class Broken(ByPriority):\n"
        "    name = 'broken'\n"
        "    def plan(self, view, now):\n"
        "        raise RuntimeError('no idea')\n"
    )
    info = next(site.glob("*.dist-info")) / "entry_points.txt"
    info.write_text(info.read_text() + "broken = broken:Broken\nunloadable = nowhere:Nothing\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        patch.syspath_prepend(str(site))
        yield str(site)


@pytest.fixture(scope="module")
def pool(plugin: str) -> Iterator[LocalPool]:
    with LocalPool(
        denoisers=2, settings=Settings(noop="encode_ms=1,step_ms=5,decode_ms=1")
    ) as running:
        yield running


@pytest.fixture
def sw(pool: LocalPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return commands(pool.redis_url, capsys, monkeypatch)


def live(sw: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sw("policies", "--json").out)
    return found


def test_the_list_names_ours_and_installed_ones(sw: Run) -> None:
    said = sw("policies")
    assert said.code == Exit.OK
    lines = said.out.splitlines()
    assert [line for line in lines if line.startswith("* slack ")]
    for name in (*POLICIES, "by_priority"):
        assert any(line[2:].split()[0] == name for line in lines if line.strip()), name


def test_a_live_pool_changes_its_policy_and_loses_nothing(sw: Run, pool: LocalPool) -> None:
    """Under load, several times, a third party's among them; every job ends as it should."""
    with Client(pool.redis_url) as client:
        jobs = [client.submit("x", num_inference_steps=20) for _ in range(30)]
        for name in ("edf", "by_priority", "fcfs", "slack"):
            said = sw("policies", "use", name)
            assert said.code == Exit.OK, said.err
            assert said.out.endswith(f"→ {name}\n")
            assert live(sw)["live"]["current"] == name
            jobs += [client.submit("x", num_inference_steps=20) for _ in range(5)]
        for job in jobs:
            assert job.wait(60).status == "succeeded"
        assert {job.status().attempts for job in jobs} == {0}


def test_the_examples_order_is_by_priority(sw: Run, pool: LocalPool) -> None:
    sw("policies", "use", "by_priority")
    with Client(pool.redis_url) as client:
        for name in ("low", "lower"):  # keep both ranks busy
            client.submit("x", id=f"busy-{name}", num_inference_steps=300, priority=100)
        low = [client.submit("x", num_inference_steps=100, priority=-1) for _ in range(3)]
        high = client.submit("x", num_inference_steps=100, priority=50)
        ends = [job.wait(60) and job.status().finished_s for job in (*low, high)]
    # Two ranks: one of the others may run beside it, and the rest come after it.
    assert sorted(ends).index(ends[-1]) <= 1  # type: ignore[type-var]


def test_a_policy_that_raises_harms_no_job_and_is_seen(sw: Run, pool: LocalPool) -> None:
    """fcfs decides instead, and `slackwater policies` says why."""
    assert sw("policies", "use", "broken").code == Exit.OK
    with Client(pool.redis_url) as client:
        job = client.submit("x", num_inference_steps=3)
        assert job.wait(30).status == "succeeded"
        job = client.submit("x", num_inference_steps=200)
        assert job.wait(30).status == "succeeded"
    said = sw("policies")
    assert "broken failed" in said.out
    assert "no idea" in said.out
    assert sw("policies", "use", "default").out.endswith("→ slack\n")


def test_what_does_not_exist_changes_nothing(sw: Run) -> None:
    for name, says in (("edff", "is not one of"), ("unloadable", "could not be loaded")):
        said = sw("policies", "use", name)
        assert said.code == Exit.USAGE
        assert says in said.err
    assert live(sw)["live"]["current"] == "slack"


def test_words_that_are_neither(sw: Run) -> None:
    said = sw("policies", "edf")
    assert said.code == Exit.USAGE
    assert "use NAME" in said.err
