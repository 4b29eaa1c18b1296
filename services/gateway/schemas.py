"""The shapes of requests and answers, for the OpenAPI page and its examples.

They describe and do not validate: what a parameter may be is the model's to say, and the
coordinator refuses what does not fit.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Format = Literal["png", "webp", "jpeg"]


class _Open(BaseModel):
    """Further fields are parameters of the model."""

    model_config = ConfigDict(extra="allow")


# -- requests ------------------------------------------------------------------------------


class JobRequest(_Open):
    """A job with any parameter of its model; docs/protocol.md has the table."""

    prompt: str = Field(description="what to make", min_length=1)
    id: str | None = Field(None, description="makes the push idempotent; default: a new one")
    model: str | None = Field(None, description="default: the only one, or the pool's")
    width: int | None = None
    height: int | None = None
    size: str | None = Field(None, description="WIDTHxHEIGHT instead of width and height")
    num_inference_steps: int | None = None
    n: int | None = Field(None, description="pictures of this job")
    seed: int | None = Field(None, description="default: random; the answer has it")
    output_format: str | None = Field(None, description="png, webp or jpeg")
    priority: int | None = Field(None, description="-100 to 100")
    slo_ms: float | None = Field(None, description="deadline: arrival + this")
    deadline_ms: float | None = Field(None, description="deadline: Unix time in ms")
    slo_scale: float | None = Field(None, description="deadline: this × the time it takes alone")
    on_late: str | None = Field(None, description="what becomes of it when it must be late")
    user: str | None = Field(None, description="carried along")
    callback_url: str | None = Field(None, description="told of its end by a signed webhook")
    upload_url: str | None = Field(None, description="where its files are copied to")


class ImageRequest(_Open):
    """OpenAI's parameters, and any of the model's beside them (`extra_body` in their clients)."""

    prompt: str = Field(description="what to make", min_length=1)
    model: str | None = None
    n: int | None = Field(None, description="how many pictures")
    size: str | None = Field(None, description="WIDTHxHEIGHT, or auto: the model's own")
    response_format: Literal["b64_json", "url"] | None = Field(None, description="b64_json")
    output_format: str | None = Field(None, description="png, webp or jpeg")
    output_compression: int | None = Field(None, description="quality of webp and jpeg")
    user: str | None = None


class ImageEditRequest(_Open):
    """A form: pictures and what to do with them."""

    image: str = Field(json_schema_extra={"format": "binary"})
    prompt: str
    model: str | None = None


class VideoRequest(_Open):
    """OpenAI's parameters, and any of the model's beside them; a form or JSON."""

    prompt: str = Field(description="what to make", min_length=1)
    model: str | None = Field(None, description="default: the only one that makes videos")
    seconds: str | None = Field(None, description="length; becomes num_frames at the model's fps")
    size: str | None = Field(None, description="WIDTHxHEIGHT")


# -- answers -------------------------------------------------------------------------------


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """What went wrong, as OpenAI's clients read it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "message": "width: 33 is not a multiple of 16; 32 and 48 are",
                    "type": "invalid_request_error",
                    "param": "width",
                    "code": "invalid_request",
                }
            }
        }
    )

    error: ErrorBody


class JobError(BaseModel):
    code: str
    message: str
    param: str | None


class Output(BaseModel):
    url: str
    mime: str
    width: int
    height: int
    bytes: int
    sha256: str


class Job(BaseModel):
    """A job as it stands. Times in _at are Unix seconds by Redis' clock."""

    id: str
    object: Literal["job"]
    status: str = Field(description="queued, running, succeeded, failed, canceled or expired")
    is_terminal: bool = Field(description="wait for this, not for a list of states")
    model: str | None
    prompt: str = Field(description="its first 200 characters")
    stage: str | None = Field(description="encode, denoise or decode: in it, or waiting for it")
    step: int = Field(description="denoising steps done")
    steps: int
    progress: float = Field(description="0 to 100")
    priority: int
    admission: str | None = Field(description="accepted, or best_effort: it will be late")
    queue_position: int | None = Field(description="0 is next; null while it runs")
    slack_s: float | None = Field(description="deadline - now - work left; negative: late")
    deadline_at: float | None
    eta_at: float | None = Field(description="when it should be done, if nothing arrives")
    as_of: float | None = Field(description="of when queue_position, slack_s and eta_at are")
    created_at: float | None
    started_at: float | None
    completed_at: float | None
    expires_at: int | None = Field(description="when its files go")
    attempts: int = Field(description="tasks of it that failed or whose worker died")
    worker: str | None
    params: dict[str, Any] = Field(description="every effective parameter, defaults filled in")
    error: JobError | None
    outputs: list[Output]
    seed: int | None
    timings: dict[str, float]
    on_time: bool | None
    notes: list[str]


class JobList(BaseModel):
    object: Literal["list"]
    data: list[Job]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Image(BaseModel):
    b64_json: str | None = None
    url: str | None = None


class ImagesResponse(BaseModel):
    created: int
    data: list[Image]
    output_format: str
    size: str
    slackwater: dict[str, Any] = Field(description="id, seed, params, timings, on_time, notes")


class Video(BaseModel):
    id: str
    object: Literal["video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    seconds: str
    error: JobError | None


class VideoList(BaseModel):
    object: Literal["list"]
    data: list[Video]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedVideo(BaseModel):
    id: str
    object: Literal["video.deleted"]
    deleted: bool


class Model(BaseModel):
    """`ready`: each of its stages has a worker now."""

    id: str
    object: Literal["model"]
    created: int = Field(description="0: a model directory has no date")
    owned_by: str
    task: str
    ready: bool
    parameters: dict[str, Any]
    limits: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: str
    checks: dict[str, str] = Field(default_factory=dict)
    pid: int
