"""The official OpenAI client on a Slackwater pool: pictures, a video job, errors.

    slackwater up --http 8000
    python examples/http_openai.py http://127.0.0.1:8000

The video part runs if the pool serves a model of videos.
"""

from __future__ import annotations

import base64
import sys

import openai
from openai import OpenAI


def main(url: str, key: str = "no key is set") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    for model in client.models.list():
        if getattr(model, "task", "") == "text-to-image":
            pictures(client, model.id)
            errors(client, model.id)
        else:
            video(client, model.id)


def pictures(client: OpenAI, model: str) -> None:
    one = client.images.generate(
        model=model,
        prompt="a large red circle on a blue background",
        size="128x128",
        extra_body={"num_inference_steps": 20, "seed": 7, "slo_ms": 60_000},
    )
    assert one.data
    content = base64.b64decode(one.data[0].b64_json or "")
    print(f"b64_json: {one.size} {one.output_format}, begins with {content[:4]!r}")

    four = client.images.generate(
        model=model,
        prompt="a green triangle on a white background",
        n=4,
        size="64x64",
        response_format="url",
        extra_body={"num_inference_steps": 8, "seed": 1},
    )
    for image in four.data or ():
        print(f"url: {image.url}")


def errors(client: OpenAI, model: str) -> None:
    try:
        client.images.generate(model=model, prompt="a red circle", size="33x32")
    except openai.BadRequestError as error:
        print(f"BadRequestError: param {error.param!r}, code {error.code!r}\n  {error.message}")
    try:
        client.videos.retrieve("nobody")
    except openai.NotFoundError as error:
        print(f"NotFoundError: code {error.code!r}\n  {error.message}")


def video(client: OpenAI, model: str) -> None:
    job = client.videos.create(
        model=model,
        prompt="a red circle",
        size="64x64",  # type: ignore[arg-type]  # their types know their own sizes only
        seconds="2",  # type: ignore[arg-type]
    )
    print(f"video {job.id}: begun, {job.size}")
    job = client.videos.poll(job.id, poll_interval_ms=50)
    content = client.videos.download_content(job.id)
    size = len(content.read())
    print(f"video {job.id}: {job.status}, {job.seconds} s, {size} bytes")
    print(f"deleted: {client.videos.delete(job.id).deleted}")


if __name__ == "__main__":
    main(*sys.argv[1:])
