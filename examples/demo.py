"""`make demo`: a pool of two denoisers on this machine, long jobs first, short ones overtake them.

Starts everything (a Redis too), submits three long jobs and then ten short ones, shows them live,
prints who ended when, and leaves the pictures and a contact sheet in out/. Exits with 1 if any
job failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import Settings
from services.cli.terminal import seconds
from services.cli.watch import follow
from services.pool.local import LocalPool, PoolError
from services.pool.redis_server import RedisNotFound
from slackwater import Client, JobHandle, JobRecord, Result, SlackwaterError

TIMEOUT_S = 300.0
ARRIVAL_S = 0.3
# A blank negative prompt is what the model learned as “no prompt”.
CFG: dict[str, Any] = {"true_cfg_scale": 3.0, "negative_prompt": " "}
# Not exact: such jobs of one size may share forward passes.
SHARES: dict[str, Any] = {"exact": False}

# name, prompt, width, height, steps, and the rest. The names become ids.
LONG: list[tuple[str, str, int, int, int, dict[str, Any]]] = [
    ("long-1", "a large blue square on the left on a yellow background", 256, 256, 120,
     {"n": 2, **CFG}),
    ("long-2", "a large red circle above a small white square on a black background", 256, 256, 100,
     CFG),
    ("long-3", "a large green ring on a pink background", 256, 256, 90, CFG),
]  # fmt: skip
SHORT: list[tuple[str, str, int, int, int, dict[str, Any]]] = [
    ("short-1", "a large red circle on a blue background", 128, 128, 20, {**CFG, **SHARES}),
    ("short-2", "a large yellow square on a purple background", 64, 64, 12, SHARES),
    ("short-3", "a large orange square on a white background", 128, 128, 24, {**CFG, **SHARES}),
    ("short-4", "a green triangle to the left of a red diamond on a white background", 192, 128, 20,
     CFG),
    ("short-5", "a large pink heart on a black background", 128, 128, 20, {**CFG, **SHARES}),
    ("short-6", "a blue ring above an orange square on a yellow background", 128, 192, 20, CFG),
    ("short-7", "a large purple diamond on a green background", 128, 128, 16,
     {"n": 2, **CFG, **SHARES}),
    ("short-8", "a white circle on the right on a blue background", 160, 96, 16, CFG),
    ("short-9", "a large black circle on an orange background", 64, 64, 10, {**CFG, **SHARES}),
    ("short-10", "a large yellow ring on the right on a red background", 128, 128, 14, SHARES),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """One job's end, for the table and the contact sheet."""

    handle: JobHandle
    record: JobRecord
    result: Result
    pictures: tuple[Path, ...]

    @property
    def slack_s(self) -> float | None:
        """What was left until the deadline when it ended."""
        if self.record.finished_s is None or self.record.deadline_s is None:
            return None
        return self.record.deadline_s - self.record.finished_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the pictures go")
    parser.add_argument("--denoisers", type=int, default=2)
    parser.add_argument("--noop", default="", help="no-op stages instead of the bundled model")
    args = parser.parse_args()
    overrides: dict[str, Any] = {"noop": args.noop}
    settings = Settings(**overrides)
    print(f"starting Redis, a coordinator, an encoder, {args.denoisers} denoisers, two decoders …")
    began = time.monotonic()
    try:
        with LocalPool(denoisers=args.denoisers, decoders=2, settings=settings, say=print) as pool:
            print(f"ready after {time.monotonic() - began:.1f} s; Redis at {pool.redis_url}")
            with pool.client() as client:
                ended = demonstrate(client, args.out)
    except (PoolError, RedisNotFound, SlackwaterError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    show(ended)
    sheet = args.out / "contact-sheet.png"
    if any(job.pictures for job in ended):
        contact_sheet(ended, sheet)
        print(f"\npictures in {args.out}/, all of them on {sheet}")
    failed = [job for job in ended if job.result.status != "succeeded"]
    for job in failed:
        print(f"demo: {job.result.id} {job.result.status}: {job.result.error}", file=sys.stderr)
    return 1 if failed else 0


def demonstrate(client: Client, out: Path) -> list[Ended]:
    """Push the long jobs, then the short ones; everything that ended, in that order."""
    known = set(next(iter(client.models().values()))["parameters"]) | {"n", "id"}
    warm_up(client, known)
    handles = client.submit_many(_params(job, known) for job in LONG)
    while not any(record.step or record.is_terminal for record in map(JobHandle.status, handles)):
        time.sleep(0.02)  # until one of the long ones, whichever is due first, is under way
    for job in SHORT:
        handles += client.submit_many([_params(job, known)])
        time.sleep(ARRIVAL_S)
    print(f"{len(SHORT)} short jobs came {ARRIVAL_S} s apart, behind {len(LONG)} long ones\n")
    results = follow(client, handles, TIMEOUT_S, as_json=False)
    ended = []
    for handle, result in zip(handles, results, strict=True):
        good = result.status == "succeeded" and result.outputs[0].mime.startswith("image/")
        pictures = tuple(handle.save(out)) if good else ()
        ended.append(Ended(handle, handle.status(), result, pictures))
    return sorted(ended, key=lambda job: job.record.finished_s or 0.0)


def warm_up(client: Client, known: set[str]) -> None:
    """One small job of each size: deadlines are worth something once step times are known."""
    jobs = [
        _params((f"warm-up-{side}", "a red circle on a blue background", side, side, 3, {}), known)
        for side in (64, 128, 256)
    ]
    for handle in client.submit_many(jobs):
        handle.wait(TIMEOUT_S).raise_for_status()


def _params(job: tuple[str, str, int, int, int, dict[str, Any]], known: set[str]) -> dict[str, Any]:
    """A job's parameters; those that the model (the no-op one) does not have are left out."""
    name, prompt, width, height, steps, more = job
    every = {"id": name, "prompt": prompt, "width": width, "height": height,
             "num_inference_steps": steps, "seed": zlib.crc32(name.encode()), **more}  # fmt: skip
    return {k: v for k, v in every.items() if k in known or k in ("seed", "exact")}


def show(ended: list[Ended]) -> None:
    """The table, in the order in which the jobs ended."""
    from rich.console import Console
    from rich.table import Table

    print("\nin the order in which they ended (long-1, -2, -3 were pushed first)\n")
    table = Table(box=None, pad_edge=False, header_style="bold")  # fits 80 columns
    table.add_column("job", no_wrap=True)
    table.add_column("prompt", overflow="fold", min_width=16)
    for name in ("picture", "steps", "rows", "wait", "run", "slack", "on time"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in ended:
        params, timings = job.result.params, job.result.timings
        size = f"{params.get('width')}x{params.get('height')}"
        many = f"{params['n']} × " if params.get("n", 1) > 1 else ""
        guided = " CFG" if params.get("negative_prompt") else ""
        table.add_row(
            job.handle.id,
            str(params.get("prompt", "")),
            many + size + guided,
            str(params.get("num_inference_steps", "")),
            f"{timings['rows_per_step']:.1f}" if "rows_per_step" in timings else "",
            seconds(timings.get("wait_s")),
            seconds(timings.get("run_s")),
            seconds(job.slack_s),
            {True: "yes", False: "late", None: ""}[job.result.on_time],
        )
    # A file or a pipe has no width of its own; 80 columns would fold every cell.
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    on_time = sum(job.result.on_time is True for job in ended)
    print(f"\n{on_time} of {len(ended)} on time; {rows_per_step(ended):.2f} rows a step on average")


def rows_per_step(ended: list[Ended]) -> float:
    """Rows (pictures and CFG branches) of a forward pass, averaged over all steps of all jobs."""
    counted: list[tuple[int, float]] = [
        (job.result.params.get("num_inference_steps", 1), job.result.timings["rows_per_step"])
        for job in ended
        if "rows_per_step" in job.result.timings
    ]
    return sum(steps * rows for steps, rows in counted) / max(1, sum(s for s, _ in counted))


def contact_sheet(ended: list[Ended], path: Path, cell: int = 208, columns: int = 5) -> None:
    """Every picture with its job, prompt, size and steps, in the order in which they ended."""
    from PIL import Image, ImageDraw, ImageFont

    tiles = [(job, n, file) for job in ended for n, file in enumerate(job.pictures)]
    text_height, gap = 62, 12
    rows = -(-len(tiles) // columns)
    width, height = columns * (cell + gap) + gap, rows * (cell + text_height + gap) + gap
    sheet = Image.new("RGB", (width, height), (245, 245, 242))
    draw = ImageDraw.Draw(sheet)
    bold, plain = ImageFont.load_default(13), ImageFont.load_default(11)
    for at, (job, n, file) in enumerate(tiles):
        x = gap + at % columns * (cell + gap)
        y = gap + at // columns * (cell + text_height + gap)
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
        scale = cell / max(picture.size)
        size = (round(picture.width * scale), round(picture.height * scale))
        sheet.paste(picture.resize(size, Image.Resampling.LANCZOS),
                    (x + (cell - size[0]) // 2, y + (cell - size[1]) // 2))  # fmt: skip
        params = job.result.params
        name = job.handle.id + (f" #{n}" if len(job.pictures) > 1 else "")
        facts = f"{params['width']}x{params['height']}, {params['num_inference_steps']} steps"
        if params.get("negative_prompt"):
            facts += ", CFG"
        draw.text((x, y + cell + 3), name, (20, 20, 20), bold)
        draw.text((x, y + cell + 18), facts, (90, 90, 90), plain)
        for line, text in enumerate(_wrapped(str(params["prompt"]), 38)[:2]):
            draw.text((x, y + cell + 32 + 13 * line), text, (20, 20, 20), plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)


if __name__ == "__main__":
    sys.exit(main())
