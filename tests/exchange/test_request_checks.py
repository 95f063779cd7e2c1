"""Requests that are refused, with the same error by `run` and `lockstep`."""

import numpy as np
import pytest
import torch
from exchange.cases import ask

from gcnzc.exchange import (
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    CompareAndSet,
    Compute,
    Group,
    Mean,
    Now,
    ReadKeys,
    Receive,
    ReduceScatter,
    Send,
    SendReceive,
    Start,
    Sum,
    Wait,
    WaitForKey,
    lockstep,
    run,
)


def start(request, channel=None):
    pending = yield Start(request, channel)
    return (yield Wait(pending))


def ones():
    return torch.ones(3)


BIG = 1 << 22
KEY = "k" * 5000
WRONG = {
    # values
    "a parameter": (lambda: ask(Sum(torch.nn.Parameter(ones()))), "Sum of values that require"),
    "few parts": (lambda: ask(AllToAll([ones()])), "1 parts.* for 2 ranks"),
    "wide parts": (lambda: ask(AllToAll([torch.ones(2, 2)] * 2)), r"of the shapes \[\(2, 2\)"),
    "counts": (lambda: ask(AllToAll([ones()] * 2, [1])), "1 counts for 2 ranks"),
    "dtypes": (lambda: ask(AllToAll([ones(), ones().int()])), "several dtypes"),
    "strides": (lambda: ask(Sum(torch.zeros(4, 4).T)), "not contiguous"),
    "a share": (lambda: ask(ReduceScatter(ones())), "3 elements for 2 ranks"),
    "negative": (lambda: ask(Compute(-1)), "Compute of -1 s"),
    # ranks
    "a root": (lambda: ask(Broadcast(ones(), 2)), "from rank 2 of 2"),
    "a peer": (lambda: ask(SendReceive(ones(), -1)), "with rank -1 of 2"),
    "itself": (lambda: start(Send(ones(), 0)), "Send of .* bytes.*with rank 0 on rank 0 of 2"),
    "on a channel": (lambda: start(Receive(ones(), 2), "mail"), "with rank 2 on rank 0 of 2"),
    # keys of the store
    "empty": (lambda: ask(CompareAndSet("a", b"1", b"")), "CompareAndSet of the key a to an empty"),
    "large value": (
        lambda: ask(CompareAndSet("a", b"", bytes(BIG + 1))),
        "value of 4,194,305 bytes",
    ),
    "large expected": (lambda: ask(CompareAndSet("a", bytes(BIG + 1), b"y")), "of 4,194,305 bytes"),
    "a wait": (lambda: ask(WaitForKey("a", float("nan"))), "a wait of nan s for the key a"),
    "a long key": (lambda: ask(WaitForKey(KEY)), "with the key 'kkk.* of 5,000 bytes"),
    "a long key of several": (lambda: ask(ReadKeys(["a", KEY])), "the key 'kkk.* of 5,000 bytes"),
}
# what is no request of tensors, or no algorithm
NO_REQUESTS = {
    "None": lambda: ask(None),
    "a class": lambda: start(Sum),
    "an algorithm": lambda: ask(ask(Now())),
    "a function": lambda: ask,
    "a handle": lambda: ask(Wait(3)),
    "start Now": lambda: start(Now()),
    "a key of bytes": lambda: ask(ReadKeys([b"k"])),
    "Send in started": lambda: start(ask(Send(ones(), 1))),
    "an array": lambda: ask(AllGather(np.ones(3))),
    "text": lambda: ask(AllGatherScalar("x")),
}
# also refused by a process that has no other rank
ALONE = ("a parameter", "a long key", "negative")


@pytest.mark.parametrize("what", WRONG)
def test_wrong_requests_are_refused(what):
    algorithm, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        lockstep([algorithm() for _ in range(2)])
    if what in ALONE:
        with pytest.raises(ValueError, match=message):
            run(algorithm(), Group())


@pytest.mark.parametrize("what", NO_REQUESTS)
def test_what_is_no_request_of_tensors_is_an_error(what):
    with pytest.raises((TypeError, AttributeError, ValueError)):
        lockstep([NO_REQUESTS[what]() for _ in range(2)])
    if what in ("None", "an algorithm", "start Now", "a function", "a handle"):
        with pytest.raises((TypeError, AttributeError)):
            run(NO_REQUESTS[what](), Group())


@pytest.mark.parametrize("value", [-(1 << 63), (1 << 63) - 1, float("inf"), np.float64(0.5)])
def test_numbers_of_64_bits_are_accepted(value):
    assert run(ask(AllGatherScalar(value)), Group()) == (value,)
    assert lockstep([ask(AllGatherScalar(value))] * 1).results == [(value,)]


def test_a_mean_of_float16_overflows_like_its_sum():
    values = [torch.full((2,), 40_000.0, dtype=torch.float16) for _ in range(2)]
    for answer in lockstep([ask(Mean(each)) for each in values]).results:
        assert answer.isinf().all()
