"""How often the host waits for a device in a step.

It waits wherever it reads a value there, and for each ordinary copy of numbers to there.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from simulated_device import OnDevice, Reads

from gcnzc import exchange
from gcnzc.compress import Rounded
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)

WORLD_SIZE = 2
STEPS = 14
# codes made by operations of torch; the others' kernels would need a real device
CODES = Rounded(torch.float32, has_feedback=True)


def values_of(tensor):
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


def answers(requests):
    """What two ranks get for their requests, which are of the same kind."""
    first = requests[0]
    if isinstance(first, exchange.Start):
        before = len(Reads.seen)
        pending = drive([each.request for each in requests])
        # overlapped with the steps, which go on
        del Reads.seen[before:]
        return pending
    if isinstance(first, exchange.Wait):
        return [each.pending for each in requests]
    if isinstance(first, exchange.Caller):
        return [""] * len(requests)
    if isinstance(first, exchange.AllGatherScalar):
        return [tuple(each.value for each in requests)] * WORLD_SIZE
    like = OnDevice if isinstance(getattr(first, "values", None), OnDevice) else torch.Tensor.clone
    if isinstance(first, exchange.AllToAll):
        sent = [[values_of(part) for part in each.parts] for each in requests]
        like = OnDevice if isinstance(first.parts[0], OnDevice) else torch.Tensor.clone
        return [[like(row[rank].clone()) for row in sent] for rank in range(WORLD_SIZE)]
    given = torch.stack([values_of(each.values) for each in requests])
    if isinstance(first, exchange.AllGather):
        return [like(given.clone()) for _ in requests]
    if isinstance(first, exchange.ReduceScatter):
        return [like(part.clone()) for part in given.sum(0).chunk(WORLD_SIZE)]
    assert isinstance(first, exchange.Sum | exchange.Mean | exchange.Broadcast)
    total = given[0] if isinstance(first, exchange.Broadcast) else given.sum(0)
    for each in requests:
        values_of(each.values).copy_(
            total / WORLD_SIZE if isinstance(first, exchange.Mean) else total
        )
    return [each.values for each in requests]


def drive(algorithms):
    """Run the algorithms of both ranks; what they return."""
    given = [None] * len(algorithms)
    while True:
        requests, results = [], []
        for algorithm, answer in zip(algorithms, given, strict=True):
            try:
                requests.append(algorithm.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not requests, "one rank goes on without the other"
            return results
        given = answers(requests)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, foreach=False)


def changes_activity(optimizer):
    is_change = optimizer.is_gradient_step and optimizer.steps + 1 >= optimizer.warmup
    return is_change or len(optimizer.settling) > 0


@dataclass
class Case:
    """An optimizer, and how often each of its ranks may wait."""

    make: Any
    most: int = 1
    """in a step without an exchange, or of an optimizer that exchanges in all"""
    most_in_exchange: int = 1
    """in another step"""
    interval: int = 1
    """steps from one exchange to the next"""
    changes: Any = lambda optimizer: False
    """whether the next step determines anew which elements are inactive"""
    most_in_change: int = 2
    """in such a step"""


CASES = {
    "averaged": Case(lambda p, g: Averaged(sgd(p), g, signals=1, clip_norm=0.5)),
    "averaged in codes": Case(lambda p, g: Averaged(sgd(p), g, signals=1, compress=CODES)),
    "onebit-adam": Case(
        lambda p, g: OneBitAdam(
            p, group=g, warmup=4, compress=CODES, signals=1, clip_norm=0.5, refresh=4
        ),
        changes=changes_activity,
        # which elements are inactive, begin to settle, or have settled
        most_in_change=8,
    ),
    "onebit-lamb": Case(
        lambda p, g: OneBitLamb(p, group=g, warmup=4, compress=CODES, signals=1, clip_norm=0.5),
        changes=changes_activity,
        # and the scalings of its tensors
        most_in_change=9,
    ),
    "zero-one-adam": Case(
        lambda p, g: ZeroOneAdam(
            p,
            group=g,
            schedule=ZeroOneSchedule(
                6, variance_doubling=2, local_doubling=2, max_local_interval=4
            ),
            compress=CODES,
            signals=1,
            clip_norm=0.5,
        ),
        changes=lambda optimizer: optimizer.exchange == "gradient" or len(optimizer.settling) > 0,
        most_in_change=8,
    ),
    "local-sgd": Case(lambda p, g: LocalSGD(sgd(p), g, local_steps=3, signals=1), 1, 2, 3),
    "diloco": Case(
        lambda p, g: DiLoCo(sgd(p), g, local_steps=3, signals=1, compress=CODES), 1, 2, 3
    ),
    # also for the mean, which the outer optimizer reads on the host, and two copies of the anchor
    "diloco offloaded": Case(
        lambda p, g: DiLoCo(sgd(p), g, local_steps=3, signals=1, offload=True), 1, 5, 3
    ),
    "co2": Case(lambda p, g: CO2(sgd(p), g, local_steps=3, signals=1), 1, 3, 3),
    "streaming-diloco": Case(
        lambda p, g: StreamingDiLoCo(sgd(p), g, local_steps=3, fragments=1, delay=0, signals=1),
        *(1, 3, 3),
    ),
}


def train(case, place, *, with_scaler=False):
    """Steps of two ranks: their parameters, and the waits of each step of one of them."""
    ranks = []
    for rank in range(WORLD_SIZE):
        parameters = [
            torch.nn.Parameter(place(torch.linspace(-1, 1, 40).view(8, 5))),
            torch.nn.Parameter(place(torch.ones(3))),
        ]
        group = exchange.Group(rank, WORLD_SIZE)
        ranks.append((parameters, case.make(parameters, group)))
    waits = []
    for step in range(1, STEPS + 1):
        for rank, (parameters, optimizer) in enumerate(ranks):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, generator=generator)
                # rows that are looked up late
                gradient[6:] *= step > 5 and gradient.dim() == 2
                parameter.grad = place(4 * gradient)
            if with_scaler:
                optimizer.grad_scale = place(torch.tensor(4.0))
                optimizer.found_inf = place(torch.tensor(float(step == 2 and rank == 1)))
        most = case.most if step % case.interval else case.most_in_exchange
        if case.changes(ranks[0][1]):
            most = case.most_in_change
        Reads.seen.clear()
        drive([optimizer.algorithm() for _, optimizer in ranks])
        # ranks whose gradients are not finite say how many elements are not
        most += 2 * with_scaler * (step == 2)
        waits.append((len(Reads.seen) / WORLD_SIZE, most, sorted(Reads.seen)))
    skipped = [optimizer.skipped for _, optimizer in ranks]
    return [[values_of(each.detach()) for each in found] for found, _ in ranks], waits, skipped


@torch.no_grad()
@pytest.mark.parametrize("with_scaler", [False, True], ids=["", "with a GradScaler"])
@pytest.mark.parametrize("name", CASES)
def test_the_host_synchronizes_with_a_device_once_per_step(name, with_scaler):
    case = CASES[name]
    with Reads():
        found, waits, skipped = train(case, OnDevice, with_scaler=with_scaler)
    # the first step has the start's as well
    for step, (count, most, kinds) in enumerate(waits[1:], 2):
        assert count <= most, (step, kinds)
    expected, _, expected_skipped = train(case, torch.Tensor.clone, with_scaler=with_scaler)
    assert skipped == expected_skipped
    assert any(skipped) == with_scaler
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_a_step_of_averaged_reads_a_device_once_however_many_vectors_there_are():
    with Reads():
        ranks = []
        for rank in range(WORLD_SIZE):
            parameters = [
                torch.nn.Parameter(OnDevice(torch.ones(3, dtype=dtype)))
                for dtype in (torch.float32, torch.float64, torch.bfloat16)
            ]
            inner = torch.optim.SGD(parameters, lr=0.5)
            ranks.append((parameters, Averaged(inner, exchange.Group(rank, WORLD_SIZE), signals=1)))
        for step in range(3):
            for parameters, _ in ranks:
                for number, parameter in enumerate(parameters):
                    ones = OnDevice(torch.ones(3, dtype=parameter.dtype))
                    parameter.grad = ones if number < 3 - step else None
            Reads.seen.clear()
            drive([optimizer.algorithm() for _, optimizer in ranks])
            # the first one has the start's as well
            assert step == 0 or len(Reads.seen) == WORLD_SIZE, Reads.seen
        # one without a gradient on any worker is left alone
        for parameters, _ in ranks:
            assert [float(each.inner[0]) for each in parameters] == [-0.5, 0.0, 0.5]
