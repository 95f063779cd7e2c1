"""Errors of wrong kinds of requests, the same of `run` and `lockstep`."""

import numpy as np
import pytest
import torch

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
    Receive,
    Send,
    Start,
    Subgroup,
    Sum,
    Wait,
    lockstep,
    run,
)


def ask(request):
    return (yield request)


def start(request, channel=None):
    pending = yield Start(request, channel)
    return (yield Wait(pending))


def ones():
    return torch.ones(3)


WRONG = {
    "None": (lambda: ask(None), "yields NoneType None, which is not a request"),
    "a number": (lambda: ask(5), "yields int 5, which is not a request"),
    "a class": (lambda: ask(Sum), "yields the class Sum, which is not a request"),
    "an algorithm": (lambda: ask(ask(Now())), "yields generator .* not a request"),
    "a parameter": (lambda: ask(Sum(torch.nn.Parameter(ones()))), "Sum of values that require"),
    "a mean": (lambda: ask(Mean(ones().requires_grad_())), "Mean of values that require"),
    "a list": (lambda: ask(Sum([1])), "Sum of values of the type list"),
    "an array": (lambda: ask(AllGather(np.ones(3))), "AllGather of values of the type ndarray"),
    "a started list": (lambda: start(Sum([1])), "Sum of values of the type list"),
    "parts": (lambda: ask(AllToAll([[1.0], [2.0]])), "AllToAll of parts of the type list"),
    "array parts": (lambda: start(AllToAll([np.ones(3)] * 2)), "parts of the type ndarray"),
    "no parts": (lambda: start(AllToAll(5)), "AllToAll of parts of the type int"),
    "a broadcast": (lambda: ask(Broadcast(np.ones(3))), "Broadcast of values of the type ndarray"),
    "a handle": (lambda: ask(Wait(3)), "a Wait for int 3"),
    "start Now": (lambda: start(Now()), "the start of a Now"),
    "start Start": (lambda: start(Start(Sum(ones()))), "the start of a Start"),
    "start key": (lambda: start(CompareAndSet("k", b"", b"x")), "the start of a CompareAndSet"),
    "start None": (lambda: start(None), "the start of NoneType None"),
    "start class": (lambda: start(Sum), "the start of the class Sum"),
    "large expected": (
        lambda: ask(CompareAndSet("k", b"x" * (1 << 22) + b"x", b"y")),
        "CompareAndSet of the key k with a value of 4,194,305 bytes",
    ),
    "bytearray": (
        lambda: ask(CompareAndSet("k", b"", bytearray(b"y"))),
        "CompareAndSet of the key k with a value of the type bytearray",
    ),
    "Now in started": (lambda: start(ask(Now())), "a started algorithm yields a Now"),
    "Send in started": (lambda: start(ask(Send(ones(), 1))), "a started algorithm yields a Send"),
    "None in started": (lambda: start(ask(None)), "yields NoneType None"),
    "text": (lambda: ask(AllGatherScalar("x")), "AllGatherScalar of str 'x'"),
    "too large": (lambda: ask(AllGatherScalar(1 << 63)), "AllGatherScalar of int 9223372"),
    "one rank": (lambda: ask(Subgroup(3, Sum(ones()))), "Subgroup of the ranks 3"),
    "started rank": (lambda: start(Subgroup(3, Sum(ones()))), "Subgroup of the ranks 3"),
    "no collective": (lambda: ask(Subgroup([0], Now())), r"Subgroup of Now\(\)"),
    "negative": (lambda: ask(Compute(-1)), "Compute of -1 s"),
    "NaN": (lambda: ask(Compute(float("nan"))), "Compute of nan s"),
    "a sum as an algorithm": (lambda: Sum(ones()), "the algorithm is a Sum"),
    "a function": (lambda: ask, "the algorithm is function"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_kinds_are_refused_with_a_hint(what, world_size):
    algorithm, message = WRONG[what]
    expected = rf"(?s){message}.*\n\nhint: "
    with pytest.raises(ValueError, match=expected):
        lockstep([algorithm() for _ in range(world_size)])
    if world_size == 1:
        with pytest.raises(ValueError, match=expected):
            run(algorithm(), Group())


@pytest.mark.parametrize("request_of", [Send, Receive])
@pytest.mark.parametrize("channel", [None, "mail"])
def test_messages_of_arrays_are_refused(request_of, channel):
    algorithms = [start(request_of(np.ones(3), 1 - rank), channel) for rank in range(2)]
    with pytest.raises(ValueError, match=r"(?s)of values of the type ndarray.*\n\nhint: "):
        lockstep(algorithms)
    with pytest.raises(ValueError, match=r"(?s)of values of the type ndarray.*\n\nhint: "):
        run(start(request_of(np.ones(3), 1), channel), Group())


@pytest.mark.parametrize("value", [-(1 << 63), (1 << 63) - 1, float("inf"), np.float64(0.5)])
def test_numbers_of_64_bits_are_accepted(value):
    assert run(ask(AllGatherScalar(value)), Group()) == (value,)
    assert lockstep([ask(AllGatherScalar(value))] * 1).results == [(value,)]


def test_a_mean_of_float16_overflows_like_its_sum():
    values = [torch.full((2,), 40_000.0, dtype=torch.float16) for _ in range(2)]
    for answer in lockstep([ask(Mean(each)) for each in values]).results:
        assert answer.isinf().all()
