"""No-op stages on a timed device: the whole protocol, real handles, no model.

Tests, the simulator's check and the control-plane benchmarks run on them. The state they carry
is a hash chain over the job's steps, so a step that was lost, repeated or done by a zombie shows
in the file that comes out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.handles import Handle, HandleStore, Parcel
from common.stage import DECODE, DENOISE, ENCODE, Control, Outcome, Output, Row, Task

# At most this long between two looks at should_stop while the device is “busy”.
NAP_S = 0.05


@dataclass(frozen=True, slots=True)
class NoopCosts:
    """What the timed device takes, in seconds; `token_s` is added per image token and step.

    `state_kb` is what a job's state has beside its chain, which alone is so small that it travels
    in the handle and needs no arena. `video` declares a model of videos, for clients of such where
    none is loaded.
    """

    encode_s: float = 0.0
    step_s: float = 0.0
    decode_s: float = 0.0
    token_s: float = 0.0
    state_kb: int = 0
    video: bool = False

    @classmethod
    def parse(cls, text: str) -> NoopCosts:
        """ "encode_ms=5,step_ms=50,decode_ms=20,token_ms=0.1,state_kb=64,video=1"; "0" for no time
        at all."""
        if text in ("", "0"):
            return cls()
        values = dict(part.split("=", 1) for part in text.split(","))
        video = values.pop("video", "0") == "1"
        state_kb = int(values.pop("state_kb", "0"))
        known = {"encode_ms", "step_ms", "decode_ms", "token_ms"}
        if not set(values) <= known:
            raise ValueError(f"noop: {', '.join(set(values) - known)} unknown; there are {known}")
        seconds = {k.replace("_ms", "_s"): float(v) / 1000 for k, v in values.items()}
        return cls(**seconds, state_kb=state_kb, video=video)


TOKEN_PX = 16
PARAMETERS: dict[str, dict[str, Any]] = {
    "prompt": {"type": "str", "required": True, "max_length": 10_000},
    "width": {"type": "int", "default": 128, "min": 16, "max": 4096, "multiple_of": TOKEN_PX},
    "height": {"type": "int", "default": 128, "min": 16, "max": 4096, "multiple_of": TOKEN_PX},
    "num_inference_steps": {"type": "int", "default": 1, "min": 1, "max": 1000},
}
VIDEO_PARAMETERS: dict[str, dict[str, Any]] = {
    **PARAMETERS,
    "num_frames": {"type": "int", "default": 17, "min": 1, "max": 1000},
    "fps": {"type": "float", "default": 16, "min": 1, "max": 120},
}


def chain(digest: bytes, step: int) -> bytes:
    """The state after `step`: it names every step before it, in order."""
    return hashlib.sha256(digest + step.to_bytes(4, "big")).digest()


def expected(prompt: str, seed: int, steps: int) -> str:
    """What a job's file must say: the chain over all its steps."""
    digest = hashlib.sha256(f"{prompt}/{seed}".encode()).digest()
    for step in range(steps):
        digest = chain(digest, step)
    return digest.hex()


class NoopStage:
    """Encode, denoise or decode of the model "noop"."""

    def __init__(
        self,
        kind: str,
        store: HandleStore,
        costs: NoopCosts | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.kind = kind
        self._store, self._costs, self._sleep = store, costs or NoopCosts(), sleep

    def manifest(self) -> dict[str, Any]:
        c = self._costs
        return {
            "version": 1,
            "model": "noop",
            "family": "noop",
            "pipeline": "none",
            "task": "text-to-video" if c.video else "text-to-image",
            "parameters": VIDEO_PARAMETERS if c.video else PARAMETERS,
            "limits": {"max_pixels": 4096 * 4096, "max_n": 4},
            "scheduler": {"class": "none", "verdict": "ok"},
            "token_px": TOKEN_PX,
            "cfg": {},
            "costs": {
                ENCODE: {"fixed_s": c.encode_s},
                DENOISE: {"fixed_s": c.step_s, "token_s": c.token_s},
                DECODE: {"fixed_s": c.decode_s},
            },
        }

    def stage_in(self, task: Task) -> dict[str, bytes]:
        """The chain so far of each row that has one."""
        return {row.job: self._read(row) for row in task.rows if row.handles}

    def run(self, task: Task, staged: dict[str, bytes], control: Control) -> list[Outcome]:
        if self.kind == ENCODE:
            return [self._encode(task, row) for row in task.rows]
        if self.kind == DENOISE:
            return [self._denoise(task, row, staged[row.job], control) for row in task.rows]
        return [self._decode(row, staged[row.job]) for row in task.rows]

    def _encode(self, task: Task, row: Row) -> Outcome:
        self._pass(self._costs.encode_s)
        seed = hashlib.sha256(f"{row.params['prompt']}/{row.params['seed']}".encode()).digest()
        return Outcome(
            row.job, handles=self._write(row, task.seq, seed), seconds=self._costs.encode_s
        )

    def _denoise(self, task: Task, row: Row, digest: bytes, control: Control) -> Outcome:
        tokens = row.params["width"] * row.params["height"] / TOKEN_PX**2
        each = self._costs.step_s + self._costs.token_s * tokens
        step = row.start
        while step < row.stop and not control.should_stop():
            self._pass(each)
            digest = chain(digest, step)
            step += 1
            if each:
                control.progress(row.job, step)
        return Outcome(
            row.job,
            step=step,
            handles=self._write(row, task.seq, digest),
            seconds=each * (step - row.start),
            step_s=each,
        )

    def _decode(self, row: Row, digest: bytes) -> Outcome:
        self._pass(self._costs.decode_s)
        text = json.dumps({"job": row.job, "chain": digest.hex()}).encode()
        file = Output(text, "application/json", row.params["width"], row.params["height"])
        return Outcome(row.job, outputs=[file], seconds=self._costs.decode_s)

    def _pass(self, seconds: float) -> None:
        while seconds > 0:
            self._sleep(min(seconds, NAP_S))
            seconds -= NAP_S

    def _write(self, row: Row, seq: int, digest: bytes) -> dict[str, Handle]:
        padding = bytes(1024 * self._costs.state_kb)
        tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {
            "chain": ("uint8", (len(digest),), digest)
        }
        if padding:
            tensors["padding"] = ("uint8", (len(padding),), padding)
        parcel = Parcel(tensors, b"")
        return {"latents": self._store.put(row.job, seq, "latents", parcel)}

    def _read(self, row: Row) -> bytes:
        return bytes(self._store.get(row.handles["latents"]).tensors["chain"][2])

    def free(self, handles: list[Handle]) -> None:
        for handle in handles:
            self._store.free(handle)

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is held."""
