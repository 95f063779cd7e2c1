"""Errors of exchanges between ranks, and their causes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

# default remedy in the message of `WorkerLost`
REMEDY = "start all workers again, and load the state_dict() and the model that were saved last"

# the reason of the end of a rank without an error
LEFT = "it has left the group"


class Cause(NamedTuple):
    """Why an exchange failed, or why a rank has ended."""

    text: str = ""  # for messages; empty while a rank is running, or if it reported no reason
    is_follow_up: bool = False  # the failure of other ranks, or of the store's host, is the cause
    ranks: Sequence[int] = ()  # the ranks of the default group that the text names


class WorkerLost(RuntimeError):
    """An exchange failed, because a rank or the network failed, or a rank is far behind.

    `run` raises it in the algorithm, at the `yield` of the request. An algorithm may catch it and
    continue with other ranks if the peer has ended. After the time limit of a message without a
    channel, or of a collective, the connections to all ranks are closed.
    """

    cause = Cause()
    """why, for the messages of other ranks"""


class ConnectionBroken(Exception):
    """A request failed.

    The cause is torch's error, or a `TimeoutError` that names the request it waits for.
    """

    hint = ""
    """the remedy; if empty, the group's remedy is shown"""


class BlockedByReceive(ConnectionBroken):
    """A request waits for an earlier receive on its channel, which gets no message."""

    hint = (
        "a channel executes its requests in order, even after an abandoned receive. Send the "
        "message, or use another channel for later requests"
    )


@contextmanager
def network() -> Iterator[None]:
    """Raise `ConnectionBroken` in place of the errors of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken from error


def describe_end(error: BaseException) -> str:
    """Describe why a rank leaves its group with an error, for the messages of other ranks."""
    if isinstance(error, SystemExit) and not error.code:
        return LEFT
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
