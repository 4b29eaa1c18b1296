"""What can go wrong with a model or a row, each with a code that reaches the result key."""

from __future__ import annotations


class RefusedModel(Exception):
    """The worker must not start with this model; the message names the file or component."""


class RowFailed(Exception):
    """One job's row failed and its batch neighbours did not.

    `code` goes into the result's `error.code`, the message into `error.message`.
    """

    code = "stage_error"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class BadInput(RowFailed):
    """The job asked for something that this model, or its device, cannot do; the message names
    the remedy."""

    code = "invalid_request"


class NonFinite(RowFailed):
    """Latents or pixels became NaN or infinite."""

    code = "non_finite"


class StateLost(RowFailed):
    """A handle that the row needs is gone, damaged or of another format version."""

    code = "state_lost"


class NotCapturable(RowFailed):
    """Something in the job's state is of a type that a checkpoint does not carry."""

    code = "not_capturable"
