"""Bad model directories: refused before anything is served, naming file or component."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.models.directory import open_directory
from common.models.errors import RefusedModel
from common.models.model import Model
from tests.tiny_models import make_qwenimage, shared_qwenimage, shared_root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(shared_qwenimage(), tmp_path / "model"))


def edit_index(model: Path, **fields: object) -> None:
    file = model / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_truncated_weights_are_refused_by_file_and_component(model: Path) -> None:
    """A download that stopped half way names the file."""
    file = model / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RefusedModel, match=r"vae.diffusion_pytorch_model.safetensors.*'vae'"):
        Model(model, "decode")


def test_garbage_weights_are_refused(model: Path) -> None:
    """A file that is no safetensors at all is named as well."""
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(b"\xff" * 1000)
    with pytest.raises(RefusedModel, match="'transformer' is damaged"):
        Model(model, "denoise")


@pytest.mark.parametrize(
    ("part", "file", "stage"),
    [
        ("transformer", "diffusion_pytorch_model.safetensors", "denoise"),
        ("text_encoder", "model.safetensors", "encode"),
    ],
)
def test_missing_weights_are_not_filled_at_random(
    model: Path, part: str, file: str, stage: str
) -> None:
    """diffusers and transformers only log a missing tensor and make one up."""
    path = model / part / file
    tensors = load_file(path)
    name = next(n for n in sorted(tensors) if n.endswith("weight"))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RefusedModel, match=f"component '{part}'.*missing keys"):
        Model(model, stage)


def test_a_missing_component_is_refused(model: Path) -> None:
    """A stage never starts with a component left None."""
    shutil.rmtree(model / "text_encoder")
    with pytest.raises(RefusedModel, match="component 'text_encoder'"):
        Model(model, "encode")


def test_other_stages_do_not_need_the_missing_component(model: Path) -> None:
    """The decoder loads the VAE and nothing else, so it starts without the others' weights."""
    shutil.rmtree(model / "text_encoder")
    (model / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    assert Model(model, "decode").pipe.text_encoder is None


def test_pickled_weights_are_refused(model: Path) -> None:
    """A .bin can run code when it is loaded."""
    folder = model / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.bin")
    with pytest.raises(RefusedModel, match=r"diffusion_pytorch_model\.bin.*pickle"):
        open_directory(model)


def test_custom_code_is_refused(model: Path) -> None:
    """Neither components of unknown libraries nor blocks that a repository brings are run."""
    edit_index(model, transformer=["my_module", "MyTransformer"])
    with pytest.raises(RefusedModel, match="'my_module', which is custom code"):
        open_directory(model)


def test_custom_blocks_are_refused(model: Path) -> None:
    """auto_map in modular_config.json names a Python file of the repository."""
    (model / "modular_config.json").write_text(
        json.dumps({"auto_map": {"ModularPipelineBlocks": "block.Mine"}})
    )
    with pytest.raises(RefusedModel, match="custom code"):
        open_directory(model)


def test_an_unknown_pipeline_is_refused(model: Path) -> None:
    """The class that diffusers lacks is named."""
    edit_index(model, _class_name="NoSuchPipeline")
    with pytest.raises(RefusedModel, match="unknown pipeline class 'NoSuchPipeline'"):
        open_directory(model)


def test_a_pipeline_without_modular_form_is_refused(model: Path) -> None:
    """The message lists the families there are."""
    edit_index(model, _class_name="PixArtSigmaPipeline")
    with pytest.raises(RefusedModel, match=r"no modular form of PixArtSigmaPipeline.*qwenimage"):
        open_directory(model)


def test_no_directory_and_no_index(tmp_path: Path) -> None:
    """A wrong path and an empty folder each say what is missing."""
    with pytest.raises(RefusedModel, match="no such directory"):
        open_directory(tmp_path / "nothing")
    with pytest.raises(RefusedModel, match=r"neither model_index\.json"):
        open_directory(tmp_path)


def test_a_nested_loop_is_refused_by_name(model: Path) -> None:
    """A family whose loop cannot be cut says why."""
    edit_index(model, _class_name="HeliosPipeline")
    with pytest.raises(RefusedModel, match=r"HeliosModularPipeline cannot be cut.*nested"):
        Model(model, "denoise")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"device": "abacus"}, "not a torch device"),
        ({"attention_backend": "nonsense"}, "attention backend 'nonsense'"),
        ({"attention_backend": "flash"}, "attention backend 'flash' is not usable"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings: dict[str, str], match: str) -> None:
    """A wrong device, dtype or attention backend stops the worker at start."""
    with pytest.raises(RefusedModel, match=match):
        Model(shared_qwenimage(), "denoise", **settings)


def test_a_guidance_distilled_qwen_is_refused() -> None:
    """diffusers' modular blocks never pass the embedded guidance to the transformer."""
    path = make_qwenimage(shared_root() / "distilled", guidance_embeds=True)
    with pytest.raises(RefusedModel, match="guidance_embeds"):
        Model(path, "denoise")
