"""What crosses a process boundary: value types, parcels, and every scheduler's history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.models import parcels, schedulers
from common.models.errors import NotCapturable, StateLost
from tests import tiny_models  # noqa: F401 - sets threads before torch is imported

CPU = torch.device("cpu")
# diffusers 0.42 schedulers use NumPy in ways that NumPy 2 warns about, thousands of times.
pytestmark = pytest.mark.filterwarnings("ignore")


def through_bytes(values: dict[str, Any], part: str = "latents") -> dict[str, Any]:
    """Out and in again, with the buffers copied as a store copies them."""
    parcel = parcels.write(part, values, CPU)
    parcel.tensors = {k: (d, s, bytes(b)) for k, (d, s, b) in parcel.tensors.items()}
    return parcels.read(part, parcel, CPU)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        equal = torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        layout = [[st for st, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)]
        return a.dtype == b.dtype and layout[0] == layout[1] and equal
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 2**53 + 1, 0.1, float("inf"), "", "ü🟥",
        (1, 2), [1, (2, [3])], {}, {"a": {1: (None,)}}, torch.Size([1, 2]), torch.bfloat16,
        np.float64(0.1), np.float32(0.1), np.int64(7), np.arange(6.0).reshape(2, 3),
        torch.randn(2, 3), torch.randn(3, 2).to(torch.bfloat16), torch.tensor(5.0),
        torch.zeros(0, 4), torch.ones(2, dtype=torch.bool), torch.arange(3),
        torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(1, 1).expand(1, 1),
        torch.ones(3)[1:2].as_strided((1,), (0,)),
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
        [torch.ones(1), None, torch.zeros(2)],
    ],
    ids=lambda v: f"{type(v).__name__}-{v.shape if isinstance(v, torch.Tensor) else v!r:.18}",
)  # fmt: skip
def test_values_come_back_as_they_were(value: Any) -> None:
    """Type, dtype, strides and bits, tuples apart from lists, NumPy apart from Python."""
    assert same(through_bytes({"x": value})["x"], value)


def test_a_tensor_comes_back_at_its_alignment() -> None:
    """CPU kernels round by the address modulo 64, so it is part of the bits."""
    whole = torch.randn(40)
    for skip in (0, 1, 7, 16):
        back = through_bytes({"x": whole[skip : skip + 8]})["x"]
        assert back.data_ptr() % 64 == whole[skip:].data_ptr() % 64
        assert torch.equal(back, whole[skip : skip + 8])


def test_a_tensor_named_twice_is_stored_once() -> None:
    """The timesteps are the state's and the scheduler's at once."""
    tensor = torch.arange(1000.0)
    parcel = parcels.write("latents", {"a": tensor, "b": [tensor]}, CPU)
    assert len(parcel.tensors) == 1
    back = through_bytes({"a": tensor, "b": [tensor]})
    assert back["a"] is back["b"][0]


@pytest.mark.parametrize(
    "value",
    [object(), torch.Generator(), {1.5: 2}, lambda: 0, {"a": [set()]}, b"raw", np.array(["x"])],
    ids=lambda v: type(v).__name__,
)
def test_everything_else_is_refused_with_its_path(value: Any) -> None:
    """A checkpoint that silently lost something would be worse than none."""
    with pytest.raises(NotCapturable, match=r"prepared\.thing"):
        parcels.write("prepared", {"thing": value}, CPU)


def test_reading_refuses_what_it_does_not_know() -> None:
    """Another part, another version, damaged meta: StateLost, never a guess."""
    parcel = parcels.write("embeds", {"a": 1}, CPU)
    with pytest.raises(StateLost, match="expected 'latents'"):
        parcels.read("latents", parcel, CPU)
    parcel.meta = b"\xc1"
    with pytest.raises(StateLost, match="not readable"):
        parcels.read("embeds", parcel, CPU)


# -- schedulers ------------------------------------------------------------------------------

CAPTURED = {
    "FlowMatchEulerDiscreteScheduler": {},
    "FlowMatchHeunDiscreteScheduler": {},
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "HeunDiscreteScheduler": {},
    "DDIMScheduler": {},
    "DDPMScheduler": {},
    "PNDMScheduler": {"skip_prk_steps": True},
    "PNDMScheduler/prk": {"skip_prk_steps": False},
    "LMSDiscreteScheduler": {},
    "IPNDMScheduler": {},
    "UniPCMultistepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    "DPMSolverMultistepScheduler": {},
    "DPMSolverMultistepScheduler/sde": {"algorithm_type": "sde-dpmsolver++"},
    "DPMSolverSinglestepScheduler": {},
    "DEISMultistepScheduler": {},
    "KDPM2AncestralDiscreteScheduler": {},
    "LCMScheduler": {},
    "TCDScheduler": {},
}


def make(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name.split("/")[0])(**CAPTURED[name])


def run(scheduler: Any, latents: Any, generator: Any, start: int, stop: int) -> Any:
    """A stand-in for the loop: a prediction that depends on the latents and the step."""
    import inspect

    takes = "generator" in inspect.signature(scheduler.step).parameters
    for t in scheduler.timesteps[start:stop]:
        model_input = latents
        if hasattr(scheduler, "scale_model_input"):
            model_input = scheduler.scale_model_input(latents, t)
        pred = torch.tanh(model_input) * 0.5 + 0.01
        more = {"generator": generator} if takes else {}
        latents = scheduler.step(pred, t, latents, return_dict=False, **more)[0]
    return latents


@pytest.mark.parametrize("name", CAPTURED)
def test_a_scheduler_resumes_from_bytes_at_any_step(name: str) -> None:
    """Cut at every step, into a fresh scheduler each time: the uncut run's bits."""
    first = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = make(name)
    assert schedulers.verdict(whole).ok
    whole.set_timesteps(7)
    expected = run(whole, first, torch.Generator().manual_seed(1), 0, 99)

    scheduler, generator = make(name), torch.Generator().manual_seed(1)
    scheduler.set_timesteps(7)
    marks, latents = schedulers.Marks.of(scheduler), first
    once = through_bytes(marks.once())
    for i in range(len(scheduler.timesteps)):
        latents = run(scheduler, latents, generator, i, i + 1)
        changed = through_bytes(
            {"s": marks.delta(scheduler), "x": latents, "g": generator.get_state()}
        )
        scheduler, generator = make(name), torch.Generator()
        schedulers.restore(scheduler, once, changed["s"])
        marks = schedulers.Marks(once)
        generator.set_state(changed["g"])
        latents = changed["x"]
    assert torch.equal(latents, expected)


