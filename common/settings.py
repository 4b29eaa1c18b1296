"""Every setting, once: a field here is a `--flag`, a SLACKWATER_ variable and a row in the docs.

`python -m common.settings` prints the table that stands in docs/settings.md.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.redis_url import RedisUrl
from common.scripts import Ttls

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen-image"
# What ended things stay for, in seconds: long enough to be fetched, and a number that Redis takes.
MIN_TTL_S, MAX_TTL_S = 1, 10 * 365 * 86_400


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
        allow_inf_nan=False,
        hide_input_in_errors=True,  # there may be a password in it
    )

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        repr=False,  # there may be a password in it
        description="where the pool's Redis is; rediss:// with TLS, sentinel://host,host/name with "
        "Sentinel; ?password_file=PATH keeps the password out of it",
    )
    redis_wait_replicas: int = Field(
        0, ge=0, description="replicas that must have a push and an end before anything follows"
    )
    prefix: str = Field("sw:", description="key prefix; on Redis Cluster a hash tag such as {sw}:")
    host: str = Field(
        default_factory=socket.gethostname,
        description="name of this host; workers of one host share an arena",
    )

    # models and devices
    model: str = Field(str(BUNDLED_MODEL), description="diffusers model directory or hub id")
    model_name: str = Field("", description="name clients use; default: the directory's name")
    device: str = Field(
        "cpu",
        description="cpu, cuda (a GPU of this host that no worker of the stage has), cuda:1, …",
    )
    gpu_lease: Literal["refuse", "wait", "off"] = Field(
        "refuse",
        description="device cuda where every GPU has its worker of the stage: refuse to start, "
        "wait for one, or off: all take the first GPU",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="float32, bfloat16 or float16"
    )
    threads: int = Field(1, ge=1, description="OpenMP threads a worker process (CPU)")
    attention: str = Field("auto", description="auto, or a name of diffusers' attention backends")
    fast_decode: bool = Field(
        False,
        description="decode jobs that need not be exact in 2-D: on CPUs a fraction of the time, "
        "2e-6 apart",
    )
    tiled_decode: bool = Field(
        False, description="decode pictures larger than a tile in diffusers' tiles: less memory"
    )
    mixed_sizes: Literal["auto", "on", "off"] = Field(
        "auto",
        description="jobs of several sizes in one forward pass: on, off, or auto: where the "
        "model's profile.json says that it pays",
    )
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
        512 * 2**20, ge=0, description="states a denoiser keeps at hand on its device, in blocks"
    )
    device_budget_bytes: int = Field(
        0,
        ge=0,
        description="all that a denoiser may use of its device: weights, states and forward "
        "passes; 0: no limit on CPUs, 92 % of a CUDA device",
    )
    embed_cache_bytes: int = Field(
        64 * 2**20, ge=0, description="embeddings an encoder keeps for repeated prompts"
    )

    previews: bool = Field(
        True, description="denoisers leave small pictures of what running jobs have come to"
    )

    states: str = Field(
        "auto",
        pattern="^(auto|redis)$",
        description="where states are left: auto (the arena, Redis when it is full) or redis "
        "(readable from every host)",
    )
    host_risk_s: float = Field(
        0.0,
        ge=0,
        description="work on a job, in seconds, that may be lost with its host: jobs that have "
        "cost more leave their states in Redis; 0: any",
    )

    # scheduling
    policy: str = Field(
        "slack", description="who runs next; `slackwater policies` lists those there are"
    )
    chunk_ms: float = Field(600.0, gt=0, description="wanted length of a denoise chunk")
    lead_ms: float = Field(
        20.0, ge=0, description="a task is handed over this long before its rank is free"
    )
    pack_ms: float = Field(
        5.0, ge=0, description="tasks shorter than this are handed over several at a time"
    )
    patience_s: float = Field(
        2400.0,
        gt=0,
        description="a late job gets a step after so long without one, whoever else waits (slack)",
    )
    encode_ahead: int = Field(2, ge=1, description="jobs encoded ahead per denoise worker")
    slo_scale: float = Field(
        3.0, gt=0, description="default deadline: this × the job's standalone time"
    )
    max_jobs: int = Field(10_000, ge=1, description="active jobs; more are refused as queue_full")
    max_backlog_s: float = Field(
        math.inf,
        gt=0,
        allow_inf_nan=True,
        description="work that may wait, in seconds of all ranks; as max_jobs",
    )
    admit: Literal["all", "feasible"] = Field(
        "all",
        description="all: jobs that will be late are best effort; feasible: they are refused",
    )
    refresh_ms: float = Field(
        1000.0, gt=0, description="how often slack, queue_position and eta are brought up to date"
    )
    exact: bool = Field(True, description="jobs are exact unless they say otherwise")
    batch: bool = Field(
        True, description="jobs that are not exact share forward passes where that pays (slack)"
    )
    default_model: str = Field(
        "", description="model of a job that names none, where several are served"
    )

    # the HTTP gateway
    http_host: str = Field("127.0.0.1", description="address the gateway listens on")
    http_port: int = Field(8000, ge=1, le=65535, description="its port")
    http_base_url: str = Field(
        "", description="how clients reach it, for links; default: as each request came"
    )
    http_keys: str = Field(
        "",
        repr=False,
        description="API keys, one a line: name key [per_minute=N] [max_jobs=N]; @FILE reads a "
        "file; none: open to everyone",
    )
    http_per_minute: float = Field(
        0, ge=0, description="pushes a minute of one API key that does not say; 0: no limit"
    )
    http_max_jobs: int = Field(
        0, ge=0, description="active jobs of one API key that does not say; 0: no limit"
    )
    http_max_body_bytes: int = Field(
        2**20, ge=1024, description="the largest request without files"
    )
    http_max_upload_bytes: int = Field(
        16 * 2**20, ge=1024, description="the largest request with files"
    )
    http_wait_s: float = Field(
        600.0, gt=0, description="how long a request waits for its picture; the job goes on then"
    )
    http_cancel_on_disconnect: bool = Field(
        True, description="a client that goes away while it waits for a picture cancels its job"
    )

    # what it sends to
    outgoing_hosts: str = Field(
        "",
        description="hosts that webhooks may go to: hooks.example.com, "
        "*.example.com:8443, http://10.0.0.5:8080; networks such as 10.0.0.0/16 count as public "
        "then; none: nothing is sent",
    )

    webhook_secret: str = Field(
        "",
        repr=False,
        description="signs webhooks: whsec_ and base64; several with spaces between, to change it; "
        "@FILE reads a file",
    )
    webhook_retry_s: float = Field(
        5.0, gt=0, description="pause after a delivery's first failure; it triples, up to 2 hours"
    )
    webhook_give_up_s: float = Field(
        259_200, gt=0, le=1_296_000, description="how long a delivery is tried again"
    )
    upload_prefixes: str = Field(
        "",
        description="URLs below which jobs may have their files copied: s3://bucket/out, "
        "file:///srv/out; none: nowhere",
    )

    # Celery
    celery_url: str = Field(
        "",
        repr=False,  # there may be a password in it
        description="broker and result backend of the Celery programs that send jobs; default: "
        "redis_url",
    )
    celery_queue: str = Field("slackwater", description="the queue they send jobs to")
    celery_key_prefix: str = Field(
        "", description="the global_keyprefix that they have set, if they have"
    )

    # leases and lives
    leader_lease_s: float = Field(
        3.0, ge=0.5, description="a coordinator silent this long loses the lead"
    )
    worker_lease_s: float = Field(
        5.0, ge=0.5, description="a worker silent this long loses its tasks"
    )
    hang_s: float = Field(
        5.0, gt=0, description="a worker that makes no step for this long loses its tasks…"
    )
    hang_factor: float = Field(
        10.0, ge=1, description="…or for this × what the step should take, if that is longer"
    )
    hang_first_s: float = Field(
        60.0, gt=0, description="as hang_s, for a worker's first task of a shape: it may compile"
    )
    max_attempts: int = Field(
        3, ge=1, description="tries without progress after which a job ends as failed"
    )
    dead_letters: int = Field(
        1000, ge=1, description="failed jobs that `slackwater dead` can look back on"
    )
    result_ttl_s: float = Field(
        86_400, ge=MIN_TTL_S, le=MAX_TTL_S, description="how long sw:result:* stays"
    )
    output_ttl_s: float = Field(
        86_400, ge=MIN_TTL_S, le=MAX_TTL_S, description="how long sw:output:* stays"
    )
    job_ttl_s: float = Field(
        172_800,
        ge=MIN_TTL_S,
        le=MAX_TTL_S,
        validate_default=True,
        description="how long the record of an ended job stays: no shorter than its result and "
        "output, so that “expired” can be told from “unknown”",
    )
    timeline_entries: int = Field(
        20_000, ge=0, description="tasks that `slackwater timeline` can look back on; 0: none"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = Field(
        "INFO", description="DEBUG, INFO, WARNING, ERROR or CRITICAL"
    )
    log_format: Literal["human", "json"] = Field(
        "human", description="human: lines to read; json: an object a line, for a log store"
    )

    # what it tells of itself
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where a service tells Prometheus its figures: the first free port from this "
        "one on; 0: nowhere",
    )
    metrics_host: str = Field("127.0.0.1", description="address of that port")
    http_metrics: Literal["key", "open", "off"] = Field(
        "key",
        description="the gateway's own /metrics: key: as all its paths, open: without an API key, "
        "off: not there",
    )
    otel_endpoint: str = Field(
        "",
        description="where traces go by OTLP over HTTP, such as http://collector:4318; default: "
        "what OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere",
    )
    otel_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the jobs that are traced if their client says nothing",
    )

    @field_validator("redis_url")
    @classmethod
    def _can_be_read(cls, url: str) -> str:
        try:
            RedisUrl.parse(url)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("redis_url: ")) from None
        return url

    @field_validator("prefix", "host")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        """Names stand in keys, and in lists with spaces between."""
        if not name or any(c.isspace() for c in name):
            raise ValueError("must not be empty or have spaces in it")
        return name

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_any_case(cls, level: Any) -> Any:
        return level.upper() if isinstance(level, str) else level

    @field_validator("job_ttl_s")
    @classmethod
    def _stays_longest(cls, ttl_s: float, info: ValidationInfo) -> float:
        for name in ("result_ttl_s", "output_ttl_s"):
            other_s = info.data.get(name, 0.0)
            if ttl_s < other_s:
                raise ValueError(f"must be at least {name}, which is {other_s:g}")
        return ttl_s

    def http_address(self) -> tuple[str, int]:
        """Where the gateway is reached from its own machine."""
        everywhere = self.http_host in ("0.0.0.0", "::", "")
        return ("127.0.0.1" if everywhere else self.http_host), self.http_port

    def served_name(self) -> str:
        """The model name clients use."""
        if self.model_name:
            return self.model_name
        if self.noop:
            return "noop"
        return Path(self.model).name if Path(self.model).exists() else self.model


def ttls_of(settings: Settings) -> Ttls:
    return Ttls(
        result_s=settings.result_ttl_s,
        output_s=settings.output_ttl_s,
        job_s=settings.job_ttl_s,
        timeline_entries=settings.timeline_entries,
        dead_letters=settings.dead_letters,
    )


def from_command_line(prog: str, args: list[str] | None = None) -> Settings:
    """Settings from flags, then the environment, then the defaults; bad ones end the process."""
    flags: Any = args if args is not None else True
    try:
        made: Settings = Settings(_cli_parse_args=flags, _cli_prog_name=prog)  # type: ignore[call-arg]
    except ValidationError as error:
        for line in problems(error):
            print(f"{prog}: {line}", file=sys.stderr)
        raise SystemExit(2) from None
    return made


def problems(error: ValidationError) -> list[str]:
    """A line each, with the flag, what is wrong, and what it was where that is no secret."""
    lines = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        field = Settings.model_fields.get(name)
        given = f", not {problem['input']!r}" if field is None or field.repr else ""
        said = problem["msg"].removeprefix("Value error, ")
        lines.append(f"--{name.replace('_', '-')}: {said}{given}")
    return lines


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
