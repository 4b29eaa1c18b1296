"""Step caches: diffusers' own, which leave out most of a forward where little has changed.

A cache's hooks live in a denoiser, with their settings; its state belongs to one job. So there
is one twin of the denoisers for each setting in use, sharing their weights, and a job's state is
put into the twin's hooks for a chunk and taken out again: twins hold nothing between chunks, and
what is left of a finished job is what somebody keeps of it.

A cache decides once a forward whether to skip, so a job with one runs alone. State that was
lost is made anew: the job goes on correctly and saves less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks import HookRegistry
from diffusers.hooks.hooks import CacheContext, StateManager, _set_cache_context

from common.models.errors import BadInput

NONE = "none"
DENOISERS = ("transformer", "transformer_2")
# What a job may ask for, and what diffusers makes of its threshold. TaylorSeer skips by the
# number of the step and has no threshold.
CONFIGS: dict[str, Callable[[float | None], Any]] = {
    "first_block": lambda threshold: FirstBlockCacheConfig(
        **({} if threshold is None else {"threshold": threshold})
    ),
    "taylor_seer": lambda threshold: TaylorSeerCacheConfig(),
}
WITH_THRESHOLD = frozenset({"first_block"})
# Users agree on few thresholds, and a twin of a large denoiser takes a second to make.
MOST_TWINS = 4


def wanted(params: dict[str, Any]) -> bool:
    """Whether a job asked for a step cache."""
    return (params.get("cache") or NONE) != NONE


@dataclass
class CacheState:
    """One job's state: by hook, by name of the call, whatever diffusers keeps."""

    by_hook: list[dict[str, Any]] = field(default_factory=list)


class Twins:
    """The denoisers of one pipeline under the cache settings that its jobs asked for of late.

    Every setting has a tree of modules of its own, and a threshold may be any number: the one
    that was not asked for longest goes, and is made again if it has to be.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._by_setting: dict[tuple[str, float | None], Twin] = {}  # the latest last

    def of(self, params: dict[str, Any]) -> Twin:
        cache: str = params["cache"]
        threshold = params.get("cache_threshold") if cache in WITH_THRESHOLD else None
        twin = self._by_setting.pop((cache, threshold), None)
        if twin is None:
            twin = Twin(self._pipe, CONFIGS[cache](threshold))
        self._by_setting[cache, threshold] = twin
        while len(self._by_setting) > MOST_TWINS:
            del self._by_setting[next(iter(self._by_setting))]
        return twin


class Twin:
    """Denoisers that share their weights with the pipeline's and have one cache enabled."""

    def __init__(self, pipe: Any, config: Any) -> None:
        self.denoisers: dict[str, Any] = {}
        self._managers: dict[int, StateManager] = {}
        self._computed = False
        self._skipped = 0
        for name in DENOISERS:
            denoiser = getattr(pipe, name, None)
            if isinstance(denoiser, torch.nn.Module):
                self.denoisers[name] = self._twin(denoiser, config)

    @contextmanager
    def running(self, pipe: Any, state: CacheState | None) -> Iterator[Run]:
        """A job's pipeline with the cache on, from `state`; None begins anew.

        On leaving, the pipeline is as it was, and the job's state is in the Run.
        """
        run = Run(state or CacheState())
        managers = list(self._managers.values())
        before = {name: getattr(pipe, name) for name in (*self.denoisers, "guider", "guider_2")
                  if hasattr(pipe, name)}  # fmt: skip
        for manager, states in zip(
            managers, run.state.by_hook or [{} for _ in managers], strict=True
        ):
            manager._state_cache = states
        for name, denoiser in self.denoisers.items():
            setattr(pipe, name, denoiser)
            # For families without a guider: one call a step.
            _set_cache_context(denoiser, CacheContext("0"))
        for name in ("guider", "guider_2"):
            if name in before:
                setattr(pipe, name, NamingGuider(before[name]))
        self._skipped = 0
        try:
            yield run
        finally:
            for name, component in before.items():
                setattr(pipe, name, component)
            run.state = CacheState([manager._state_cache for manager in managers])
            run.skipped = self._skipped
            for manager in managers:
                manager._state_cache = {}
            for denoiser in self.denoisers.values():
                _set_cache_context(denoiser, None)

    def _twin(self, denoiser: torch.nn.Module, config: Any) -> Any:
        weights = {id(t): t for t in (*denoiser.parameters(), *denoiser.buffers())}
        twin: Any = copy.deepcopy(denoiser, weights)
        if len(_blocks(twin)) < 2:
            raise BadInput("cache: this model has a single block, of which nothing can be skipped")
        twin.enable_cache(config)
        for module in twin.modules():
            registry: HookRegistry | None = getattr(module, "_diffusers_hook", None)
            for hook in registry.hooks.values() if registry is not None else ():
                for value in vars(hook).values():
                    if isinstance(value, StateManager):
                        self._managers[id(value)] = value
        twin.register_forward_pre_hook(self._begins)
        twin.register_forward_hook(self._ends)
        _innermost(twin).register_forward_pre_hook(self._computes)
        return twin

    # A forward was skipped if what lies inside the last block never ran.

    def _begins(self, *_: Any) -> None:
        self._computed = False

    def _computes(self, *_: Any) -> None:
        self._computed = True

    def _ends(self, *_: Any) -> None:
        self._skipped += not self._computed


@dataclass
class Run:
    """A chunk under a cache; complete once its context was left."""

    state: CacheState
    skipped: int = 0  # forward passes of this chunk


class NamingGuider:
    """A job's guider that also names its calls for the cache: one state a CFG branch."""

    def __init__(self, guider: Any) -> None:
        self._guider = guider
        self._context: AbstractContextManager[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guider, name)

    def __call__(self, states: list[Any]) -> Any:
        return self._guider(states)

    def prepare_models(self, denoiser: Any) -> None:
        self._guider.prepare_models(denoiser)
        self._context = denoiser.cache_context(str(self._guider._count_prepared))
        self._context.__enter__()

    def cleanup_models(self, denoiser: Any) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
        self._guider.cleanup_models(denoiser)


def _blocks(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    lists = [m for m in denoiser.children() if isinstance(m, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def _innermost(denoiser: torch.nn.Module) -> torch.nn.Module:
    """A projection inside the last block's attention, which runs only if the block does."""
    inside = _blocks(denoiser)[-1].named_modules()
    found: torch.nn.Module = next(m for name, m in inside if name.endswith("to_q"))
    return found
