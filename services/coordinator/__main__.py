"""`python -m services.coordinator`: one coordinator; any number may stand by."""

from __future__ import annotations

import signal
import threading

from common.connect import blocking
from common.logs import set_up
from common.settings import from_command_line
from services.coordinator.build import build


def main() -> None:
    settings = from_command_line("python -m services.coordinator")
    set_up(settings.log_level)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # The one connection blocks in XREAD and runs the scripts in between.
    build(settings, blocking(settings.redis_url)).run(stopping.is_set)


if __name__ == "__main__":
    main()
