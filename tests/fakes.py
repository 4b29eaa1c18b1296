"""Small stand-ins and builders that several tests use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from common.job import JobSpec
from common.keys import Keys
from common.messages import TaskRow, pack
from common.noop import PARAMETERS
from common.params import PoolDefaults, accept
from common.push import read_push
from common.scripts import Call, Scripts, Transitions, Ttls, text

NONCE = "leader:1"
MODEL = "noop"
MANIFEST: dict[str, Any] = {
    "parameters": PARAMETERS,
    "limits": {"max_pixels": 4096 * 4096, "max_n": 4},
    "scheduler": {"class": "none", "verdict": "ok"},
    "token_px": 16,
    "cfg": {},
    "costs": {
        "encode": {"fixed_s": 0.05},
        "denoise": {"fixed_s": 0.1},
        "decode": {"fixed_s": 0.05},
    },
}
MANIFESTS = {MODEL: MANIFEST}


def raw_push(**fields: Any) -> dict[bytes, bytes]:
    """Fields as XADD takes them."""
    return {k.encode(): v if isinstance(v, bytes) else str(v).encode() for k, v in fields.items()}


def a_spec(entry: str = "1000-0", **fields: Any) -> JobSpec:
    """An accepted job with its deadline fixed."""
    import dataclasses

    fields.setdefault("prompt", "a red circle")
    spec = accept(read_push(entry, raw_push(**fields)), MANIFESTS, PoolDefaults())
    return dataclasses.replace(spec, deadline_s=spec.deadline_s or spec.arrival_s + 10.0)


class Table:
    """The scripts as one leader and some workers would call them, each call checked to answer."""

    def __init__(self, redis: Any, keys: Keys, ttls: Ttls | None = None) -> None:
        self.redis, self.keys = redis, keys
        self.scripts = Scripts(redis)
        self.t = Transitions(keys, ttls or Ttls(), NONCE)
        self.worker_t = Transitions(keys, ttls or Ttls())
        self.now = 5000.0
        self._seqs = itertools.count(1)
        self.lead()

    def run(self, call: Call) -> list[Any]:
        return [
            part.decode() if isinstance(part, bytes) else part for part in self.scripts.one(call)
        ]

    # -- the leader ----------------------------------------------------------------------

    def lead(self, nonce: str = NONCE) -> list[Any]:
        return self.run(Transitions(self.keys, Ttls(), nonce).lead(1000))

    def push(self, **fields: Any) -> str:
        fields.setdefault("prompt", "a red circle")
        return text(self.redis.xadd(self.keys.jobs, raw_push(**fields)))

    def submit(self, **fields: Any) -> tuple[JobSpec, str]:
        """Push and submit; the spec and the verdict."""
        entry = self.push(**fields)
        spec = a_spec(entry, **fields)
        return spec, self.run(self.t.submit(spec, self.steps(spec), self.now, {}))[0]

    def job(self, **fields: Any) -> JobSpec:
        spec, verdict = self.submit(**fields)
        assert verdict == "created"
        return spec

    @staticmethod
    def steps(spec: JobSpec) -> int:
        return int(spec.params["num_inference_steps"])

    def dispatch(
        self,
        specs: Sequence[JobSpec],
        members: Sequence[str],
        stage: str = "encode",
        start: int = 0,
        stop: int = 0,
        seq: int | None = None,
    ) -> tuple[int, list[Any]]:
        seq = next(self._seqs) if seq is None else seq
        rows = [TaskRow(s.id, start, stop, True, pack(s.params), b"") for s in specs]
        call = self.t.dispatch(seq, stage, MODEL, members, rows, 0.1, self.now)
        return seq, self.run(call)

    def void(
        self, seq: int, members: Sequence[str], specs: Sequence[JobSpec], force: str = "0"
    ) -> list[Any]:
        return self.run(self.t.void(seq, members, [s.id for s in specs], force, self.now))

    # -- a worker ------------------------------------------------------------------------

    def register(self, name: str, stage: str = "encode") -> list[Any]:
        fields = {"stage": stage, "models": MODEL, "host": "here", "beat": "1"}
        return self.run(self.worker_t.register(name, 100, f"{MODEL}/{stage}", "{}", fields))

    def entry(self, worker: str) -> str:
        """The id of the first entry in the worker's stream."""
        found = self.redis.xrange(self.keys.tasks(worker), count=1)
        return text(found[0][0]) if found else "0-0"

    def start(self, seq: int, worker: str, specs: Sequence[JobSpec], stage: str = "encode") -> Any:
        jobs = [s.id for s in specs]
        return self.run(self.worker_t.start(seq, worker, self.entry(worker), stage, jobs, self.now))

    def report(
        self,
        seq: int,
        worker: str,
        specs: Sequence[JobSpec],
        next_stage: str = "denoise",
        lead: bool = True,
        step: int = 0,
        steps: int = 4,
        handles: bytes = b"state",
        code: str = "",
    ) -> list[Any]:
        rows = [(s.id, step, steps, next_stage, handles, b"", 0.5, code, code) for s in specs]
        return self.run(self.worker_t.report(seq, worker, lead, b"body", rows, self.now))

    # -- looking -------------------------------------------------------------------------

    def record(self, spec: JobSpec) -> dict[str, str]:
        return self._hash(self.keys.job(spec.id))

    def trajectory(self, spec: JobSpec) -> dict[str, str]:
        return self._hash(self.keys.trajectory(spec.id))

    def task(self, seq: int) -> dict[str, str]:
        return self._hash(self.keys.task(seq))

    def events(self, spec: JobSpec) -> list[str]:
        return [text(f[b"type"]) for _, f in self.redis.xrange(self.keys.events(spec.id))]

    def _hash(self, key: str) -> dict[str, str]:
        return {text(k): v.decode("utf-8", "replace") for k, v in self.redis.hgetall(key).items()}
