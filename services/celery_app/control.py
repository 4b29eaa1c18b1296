"""Answers to other programs' remote control, in the serializer that each of them speaks.

A worker of theirs that starts asks all workers of the broker who they are, and one that accepts
another serializer than it is answered in dies of that.
"""

from __future__ import annotations

from typing import Any

from celery.app.control import Control
from kombu.pidbox import Mailbox, Node

from services.celery_app.backend import JSON, serializer_of


class PoliteNode(Node):  # type: ignore[misc,unused-ignore]
    mailbox: Any
    _serializer = JSON

    def handle_message(self, body: Any, message: Any = None) -> Any:
        self._serializer = serializer_of(getattr(message, "content_type", None))
        return super().handle_message(body, message)  # type: ignore[no-untyped-call]

    def reply(self, data: Any, exchange: str, routing_key: str, ticket: str, **_: Any) -> None:
        self.mailbox._publish_reply(
            data, exchange, routing_key, ticket, channel=self.channel, serializer=self._serializer
        )


class PoliteMailbox(Mailbox):  # type: ignore[misc]
    node_cls = PoliteNode


class PoliteControl(Control):  # type: ignore[misc]
    Mailbox = PoliteMailbox
