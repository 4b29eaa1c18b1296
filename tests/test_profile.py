"""`slackwater profile`: measures real stages, writes a table that loads, and a pool uses it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.arena import Arena
from common.handles import HandleStore
from common.keys import Keys
from common.params import merge_manifests
from common.settings import Settings
from common.stage import DECODE, DENOISE, ENCODE, STAGES
from services.cli.main import main
from services.cli.terminal import Exit
from services.coordinator.build import build
from services.costs.measure import plan_of
from services.costs.model import CostModel, Shape
from services.costs.table import parse_profile
from services.simulator.calibrations import calibration
from tests.tiny_models import shared_qwenimage

SIZES = "32x32,48x48,64x64"
NOOP = "encode_ms=1,step_ms=1,decode_ms=1,token_ms=0.05"


class Said(NamedTuple):
    code: int
    out: str
    err: str


Profile = Callable[..., Said]


@pytest.fixture
def profile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Profile:
    """Run the command on a machine where no pool is to be found, in an empty directory."""
    monkeypatch.delenv("SLACKWATER_REDIS_URL", raising=False)
    monkeypatch.setenv("SLACKWATER_STATE_DIR", str(tmp_path / "no-pool"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        code = main(["profile", *words])
        return Said(code, *capsys.readouterr())

    return run


def test_a_real_model_is_measured_and_a_pool_quotes_from_the_table(
    profile: Profile, redis_server: str, redis_client: Any, keys: Keys, tmp_path: Path
) -> None:
    model = shared_qwenimage()
    said = profile(
        "--model", str(model), "--model-name", "tiny", "--sizes", SIZES, "--repeats", "1",
        "--out", "tiny.json", "--redis", redis_server, "--prefix", keys.prefix, "--json",
    )  # fmt: skip
    assert said.code == Exit.OK, said.err
    answer = json.loads(said.out)
    assert answer["stored"] == redis_server

    table = parse_profile((tmp_path / "tiny.json").read_bytes())
    assert set(table.fits) == set(STAGES)
    assert table.fits[DENOISE].range == {"tokens": (4, 16), "n": (1, 8), "forwards": (1, 2)}
    assert table.fits[ENCODE].prompt_tokens > 0
    held_out = [row for row in table.rows if row["held_out"]]
    assert {(row["width"], row["height"]) for row in held_out} == {(32, 48), (48, 64)}
    assert set(table.held_out_error) == {DENOISE, DECODE}
    assert [curve["rows"] for curve in table.batch] == [[1, 2, 4, 8]] * 3
    assert table.steps["steps"] == [2, 4, 8, 16, 32]

    coordinator = build(Settings(redis_url=redis_server, prefix=keys.prefix), redis_client)
    assert coordinator.lead()
    costs, asked = coordinator.core.costs, Shape(12, 2, 2)
    quote = costs.quote("tiny", DENOISE, asked)
    assert quote.known
    assert quote.seconds == pytest.approx(table.fits[DENOISE].seconds(asked), rel=1e-4)
    assert not costs.quote("tiny", DENOISE, Shape(4096)).known


def test_a_pool_that_is_up_takes_a_table_that_comes_later(
    profile: Profile, redis_server: str, redis_client: Any, keys: Keys
) -> None:
    """And one that nobody can read is left out."""
    now = [1000.0]
    coordinator = build(Settings(redis_url=redis_server, prefix=keys.prefix), redis_client)
    coordinator.clock = lambda: now[0]
    assert coordinator.lead()
    redis_client.hset(keys.profile, "broken", "{}")
    said = profile(
        "--noop", NOOP, "--sizes", "16x16,32x32", "--repeats", "1",
        "--redis", redis_server, "--prefix", keys.prefix,
    )  # fmt: skip
    assert said.code == Exit.OK, said.err
    assert not coordinator.core.costs.quote("noop", DENOISE, Shape(2)).known
    now[0] += 60
    coordinator.leadership.take(now[0])
    coordinator.step(1)
    assert coordinator.core.costs.quote("noop", DENOISE, Shape(2)).known


def test_what_is_printed_has_every_row_with_its_error(profile: Profile, tmp_path: Path) -> None:
    said = profile("--noop", NOOP, "--sizes", "16x16,32x32,64x64", "--repeats", "1")
    assert said.code == Exit.OK, said.err
    table = parse_profile((tmp_path / "profile-noop.json").read_bytes())
    rows = [line for line in said.out.splitlines() if line.split()[:1] and " ms " in line]
    printed = [line for line in rows if line.split()[0] in STAGES and line.endswith(("%", "out"))]
    assert len(printed) == len(table.rows)
    assert "R²" in said.out
    assert "step time against steps" in said.out
    assert "written to profile-noop.json" in said.out


def test_a_profile_is_the_truth_of_a_simulation(profile: Profile) -> None:
    assert profile("--noop", NOOP, "--sizes", "16x16,32x32", "--repeats", "1").code == Exit.OK
    costs = calibration("profile-noop.json")
    fit = costs.fits[DENOISE]
    assert costs.seconds(DENOISE, 3, n=2, forwards=2) == fit.seconds(Shape(3, 2, 2))
    assert main(["simulate", "poisson", "--count", "20", "--costs", "profile-noop.json"]) == 0


def test_a_model_brings_its_table_in_its_manifest(tmp_path: Path, arena: Arena) -> None:
    """Shipped as profile.json beside the weights; it does not make another model of it."""
    from common.models.stages import build_stage

    model = tmp_path / "tiny"
    shutil.copytree(shared_qwenimage(), model)
    store = HandleStore("test", arena=arena)
    before = build_stage(DECODE, model, store).manifest()["fingerprint"]
    fit = {"fixed_s": 0.5, "range": {"tokens": [4, 64]}}
    content = {"version": 1, "device": "cpu", "stages": dict.fromkeys(STAGES, fit)}
    (model / "profile.json").write_text(json.dumps(content))

    manifests = {f"tiny/{kind}": build_stage(kind, model, store).manifest() for kind in STAGES}
    assert manifests["tiny/decode"]["fingerprint"] == before
    costs = CostModel()
    costs.set_prior("tiny", merge_manifests(manifests)["tiny"]["costs"])
    for stage in STAGES:
        assert costs.estimate("tiny", stage, Shape(16)) == 0.5

    content["device"] = "cuda"  # another kind of device costs something else
    (model / "profile.json").write_text(json.dumps(content))
    assert build_stage(DECODE, model, store).manifest()["costs"] == {}


def test_the_bundled_model_ships_a_table_that_holds() -> None:
    """On shapes it was not fitted on; the file that is in the repository."""
    model = Path(__file__).parent.parent / "models" / "tiny-qwen-image"
    table = parse_profile((model / "profile.json").read_bytes())
    assert table.model == "tiny-qwen-image"
    assert table.steps["r2"] >= 0.99
    for stage in (DENOISE, DECODE):
        assert table.held_out_error[stage] <= 0.10
        for row in table.rows:
            if row["stage"] == stage:
                shape = Shape(row["tokens"], row["n"], row["forwards"])
                fitted = table.fits[stage].seconds(shape)
                assert fitted == pytest.approx(row["fitted_s"], rel=1e-3)


def test_sizes_are_a_ladder_up_to_what_the_model_takes() -> None:
    side = {"min": 32, "max": 256, "multiple_of": 16}
    manifest = {"parameters": {"width": side, "height": side}, "limits": {"max_pixels": 65536}}
    plan = plan_of(manifest)
    assert plan.sizes[0] == (32, 32)
    assert plan.sizes[-1] == (256, 256)
    assert all(w % 16 == 0 and h % 16 == 0 for w, h in (*plan.sizes, *plan.held_out))
    assert not set(plan.sizes) & set(plan.held_out)
    assert all(w != h for w, h in plan.held_out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "64"], "--sizes: '64' is not WIDTHxHEIGHT"),
        (["--noop", NOOP, "--sizes", "33x32"], "--sizes: width: 33 is not a multiple of 16"),
        (["--noop", "step=5"], "--noop: "),
        (["--repeats", "0"], "--repeats: 0; at least 1"),
        (["--threads", "0"], "--threads: "),
        (["--out", "nowhere/table.json"], "--out: there is no directory nowhere"),
        (["--model", "./nothing"], "--model: ./nothing: no such directory"),
        (["--redis", "http://x"], "--redis: "),
    ],
)
def test_a_flag_that_is_wrong_is_named(profile: Profile, words: list[str], said: str) -> None:
    answer = profile(*words)
    assert answer.code == Exit.USAGE
    assert said in answer.err


def test_a_redis_that_is_away_is_noticed_before_anything_is_measured(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.terminal.PATIENCE_S", 0.1)
    said = profile("--noop", NOOP, "--redis", "redis://127.0.0.1:1/0")
    assert said.code == Exit.NO_REDIS
    assert "round" not in said.err
