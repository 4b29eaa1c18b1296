"""`python -m services.coordinator`: one coordinator; any number may stand by."""

from __future__ import annotations

import signal
import threading

from common.connect import blocking
from common.handed import say_ready
from common.logs import set_up
from common.settings import from_command_line
from common.tracing import NoTracing
from services.coordinator.build import build, observe


def main() -> None:
    settings = from_command_line("python -m services.coordinator")
    set_up(settings.log_level, settings.log_format)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # The one connection blocks in XREAD and runs the scripts in between.
    coordinator = build(settings, blocking(settings.redis_url))
    try:
        stop_observing = observe(coordinator, settings)
    except NoTracing as why:
        raise SystemExit(str(why)) from None
    coordinator.run(stopping.is_set, say_ready)
    stop_observing()


if __name__ == "__main__":
    main()
