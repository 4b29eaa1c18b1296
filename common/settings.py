"""Every setting, once: a field here is a `--flag`, a SLACKWATER_ variable and a row in the docs.

`python -m common.settings` prints the table that stands in docs/settings.md.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.scripts import Ttls

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen-image"


def single_threaded() -> None:
    """One OpenMP thread a process that sleeps while it waits; call before torch is imported.

    With two threads that spin, beside other busy processes, a forward pass of 8 ms was measured
    at 1,250 ms. The thread count is part of exactness too: 1 and 2 threads differ by 5e-7.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Settings(BaseSettings):
    """One pool's settings; the same class for every service and the command line."""

    model_config = SettingsConfigDict(
        env_prefix="SLACKWATER_",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="ignore",
        protected_namespaces=(),
    )

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the pool's Redis is")
    prefix: str = Field("sw:", description="key prefix; on Redis Cluster a hash tag such as {sw}:")
    host: str = Field(
        default_factory=socket.gethostname,
        description="name of this host; workers of one host share an arena",
    )

    # models and devices
    model: str = Field(str(BUNDLED_MODEL), description="diffusers model directory or hub id")
    model_name: str = Field("", description="name clients use; default: the directory's name")
    device: str = Field("cpu", description="cpu, cuda, cuda:1, …")
    dtype: str = Field("float32", description="float32, bfloat16 or float16")
    threads: int = Field(1, ge=1, description="OpenMP threads a worker process (CPU)")
    attention: str = Field("auto", description="auto, or a name of diffusers' attention backends")
    noop: str = Field(
        "",
        description="run timed no-op stages instead of a model: "
        '"encode_ms=5,step_ms=50,decode_ms=20,token_ms=0"; "0" for no time at all',
    )

    # the arena
    arena_path: str = Field(
        "/dev/shm/slackwater/arena", description="the host's arena file, on tmpfs"
    )
    arena_bytes: int = Field(256 * 2**20, ge=2**20, description="its size when first made")
    device_cache_bytes: int = Field(
        512 * 2**20, ge=0, description="states a denoiser keeps at hand on its device"
    )
    embed_cache_bytes: int = Field(
        64 * 2**20, ge=0, description="embeddings an encoder keeps for repeated prompts"
    )

    states: str = Field(
        "auto",
        pattern="^(auto|redis)$",
        description="where states are left: auto (the arena, Redis when it is full) or redis "
        "(readable from every host)",
    )

    # scheduling
    policy: str = Field("slack", description="slack or fcfs")
    chunk_ms: float = Field(600.0, gt=0, description="wanted length of a denoise chunk")
    lead_ms: float = Field(
        20.0, ge=0, description="a task is handed over this long before its rank is free"
    )
    pack_ms: float = Field(
        5.0, ge=0, description="tasks shorter than this are handed over several at a time"
    )
    encode_ahead: int = Field(2, ge=1, description="jobs encoded ahead per denoise worker")
    slo_scale: float = Field(
        3.0, gt=0, description="default deadline: this × the job's standalone time"
    )
    max_jobs: int = Field(10_000, ge=1, description="active jobs; more are refused as queue_full")
    exact: bool = Field(True, description="jobs are exact unless they say otherwise")
    default_model: str = Field(
        "", description="model of a job that names none, where several are served"
    )

    # leases and lives
    leader_lease_s: float = Field(
        3.0, gt=0, description="a coordinator silent this long loses the lead"
    )
    worker_lease_s: float = Field(
        5.0, gt=0, description="a worker silent this long loses its tasks"
    )
    result_ttl_s: float = Field(86_400, gt=0, description="how long sw:result:* stays")
    output_ttl_s: float = Field(86_400, gt=0, description="how long sw:output:* stays")
    job_ttl_s: float = Field(172_800, gt=0, description="how long the record of an ended job stays")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING")

    def served_name(self) -> str:
        """The model name clients use."""
        if self.model_name:
            return self.model_name
        if self.noop:
            return "noop"
        return Path(self.model).name if Path(self.model).exists() else self.model


def ttls_of(settings: Settings) -> Ttls:
    return Ttls(
        result_s=settings.result_ttl_s, output_s=settings.output_ttl_s, job_s=settings.job_ttl_s
    )


def from_command_line(prog: str, args: list[str] | None = None) -> Settings:
    """Settings from flags, then the environment, then the defaults."""
    flags: Any = args if args is not None else True
    made: Settings = Settings(_cli_parse_args=flags, _cli_prog_name=prog)  # type: ignore[call-arg]
    return made


def table() -> str:
    """The settings as a Markdown table."""
    lines = ["| flag | environment | default | what |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        default = "the host's name" if name == "host" else field.get_default()
        if name == "model":
            default = "the bundled tiny-qwen-image"
        text = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{flag}` | `SLACKWATER_{name.upper()}` | `{default}` | {text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
