"""The handles of started requests over processes, and waits for them."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gcnzc.exchange.agreement import Need
from gcnzc.exchange.errors import BlockedByReceive, ConnectionBroken
from gcnzc.exchange.requests import Abandon, First, check_on_channels

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import Channel

# time limit of a wait that has none: gloo's waits have one
UNLIMITED_S = 3e7


@contextmanager
def network() -> Iterator[None]:
    """Raise `ConnectionBroken` in place of the errors of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken from error


class PendingMessage:
    """A message that has started."""

    def __init__(
        self,
        work: Any,
        finish: Callable[[], Any],
        keep: Any,
        need: Need | None,
        limit_s: float | None,
    ) -> None:
        # `keep` is memory that must not be freed until the message is sent or received
        self.work, self.finish, self.keep, self.need = work, finish, keep, need
        self.limit_s = limit_s
        self.is_ended, self.answer = False, None

    def find_need(self) -> Need | None:
        """Return the request of the peer that the message waits for."""
        return self.need

    def result(self) -> Any:
        """Wait until the message is sent or received, and return the answer."""
        if not self.is_ended:
            # gloo would wait for another message
            self._wait()
            self.answer = self.finish()
            self.is_ended, self.keep = True, None
        return self.answer

    def _wait(self) -> None:
        _wait(self.work, self.limit_s)


class PendingAny(PendingMessage):
    """A receive from any rank that has started.

    gloo ends a wait for a message of any rank only by a message, and a time limit would close the
    connections to all ranks. So a daemon thread waits, and the caller waits for the thread.

    Args:
        work: the work of torch.distributed.
        finish: returns the answer for the rank that has sent the message.
        keep: memory that must not be freed until the message is received.
        find_need: returns the requests of which one ends the wait.
        limit_s: time limit of a wait in seconds.
    """

    def __init__(
        self,
        work: Any,
        finish: Callable[[int], Any],
        keep: Any,
        find_need: Callable[[], Need],
        limit_s: float,
    ) -> None:
        self.source: Future[int] = Future()
        self._find_need = find_need
        # the thread may outlive this object, but not the memory that is written
        thread = threading.Thread(target=_wait_for_any, args=(work, self.source, keep), daemon=True)
        thread.start()
        super().__init__(work, lambda: finish(self.source.result()), keep, None, limit_s)

    def find_need(self) -> Need:
        """Return the requests of which one ends the wait."""
        return self._find_need()

    def _wait(self) -> None:
        try:
            self.source.result(self.limit_s)
        except FutureTimeout:
            limit = TimeoutError("no rank has sent such a message within the time limit")
            raise ConnectionBroken from limit

    def abort(self) -> None:
        """End the wait with an error."""
        error = ConnectionBroken()
        error.__cause__ = RuntimeError("the connections of this rank are closed")
        with suppress(InvalidStateError):
            self.source.set_exception(error)


def _wait_for_any(work: Any, source: "Future[int]", keep: Any) -> None:
    with suppress(InvalidStateError):
        try:
            _wait(work, UNLIMITED_S)
            source.set_result(work._source_rank())
        except ConnectionBroken as error:
            source.set_exception(error)


def _wait(work: Any, limit_s: float | None) -> None:
    """Wait for work of torch.distributed; `limit_s` is None for NCCL, which has its own limit."""
    with network():
        if limit_s is None:
            # with a time limit, the host would poll until the device has finished
            work.wait()
        else:
            # gloo's messages have no other time limit; after a timeout the connection is closed
            work.wait(timedelta(seconds=limit_s))


class PendingCollective:
    """A collective that has started, and the function that returns its answer."""

    def __init__(self, work: Any, finish: Callable[[], Any], limit_s: float | None) -> None:
        self.work, self.finish, self.limit_s = work, finish, limit_s

    def find_need(self) -> None:
        """Return None: all ranks have agreed on the request, or NCCL executes it."""

    def result(self) -> Any:
        """Wait for the collective, and return the answer."""
        if self.work is not None:
            _wait(self.work, self.limit_s)
        return self.finish()


class Background:
    """A request or an algorithm that runs on a channel's thread."""

    def __init__(
        self, future: Future[Any], channel: "Channel", *, is_receive: bool = False
    ) -> None:
        self.future, self.channel = future, channel
        self.find_need: Callable[[], Need | None] = channel.find_need
        self.is_receive = is_receive
        # the channel runs them first; receives on its thread have no time limit
        self.receives = channel.pending_receives()

    def result(self) -> Any:
        """Wait for the answer, and return it; collectives have time limits of their own."""
        self._wait_for_receives()
        try:
            return self.future.result(self.channel.group.timeout_s if self.is_receive else None)
        except FutureTimeout:
            limit = TimeoutError("no message within the time limit")
            raise ConnectionBroken from limit

    def _wait_for_receives(self) -> None:
        for receive in self.receives:
            if receive in wait([receive], self.channel.group.timeout_s).not_done:
                limit = TimeoutError("an earlier receive on this channel has no message")
                raise BlockedByReceive from limit
        self.receives = ()


class AnyOnChannel(Background):
    """A receive from any rank on a channel, which has a thread of its own."""

    def __init__(self, pending: PendingAny, channel: "Channel") -> None:
        super().__init__(pending.source, channel)
        self.pending, self.find_need = pending, pending.find_need

    def result(self) -> Any:
        """Wait until a message is received, and return the answer."""
        return self.pending.result()


class AlgorithmOnStream(Background):
    """An algorithm that runs on a channel's thread and CUDA stream."""

    def __init__(self, future: Future[Any], channel: "Channel") -> None:
        super().__init__(future, channel)
        assert channel.streams is not None, "created before the algorithm starts"
        self.streams = channel.streams

    def result(self) -> Any:
        """Return the answer, which the current stream waits for."""
        self._wait_for_receives()
        answer, done = self.future.result()
        self.streams.current().wait(done)
        return answer


def find_first_need(request: First) -> Need | None:
    """Return the requests of peers that a `First` waits for; None if it ends by itself."""
    needs = [each.find_need() for each in request.pending]
    if request.seconds is not None or not all(needs):
        return None
    found = [need for need in needs if need is not None]
    if len(found) == 1:
        return found[0]
    alternatives = [
        each
        for need in found
        for each in need.alternatives or [(need.peer, need.sequence, need.number)]
    ]
    peer, sequence, number = alternatives[0]
    return Need(peer, sequence, number, alternatives=alternatives)


def wait_for_first(request: First) -> int | None:
    """Return the index of a request that has ended; see `First`."""
    check_on_channels(request, Background)
    futures = [each.future for each in request.pending]
    # an ended wait does not affect the requests, unlike the time limit of gloo's waits, which
    # closes the connection
    limit = request.seconds
    if limit is not None and limit > threading.TIMEOUT_MAX:
        limit = None
    ended, _ = wait(futures, limit, FIRST_COMPLETED)
    return next((index for index, each in enumerate(futures) if each in ended), None)


def abandon(request: Abandon) -> None:
    """Check an `Abandon`; `Channel.close` ends receives that have no message."""
    check_on_channels(request, Background)
