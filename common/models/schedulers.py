"""What a scheduler knows beyond its configuration, and whether a checkpoint can carry it.

A scheduler's state is `vars()` without its configuration. Tensors among it that are the
same objects, unwritten, as when the timesteps were set (sigmas, timesteps) are written
once; everything else (the step index, history tensors) goes with the latents. On restore,
attributes that the checkpoint lacks are deleted: UniPC's `this_order`, for example, does not
exist before its first step, and code may ask `hasattr`.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.models.errors import NotCapturable
from common.models.values import Writer

# ConfigMixin's own attribute; the configuration comes from the model directory everywhere.
CONFIG = "_internal_dict"

# Refused by class name: what they keep is no value, or only exists half way through.
REFUSED = {
    "DPMSolverSDEScheduler": "it draws from a Brownian tree object that cannot be carried",
    "CosineDPMSolverMultistepScheduler": "it draws from a Brownian tree object that cannot be "
    "carried",
}

# Falling noise levels within every scheduler's range.
TRIAL_SIGMAS = [0.9, 0.5, 0.1]


@dataclass(frozen=True)
class Verdict:
    """Whether jobs of this scheduler can be paused; the manifest publishes it."""

    scheduler: str
    ok: bool
    reason: str = ""

    def to_manifest(self) -> dict[str, Any]:
        return {
            "class": self.scheduler,
            "verdict": "ok" if self.ok else "refused",
            "reason": self.reason,
        }


def fresh(scheduler: Any) -> Any:
    """A scheduler of the same configuration that shares no state with `scheduler`."""
    return type(scheduler).from_config(scheduler.config)


def changing(scheduler: Any) -> dict[str, Any]:
    """All attributes that make up the scheduler's state."""
    return {name: value for name, value in vars(scheduler).items() if name != CONFIG}


class Marks:
    """Remembers the tensors a scheduler had once its timesteps were set.

    A tensor counts as unchanged while it is the same object and autograd's version counter,
    which every in-place write raises, still stands where it stood.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._marks = {name: (value, value._version) for name, value in tensors.items()}

    @classmethod
    def of(cls, scheduler: Any) -> Marks:
        """Mark the tensors of a scheduler as they stand now."""
        return cls({k: v for k, v in changing(scheduler).items() if isinstance(v, torch.Tensor)})

    def once(self) -> dict[str, torch.Tensor]:
        """The part that is written once."""
        return {name: tensor for name, (tensor, _) in self._marks.items()}

    def delta(self, scheduler: Any) -> dict[str, Any]:
        """The part that changes: values, and the names whose tensors still are as marked."""
        values: dict[str, Any] = {}
        same: list[str] = []
        for name, value in changing(scheduler).items():
            tensor, version = self._marks.get(name, (None, 0))
            if tensor is not None and value is tensor and tensor._version == version:
                same.append(name)
            else:
                values[name] = value
        return {"values": values, "same": same}


def restore(scheduler: Any, once: dict[str, torch.Tensor], delta: dict[str, Any]) -> None:
    """Put a captured state into a fresh scheduler of the same configuration."""
    wanted = {**{name: once[name] for name in delta["same"]}, **delta["values"]}
    for name in changing(scheduler):
        if name not in wanted:
            delattr(scheduler, name)
    for name, value in wanted.items():
        setattr(scheduler, name, value)


def verdict(scheduler: Any) -> Verdict:
    """Whether `scheduler` can be captured, found by capturing it after two dry steps.

    The dry run uses a 1×4×8×8 tensor and never touches `scheduler` itself.
    """
    name = type(scheduler).__name__
    if scheduler.config.get("stochastic_sampling"):
        return Verdict(name, False, "stochastic_sampling draws from the process's own generator")
    if name in REFUSED:
        return Verdict(name, False, REFUSED[name])
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "set_timesteps"):
        return Verdict(name, False, "it has no step() and set_timesteps() to pause between")
    trial = fresh(scheduler)
    with contextlib.suppress(Exception):  # a step may want more than a dry run can give
        _dry_run(trial)
    try:
        Writer().plain(changing(trial), name)
    except NotCapturable as error:
        return Verdict(name, False, str(error))
    return Verdict(name, True)


def least_steps(scheduler: Any) -> int:
    """The fewest steps for which the timesteps are finite.

    With `shift_terminal` set, as Qwen-Image has it, one step divides zero by zero.
    """
    trial = fresh(scheduler)
    try:
        with np.errstate(all="ignore"):
            _set_timesteps(trial, 1)
    except Exception:  # the job itself will say what is wrong
        return 1
    return 1 if bool(torch.isfinite(torch.as_tensor(trial.timesteps)).all()) else 2


def sigmas_beyond_steps(scheduler: Any) -> int | None:
    """How many more sigmas than steps a job of its own sigmas brings; None: it cannot bring any.

    Euler's last one is where its last step ends, so it takes n + 1; the flow-matching schedulers
    take n. Found by trying: UniPC's set_timesteps has the parameter and fails on a list.
    """
    trial = fresh(scheduler)
    if "sigmas" not in _accepted(trial):
        return None
    try:
        _set_timesteps(trial, sigmas=TRIAL_SIGMAS)
        beyond = len(TRIAL_SIGMAS) - len(trial.timesteps)
    except Exception:
        return None
    return beyond if beyond in (0, 1) else None


def _accepted(scheduler: Any) -> set[str]:
    return set(inspect.signature(scheduler.set_timesteps).parameters)


def _set_timesteps(
    scheduler: Any, steps: int | None = None, sigmas: list[float] | None = None
) -> None:
    given: dict[str, Any] = {"num_inference_steps": steps} if sigmas is None else {"sigmas": sigmas}
    if "mu" in _accepted(scheduler):
        given["mu"] = 0.5
    scheduler.set_timesteps(**given)


def _dry_run(scheduler: Any) -> None:
    _set_timesteps(scheduler, 4)
    sample = torch.ones(1, 4, 8, 8)
    generator = torch.Generator("cpu").manual_seed(0)
    takes_generator = "generator" in inspect.signature(scheduler.step).parameters
    for t in scheduler.timesteps[:2]:
        more = {"generator": generator} if takes_generator else {}
        sample = scheduler.step(sample * 0.1, t, sample, return_dict=False, **more)[0]
