"""Errors of exchanges between ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real

from gcnzc.exchange.requests import require

# default remedy in the message of `WorkerLost`
REMEDY = "start all workers again, and load the state_dict() and the model that were saved last"

# the reason of the end of a rank without an error
LEFT = "it has left the group"


class WorkerLost(RuntimeError):
    """An exchange failed, because a rank or the network failed, or a rank is far behind.

    `run` raises it in the algorithm, at the `yield` of the request. An algorithm may catch it and
    continue with other ranks if the peer has ended. After the time limit of a message without a
    channel, or of a collective, the connections to all ranks are closed.
    """

    reason = ""
    """why, for the messages of other ranks"""
    is_follow_up = False
    """whether other ranks, or the host of the store, are the reason"""
    reason_ranks: Sequence[int] = ()
    """the ranks of the default group that the reason names"""


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


# gloo counts milliseconds
MIN_LIMIT_S = 1e-3
# 30 years; larger limits overflow the clocks of torch and Python
MAX_LIMIT_S = 1e9


def check_time_limit(seconds: object) -> float:
    """Return the `timeout_s` of a group as a float; numpy's numbers are accepted, bool is not.

    Raises:
        ValueError: it is not a number from `MIN_LIMIT_S` to `MAX_LIMIT_S`.
    """
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    require(
        is_number and MIN_LIMIT_S <= seconds <= MAX_LIMIT_S,  # type: ignore[operator]
        f"timeout_s={seconds!r} of a group is invalid",
        f"give seconds from {MIN_LIMIT_S:g} to {MAX_LIMIT_S:g}, such as 60",
    )
    # timedelta rejects numpy's integers and float32
    return float(seconds)  # type: ignore[arg-type]
