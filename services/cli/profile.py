"""Measure what a model's stages take on this machine, and fit a cost table.

Loads the model into this process; best on a machine that does nothing else. Prints every row with
the error of the fit, writes the table to a file, and stores it in the pool if there is one.
docs/costs.md says what is measured and what the table is for.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.redis_url import shown
from services.cli import terminal
from services.cli.terminal import Exit, fail, print_json

if TYPE_CHECKING:
    from common.client import Client
    from common.settings import Settings
    from services.costs.table import Profile

# Settings that say which stages are measured (docs/settings.md).
SETTINGS = ("model", "model_name", "device", "dtype", "threads", "attention", "noop", "arena_bytes")
REPEATS, QUICK_REPEATS, QUICK_SIZES = 5, 2, 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the table (default: profile-MODEL.json)"
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=(), metavar="WxH,…",
        help="sizes to fit on (default: six from the largest down to an eighth of it)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, metavar="N",
        help=f"the least of so many counts (default {REPEATS})",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help=f"{QUICK_SIZES} sizes, the least of {QUICK_REPEATS}: to see what comes out",
    )  # fmt: skip
    group = parser.add_argument_group("settings (docs/settings.md)")
    for name in SETTINGS:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, metavar="VALUE")
    terminal.add_json(parser)
    terminal.add_connection(parser)


def run(args: argparse.Namespace) -> int:
    from common.asks import Ask

    repeats = (QUICK_REPEATS if args.quick else REPEATS) if args.repeats is None else args.repeats
    if repeats < 1:
        fail(f"--repeats: {repeats}; at least 1")
        return Exit.USAGE
    if args.out and not args.out.parent.is_dir():
        fail(f"--out: there is no directory {args.out.parent}")
        return Exit.USAGE
    pool = _pool_of(args)
    settings = terminal.settings_of(args)
    profile = _measure(args, settings, repeats)
    out = args.out or Path(f"profile-{profile.model.replace('/', '-')}.json")  # a hub id has one
    out.write_text(profile.to_text(), "utf-8")
    stored = None
    if pool is not None:
        with pool:
            pool.ask(Ask((("HSET", pool.keys.profile, profile.model, profile.to_text()),)))
            stored = shown(pool.url)
    if args.json:
        print_json({"file": str(out), "stored": stored, **profile.to_json()})
    else:
        print("\n".join(report(profile)))
        print(f"\nwritten to {out}" + (f", stored in the pool at {stored}" if stored else ""))
    return Exit.OK


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)", word.strip())
        if not found:
            raise argparse.ArgumentTypeError(f"{word!r} is not WIDTHxHEIGHT, such as 512x768")
        sizes.append((int(found[1]), int(found[2])))
    return sizes


def _pool_of(args: argparse.Namespace) -> Client | None:
    """A client of the pool that is asked for or runs here, once it answers; None if none is."""
    from common.asks import Ask
    from services.pool.state_dir import running

    if not (args.redis or os.environ.get("SLACKWATER_REDIS_URL") or running()):
        return None
    client = terminal.client_of(args)
    client.ask(Ask((("PING",),)))  # before minutes of measuring, not after
    return client


def _measure(args: argparse.Namespace, settings: Settings, repeats: int) -> Profile:
    """The profile; what a flag got wrong ends the command with the flag's name."""
    from common.checks import InvalidRequest
    from common.models.errors import RefusedModel
    from common.noop import NoopCosts
    from common.settings import single_threaded
    from services.costs.bench import StageFailed
    from services.costs.fit import TooFewSizes
    from services.costs.measure import SIZES
    from services.costs.profile import make_profile

    single_threaded()
    try:
        NoopCosts.parse(settings.noop)
    except ValueError as error:
        fail(f"--noop: {error}")
        raise SystemExit(Exit.USAGE) from error
    try:
        return make_profile(
            settings,
            args.sizes,
            repeats,
            QUICK_SIZES if args.quick else SIZES,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except RefusedModel as error:
        fail(f"--model: {error}")
    except (InvalidRequest, TooFewSizes, StageFailed) as error:
        fail(f"--sizes: {error}")
    raise SystemExit(Exit.USAGE)


def report(profile: Profile) -> Iterator[str]:
    """What was measured and fitted, in lines."""
    where = f"{profile.device} ({profile.device_name})" if profile.device_name else profile.device
    threads = f", {profile.threads} thread{'s'[: profile.threads != 1]}"
    yield f"{profile.model} on {where}, {profile.dtype}{threads}; the least of {profile.repeats}"
    yield ""
    yield "stage         size  tokens  n  forwards    measured      fitted    error"
    for row in profile.rows:
        size = f"{row['width']}x{row['height']}" if row["width"] else "prompt"
        error = row["fitted_s"] / row["seconds"] - 1
        yield (
            f"{row['stage']:<8} {size:>9} {row['tokens']:>7} {row['n']:>2} {row['forwards']:>9}"
            f" {_ms(row['seconds'])} {_ms(row['fitted_s'])} {100 * error:>+6.1f} %"
            + ("  held out" if row["held_out"] else "")
        )
    yield ""
    for stage, fit in profile.fits.items():
        line = f"{stage:<8} R² {fit.r2:.4f}; nine of ten rows within {100 * fit.error:.1f} %"
        if stage in profile.held_out_error:
            line += f"; median error held out {100 * profile.held_out_error[stage]:.1f} %"
        yield line
        for n, (forward_s, token_s, token2_s) in fit.pictures.items():
            yield (
                f"         n = {n}: {1000 * fit.fixed_s:.4g} + forwards · ({1000 * forward_s:.4g}"
                f" + {1000 * token_s:.4g}·t + {1000 * token2_s:.4g}·t²) ms"
            )
    steps = profile.steps
    yield ""
    yield (
        f"step time against steps ({steps['tokens']} tokens, {steps['steps'][0]} to "
        f"{steps['steps'][-1]} steps): R² {steps['r2']:.4f}, {1000 * steps['step_s']:.2f} ms a step"
    )
    if profile.batch:
        yield ""
        yield "jobs in one forward, a step in ms (× one alone)"
    for curve in profile.batch:
        alone = curve["step_s"][0]
        cells = (
            f"{rows}: {1000 * s:.2f} ({s / alone:.2f})"
            for rows, s in zip(curve["rows"], curve["step_s"], strict=True)
        )
        yield f"{curve['tokens']:>7} tokens   " + "   ".join(cells)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:>8.2f} ms"