def test_only_what_changed_is_written_again() -> None:
    """Sigmas and timesteps stay out of the changing part, also after a resume."""
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    scheduler.set_timesteps(50)
    marks = schedulers.Marks.of(scheduler)
    run(scheduler, torch.ones(1, 4, 8, 8), None, 0, 1)
    delta = marks.delta(scheduler)
    assert set(delta["same"]) == {"timesteps", "sigmas"}
    assert not any(isinstance(v, torch.Tensor) for v in delta["values"].values())
    scheduler.sigmas[3] = 0.5  # in place: the same object, but no longer the same numbers
    assert "sigmas" in marks.delta(scheduler)["values"]


def test_refused_schedulers_are_named_with_the_reason() -> None:
    """What draws from an object or from the process's own generator cannot be paused."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SASolverScheduler

    verdict = schedulers.verdict(FlowMatchEulerDiscreteScheduler(stochastic_sampling=True))
    assert not verdict.ok
    assert "generator" in verdict.reason
    verdict = schedulers.verdict(SASolverScheduler())
    assert not verdict.ok
    assert "tau_func" in verdict.reason


def test_a_scheduler_that_keeps_an_object_is_refused_by_its_dry_run() -> None:
    """No list can name third parties' schedulers; two dry steps find the object."""
    from diffusers import DDIMScheduler

    class Odd(DDIMScheduler):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.sampler = object()
            return super().step(*args, **kwargs)

    verdict = schedulers.verdict(Odd())
    assert not verdict.ok
    assert "sampler" in verdict.reason
    assert verdict.scheduler == "Odd"
