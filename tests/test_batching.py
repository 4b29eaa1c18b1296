"""The batch key and a job's rows, from parameters and manifest alone."""

from __future__ import annotations

from typing import Any

import pytest

from common.batching import batch_key, forward_rows

MANIFEST: dict[str, Any] = {
    "model": "tiny",
    "batch": {"same": ["width", "height"]},
    "cfg": {"scale": "true_cfg_scale", "needs": "negative_prompt", "above": 1.0},
}
PARAMS: dict[str, Any] = {
    "prompt": "a red circle",
    "negative_prompt": None,
    "width": 64,
    "height": 96,
    "num_inference_steps": 20,
    "true_cfg_scale": 4.0,
    "n": 1,
}


def test_the_key_holds_what_must_agree_and_nothing_else() -> None:
    """Steps, guidance, prompt and pictures may differ; size and model may not."""
    key = batch_key(PARAMS, MANIFEST, exact=False)
    assert key == "tiny width=64 height=96"
    like = {"num_inference_steps": 5, "true_cfg_scale": 9.0, "negative_prompt": "y", "n": 3}
    assert batch_key({**PARAMS, **like}, MANIFEST, exact=False) == key
    assert batch_key({**PARAMS, "width": 96}, MANIFEST, exact=False) != key
    assert batch_key(PARAMS, {**MANIFEST, "model": "other"}, exact=False) != key


@pytest.mark.parametrize(
    ("params", "manifest", "exact"),
    [
        ({}, {}, True),
        ({"cache": "first_block"}, {}, False),
        ({}, {"batch": None}, False),
    ],
)
def test_jobs_that_run_alone_have_no_key(
    params: dict[str, Any], manifest: dict[str, Any], exact: bool
) -> None:
    assert batch_key({**PARAMS, **params}, {**MANIFEST, **manifest}, exact) == ""


@pytest.mark.parametrize(
    ("params", "rows"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"negative_prompt": ""}, 2),
        ({"negative_prompt": "", "n": 3}, 6),
        ({"negative_prompt": "", "true_cfg_scale": 1.0}, 1),
        ({"negative_prompt": "", "true_cfg_scale": None}, 1),
    ],
)
def test_rows_are_pictures_times_branches(params: dict[str, Any], rows: int) -> None:
    assert forward_rows({**PARAMS, **params}, MANIFEST) == rows


def test_a_model_without_guidance_has_one_row_a_picture() -> None:
    assert forward_rows({**PARAMS, "negative_prompt": "y"}, {**MANIFEST, "cfg": None}) == 1
