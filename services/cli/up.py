"""Start a pool on this machine: a Redis of its own unless --redis names one, a coordinator and
workers. It watches them, and stops them on Ctrl-C.

Every setting is a flag too (docs/settings.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

from common.redis_url import shown
from common.settings import Settings
from services.cli.terminal import Exit, fail, print_json, settings_of
from services.pool.local import START_S, STOP_S, LocalPool, PoolError
from services.pool.redis_server import DEFAULT_PORT, RedisNotFound
from services.pool.state_dir import StateDirTaken, default_state_dir

MODEL_MISSING = "it is a path that is not there, and hub ids look like owner/name"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--encoders", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--denoisers", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--decoders", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--redis", "--redis-url", dest="redis_url", default=argparse.SUPPRESS, metavar="URL",
        help="use this Redis (SLACKWATER_REDIS_URL); default: start one, on 127.0.0.1",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, metavar="PORT",
        help=f"port of the pool's own Redis (default: {DEFAULT_PORT} if it is free, else any)",
    )  # fmt: skip
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR",
        help="Redis' data and the logs (SLACKWATER_STATE_DIR; default ~/.local/state/slackwater)",
    )  # fmt: skip
    parser.add_argument(
        "--start-s", type=float, default=START_S, metavar="S",
        help=f"patience until all are ready (default {START_S:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--stop-s", type=float, default=STOP_S, metavar="S",
        help=f"patience with running chunks at the end (default {STOP_S:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--http", type=int, metavar="PORT",
        help="also serve HTTP, OpenAI's API and ours, on this port of http_host (docs/http.md)",
    )  # fmt: skip
    parser.add_argument(
        "--celery", action="store_true",
        help="also take jobs from Celery's programs, send webhooks and upload (docs/celery.md)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="say where it is as JSON, one line")
    group = parser.add_argument_group("settings")
    for name, field in Settings.model_fields.items():
        if name == "redis_url":
            continue
        group.add_argument(
            "--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS,
            metavar="VALUE", help=(field.description or "").replace("%", "%%"),
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.http is not None:
        args.http_port = args.http
    settings = settings_of(args)
    wrong = check(args, settings)
    if wrong:
        fail(wrong)
        return Exit.USAGE
    external = "redis_url" in vars(args) or "SLACKWATER_REDIS_URL" in os.environ
    pool = LocalPool(
        args.encoders,
        args.denoisers,
        args.decoders,
        settings=settings,
        redis_url=settings.redis_url if external else None,
        state_dir=args.state_dir or default_state_dir(),
        port=args.port or DEFAULT_PORT,
        http=args.http is not None,
        celery=args.celery,
        start_s=args.start_s,
        stop_s=args.stop_s,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return serve(pool, args.json)


def check(args: argparse.Namespace, settings: Settings) -> str:
    """What is wrong with the numbers or the model; "" if nothing is."""
    for name in ("encoders", "denoisers", "decoders"):
        if not 0 <= getattr(args, name) <= 256:
            return f"--{name}: {getattr(args, name)}; 0 to 256 are possible"
    if args.http is not None and importlib.util.find_spec("fastapi") is None:
        return "--http: wants more packages: pip install 'slackwater[gateway]'"
    if args.celery and importlib.util.find_spec("celery") is None:
        return "--celery: wants more packages: pip install 'slackwater[celery]'"
    looks_like_path = settings.model.startswith((".", "/", "~")) or settings.model.count("/") != 1
    if not settings.noop and looks_like_path and not Path(settings.model).is_dir():
        return f"--model: {settings.model}: {MODEL_MISSING}"
    return ""


def serve(pool: LocalPool, as_json: bool) -> int:
    """Start, show, watch, stop. SIGINT, SIGTERM and SIGHUP all end it in order."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    code: int = Exit.OK
    try:
        if not as_json:
            what = "no-op stages" if pool.settings.noop else pool.settings.served_name()
            print(f"starting {what} …", flush=True)
        pool.start()
        _show(pool, as_json)
        pool.wait_for_end()
    except KeyboardInterrupt:
        pass
    except (PoolError, RedisNotFound, StateDirTaken) as error:
        fail(str(error))
        code = Exit.FAILED
    finally:
        # Twice Ctrl-C: no patience with running chunks, which loses nothing.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: pool.kill_workers())
        if not as_json and code == Exit.OK:
            print("stopping: running chunks end first (again to cut them short) …", flush=True)
        pool.stop()
    if not as_json and code == Exit.OK:
        print("stopped")
    return code


def _show(pool: LocalPool, as_json: bool) -> None:
    processes = pool.processes()
    if as_json:
        print_json(
            {
                "redis_url": shown(pool.redis_url),
                "prefix": pool.settings.prefix,
                "model": pool.settings.served_name(),
                "pid": os.getpid(),
                "http_url": pool.http_url,
                "log_dir": str(pool.log_dir),
                "processes": [{"name": p.name, "role": p.role, "pid": p.pid} for p in processes],
            }
        )
        return
    width = max(len(p.name) for p in processes)
    for p in processes:
        print(f"  {p.name:<{width}}  pid {p.pid:<8} {p.log}")
    default = pool.redis_url == f"redis://127.0.0.1:{DEFAULT_PORT}/0"
    where = "" if default else f"  (the commands below find it by {pool.state_dir}/pool.json)"
    http = f"\n  HTTP   {pool.http_url}/docs" if pool.http_url else ""
    print(
        f"\n  model  {pool.settings.served_name()}\n  Redis  {shown(pool.redis_url)}{where}{http}\n"
    )
    print('  slackwater submit "a red circle on a blue background" --wait --save out')
    print("  slackwater ps        slackwater scale denoise 2        Ctrl-C stops it", flush=True)
