"""What leaves the stages: files, and the manifest that says what may be asked."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.models import guidance, images, manifest
from common.models.directory import open_directory
from common.models.errors import BadInput, NonFinite, RefusedModel
from common.models.model import Model
from tests.tiny_models import shared_qwenimage
from tests.tiny_pipeline import Stages

# -- pictures --------------------------------------------------------------------------------


def test_uint8_on_the_device_equals_diffusers_on_the_host() -> None:
    """The same rounding as VaeImageProcessor, halves included."""
    from diffusers.image_processor import VaeImageProcessor

    floats = torch.cat([torch.arange(0, 511) / 510, torch.rand(1025)]).reshape(1, 3, 16, 32)
    theirs = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(floats))
    assert np.array_equal(images.to_uint8(floats)[0], np.array(theirs[0]))


def test_pixels_that_are_not_finite_are_no_picture() -> None:
    """A NaN would become an arbitrary byte."""
    with pytest.raises(NonFinite):
        images.to_uint8(torch.full((1, 3, 2, 2), float("nan")))


@pytest.mark.parametrize("kind", ["png", "webp", "jpeg"])
def test_files_are_deterministic_and_without_metadata(kind: str) -> None:
    """Encoded twice, the same bytes; no text, EXIF or time inside."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    one, two = (images.encode(pixels, kind, 80) for _ in range(2))
    assert one.content == two.content
    assert (one.width, one.height, one.mime) == (48, 32, f"image/{kind}")
    picture = Image.open(io.BytesIO(one.content))
    assert picture.format == kind.upper()
    assert not picture.getexif()
    assert not {"exif", "icc_profile", "Software", "comment", "xmp"} & set(picture.info)
    if kind == "png":
        assert np.array_equal(np.array(picture), pixels)


def test_compression_is_quality_and_0_is_0() -> None:
    """0 is the smallest file, not "the default"."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for kind in ("webp", "jpeg"):
        sizes = [len(images.encode(pixels, kind, q).content) for q in (0, 50, 100)]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[1] < sizes[2]


def test_an_unknown_format_names_those_there_are() -> None:
    """Checked again here, since not every client goes through the coordinator's schema."""
    with pytest.raises(BadInput, match="png, webp, jpeg"):
        images.encode(np.zeros((2, 2, 3), np.uint8), "bmp")


def test_formats_reach_the_file(tmp_path: Path) -> None:
    """output_format and output_compression are the job's own."""
    stages = Stages(shared_qwenimage(), tmp_path / "arena")
    job = stages.job(n=2, num_inference_steps=2, output_format="webp", output_compression=60)
    job.run("encode")
    job.denoise([2])
    outputs = job.run("decode").outputs
    assert [(o.mime, o.width, o.height) for o in outputs] == [("image/webp", 64, 64)] * 2
    assert outputs[0].content != outputs[1].content


# -- the manifest ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(shared_qwenimage(), "decode")


def test_the_manifest_is_json_and_the_same_in_every_stage(model: Model) -> None:
    """Parameters come from blocks and configurations, never from the weights at hand."""
    one = json.loads(json.dumps(manifest.build(model)))
    for stage in ("encode", "denoise"):
        other = manifest.build(Model(shared_qwenimage(), stage))
        assert json.dumps(other["parameters"]) == json.dumps(one["parameters"])
        for key in ("fingerprint", "token_px", "cfg", "scheduler", "limits", "family"):
            assert other[key] == one[key]
        assert other["stage"] == stage


def test_parameters_have_the_classic_pipelines_defaults(model: Model) -> None:
    """diffusers' modular blocks say 1024 prompt tokens; QwenImagePipeline says 512."""
    parameters = manifest.build(model)["parameters"]
    defaults = {name: schema.get("default") for name, schema in parameters.items()}
    assert defaults == {
        "prompt": None,
        "negative_prompt": None,
        "width": 1024,
        "height": 1024,
        "num_inference_steps": 50,
        "true_cfg_scale": 4.0,
        "guidance_scale": None,
        "sigmas": None,
        "max_sequence_length": 512,
        "cache": "none",
        "cache_threshold": None,
    }
    assert parameters["prompt"]["required"]
    assert parameters["width"]["multiple_of"] == 16
    assert parameters["max_sequence_length"]["max"] == 1024
    assert parameters["guidance_scale"]["alias_of"] == "true_cfg_scale"


def test_the_models_own_file_and_settings_override(tmp_path: Path) -> None:
    """slackwater.json over the defaults, settings over both."""
    path = Path(shutil.copytree(shared_qwenimage(), tmp_path / "model"))
    own = {
        "name": "tiny",
        "limits": {"max_side": 256, "max_steps": 50},
        "parameters": {"width": {"default": 128}, "num_inference_steps": {"default": 20}},
    }
    (path / "slackwater.json").write_text(json.dumps(own))
    made = manifest.build(Model(path, "decode"), {"max_steps": 30, "max_n": None})
    assert made["model"] == "tiny"
    assert made["parameters"]["width"]["default"] == 128
    assert made["parameters"]["width"]["max"] == 256
    assert made["parameters"]["num_inference_steps"] | {"description": ""} == {
        "type": "int", "default": 20, "min": 2, "max": 30, "description": "",
    }  # fmt: skip
    assert made["limits"]["max_n"] == manifest.DEFAULT_LIMITS["max_n"]
    (path / "slackwater.json").write_text(json.dumps({"parameters": {"wdith": {"default": 1}}}))
    with pytest.raises(RefusedModel, match="'wdith' is not a parameter"):
        manifest.build(Model(path, "decode"))


def test_the_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    """Equal for a copy, another for another configuration; slackwater.json does not count."""
    path = Path(shutil.copytree(shared_qwenimage(), tmp_path / "model"))
    (path / "slackwater.json").write_text("{}")
    same = open_directory(path).fingerprint
    assert same == open_directory(shared_qwenimage()).fingerprint
    config = path / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace("0.02", "0.03"))
    assert open_directory(path).fingerprint != same


@pytest.mark.parametrize(
    ("params", "on", "scale"),
    [
        ({"true_cfg_scale": 4.0, "negative_prompt": None}, False, 4.0),
        ({"true_cfg_scale": 4.0, "negative_prompt": ""}, True, 4.0),
        ({"true_cfg_scale": 1.0, "negative_prompt": "x"}, False, 1.0),
        ({"true_cfg_scale": 0.5, "negative_prompt": "x"}, False, 0.5),
        ({"true_cfg_scale": None, "guidance_scale": 3.0, "negative_prompt": "x"}, True, 3.0),
        ({"true_cfg_scale": 2.0, "guidance_scale": 3.0, "negative_prompt": "x"}, True, 2.0),
    ],
)
def test_guidance_follows_the_classic_rule(
    model: Model, params: dict[str, Any], on: bool, scale: float
) -> None:
    """true_cfg_scale > 1 and a negative prompt; guidance_scale stands in where alone."""
    assert model.rule is not None
    assert guidance.is_on(model.rule, params) is on
    assert guidance.scale_of(model.rule, params) == scale
    guider = guidance.guiders(model.pipe, model.rule, params)["guider"]
    assert guider.num_conditions == (2 if on else 1)
    assert guider is not model.pipe.guider
