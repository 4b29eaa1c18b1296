"""The Celery application: where its broker is, what it shares with other programs and what not."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from celery import Celery

from common.redis_url import RedisUrl
from common.settings import Settings
from services.celery_app.backend import JobBackend
from services.celery_app.control import PoliteControl

# A message that a killed process had taken is given to another one after so long. Short, since
# every task here is short or may run twice.
VISIBILITY_S = 60
# A Redis that does not answer for so long is away.
SOCKET_S = 10.0


def make_app(settings: Settings) -> Celery:
    """Configured and without tasks. Raises ValueError for a Redis that Celery cannot reach so."""
    url = broker_url(settings)
    backend = f"{JobBackend.__module__}:{JobBackend.__name__}+{url}"
    app = Celery("slackwater", broker=url, backend=backend, control=PoliteControl)
    # Other programs' workers keep what they have taken under the default names, and each restores
    # what is older than *its* visibility timeout, whosever it is. Ours would restore theirs.
    own = settings.celery_queue + "."
    prefix = {"global_keyprefix": settings.celery_key_prefix} if settings.celery_key_prefix else {}
    app.conf.update(
        broker_transport_options={
            "visibility_timeout": VISIBILITY_S,
            "unacked_key": own + "unacked",
            "unacked_index_key": own + "unacked_index",
            "unacked_mutex_key": own + "unacked_mutex",
            "socket_timeout": SOCKET_S,
            "socket_connect_timeout": SOCKET_S,
            "socket_keepalive": True,
            **prefix,
        },
        result_backend_transport_options=prefix,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # Redis comes back some day
        redis_socket_timeout=SOCKET_S,
        redis_socket_connect_timeout=SOCKET_S,
        accept_content=["json", "msgpack"],
        result_accept_content=["json", "msgpack"],
        result_expires=max(1, round(settings.result_ttl_s)),  # 0 would be for ever
        # What follows a job in a chain goes where its signature says, else where Celery's does.
        task_routes={"slackwater.*": {"queue": settings.celery_queue}},
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        task_send_sent_event=False,
    )
    return app


def broker_url(settings: Settings) -> str:
    """The pool's Redis, unless another one is given, in the form that Celery reads. Raises
    ValueError for one that it cannot follow."""
    given = settings.celery_url or settings.redis_url
    meant = RedisUrl.parse(given)
    if meant.sentinels or urlsplit(given).scheme not in ("redis", "rediss"):
        raise ValueError(
            "celery_url (default: redis_url): must be a redis:// or rediss:// URL, at which "
            "Celery's programs are too"
        )
    parts = urlsplit(meant.url)
    host = parts.netloc
    if meant.credentials is not None:
        words: Any = meant.credentials.get_credentials()
        user, password = ("", *words)[-2:]
        host = f"{quote(user)}:{quote(password)}@{host}"
    query = parts.query
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in query:
        query += ("&" if query else "") + urlencode({"ssl_cert_reqs": "required"})
    return urlunsplit((parts.scheme, host, parts.path, query, ""))
