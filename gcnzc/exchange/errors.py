"""Errors of exchanges between ranks."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from gcnzc.exchange.heartbeat import Cause, HeartbeatMonitor

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


class Failure(NamedTuple):
    """Why an exchange failed, with torch's error."""

    cause: Cause
    """see `Cause`"""
    source: str
    """the first line of the error, after "torch.distributed reports: " if torch raised it"""

    @property
    def text(self) -> str:
        """The description for this rank's error."""
        # another rank may have ended with the same error
        source = f" ({self.source})"
        return self.cause.text if self.cause.text.endswith(source) else self.cause.text + source

    @property
    def is_follow_up(self) -> bool:
        """Whether the ranks that failed are known, or the store failed and its host is known."""
        return self.cause.is_found

    @property
    def reason(self) -> str:
        """The description for the errors of other ranks: the first cause."""
        return self.cause.text if self.is_follow_up else self.text


def explain(monitor: HeartbeatMonitor, error: BaseException | None) -> Failure:
    """Describe the failed ranks, with the first line of torch's error.

    The other lines of torch's error may be C++ stack frames. A `TimeoutError` is raised by gcnzc,
    so it is not attributed to torch.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    source = "" if isinstance(error, TimeoutError) else "torch.distributed reports: "
    return Failure(monitor.describe_failure(), f"{source}{lines[0]}")


def describe_end(error: BaseException) -> str:
    """Describe why a rank leaves its group with an error, for the messages of other ranks."""
    if isinstance(error, SystemExit) and not error.code:
        return LEFT
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def worker_lost(
    who: str, waited_s: float, step: int | None, what: str, failure: Failure, hint: str
) -> WorkerLost:
    """Return the error of a wait that failed.

    Args:
        who: the rank that waited.
        waited_s: for how many seconds.
        step: in which step; None if it is not known.
        what: the request that it waited for.
        failure: why it failed.
        hint: the remedy.
    """
    in_step = "" if step is None else f" in step {step}"
    text = f"{who} waited {waited_s:.0f} s{in_step} for {what}: {failure.text}\n\nhint: {hint}"
    error = WorkerLost(text)
    error.reason, error.is_follow_up = failure.reason, failure.is_follow_up
    error.reason_ranks = failure.cause.ranks
    return error


def reject(rank: int, world_size: int, what: str, *, is_closed: bool) -> NoReturn:
    """Raise the error of a request to a group that is closed, or was never connected.

    Args:
        rank: the rank that makes the request.
        world_size: the number of ranks.
        what: the request.
        is_closed: whether the group was connected before.
    """
    if is_closed:
        raise RuntimeError(
            f"rank {rank} requests {what} of a group that is closed\n\n"
            "hint: call finalize() and everything else that communicates before close(), the end "
            "of `with init_group()`, and destroy_process_group()"
        )
    raise RuntimeError(
        f"rank {rank} of {world_size} is not connected, so it cannot execute {what}\n\n"
        "hint: initialize torch.distributed before an optimizer is unpickled, or load its "
        "state_dict() into a new one"
    )
