"""Asynchronous work over NCCL: tensors are used only after a stream has waited for it.

A collective runs on NCCL's stream, and waiting for it orders the current stream, not the host.
"""

import functools
import gc
import random

import pytest
import torch
from simulated_device import OnDevice
from simulated_nccl import nccl_group

from gcnzc import exchange
from gcnzc.optim import CO2, Averaged, DiLoCo, LocalSGD, StreamingDiLoCo

NUM_SCHEDULES = 30
MANY_SCHEDULES = 1000


@pytest.fixture(autouse=True)
def without_automatic_collection():
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    # what is frozen remains so: a collection of all modules takes half a second
    gc.enable()


def ones(*shape):
    return OnDevice(torch.ones(*shape))


REQUESTS = {
    "sum": lambda: exchange.Sum(ones(4)),
    "mean": lambda: exchange.Mean(ones(4)),
    "broadcast": lambda: exchange.Broadcast(ones(4)),
    "all-gather": lambda: exchange.AllGather(ones(4)),
    "reduce-scatter": lambda: exchange.ReduceScatter(ones(4)),
    "all-to-all": lambda: exchange.AllToAll([ones(4), ones(4)], [4, 4]),
    "exchange": lambda: exchange.SendReceive(ones(4), 1),
}


def values_of(answer):
    return answer if isinstance(answer, list) else [answer]


def inputs_of(request):
    return request.parts if isinstance(request, exchange.AllToAll) else [request.values]


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_ready_on_the_current_stream_and_the_input_may_be_written(name):
    def algorithm():
        request = REQUESTS[name]()
        for values in values_of((yield request)):
            values.add_(1)
        for values in inputs_of(request):
            values.zero_()

    with nccl_group(0) as (device, group):
        group.run(algorithm())
        assert not device.races


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("use", ["write", "read", "read on the host"])
def test_use_before_the_wait_is_found(name, use):
    def algorithm():
        request = REQUESTS[name]()
        pending = yield exchange.Start(request)
        given = inputs_of(request)[0]
        if use == "write":
            given.zero_()
        elif use == "read":
            given.clone()
        else:
            given.tolist()
        yield exchange.Wait(pending)

    with nccl_group(0) as (device, group):
        group.run(algorithm())
        # all-to-all copies its parts before it sends them
        is_changed = name in ("sum", "mean", "broadcast")
        is_race = is_changed or (use == "write" and name != "all-to-all")
        assert bool(device.races) == is_race


@pytest.mark.parametrize("waits", ["no stream", "the same stream", "another stream"])
def test_memory_of_a_collective_is_kept_until_any_stream_has_waited(waits):
    with nccl_group(0) as (device, _):
        values = ones(4)
        work = exchange.process_group.dist.all_reduce(values, 1, async_op=True)
        if waits == "the same stream":
            work.wait()
        elif waits == "another stream":
            device.new().do(work.wait)
        del values, work
        # the stream that allocated the memory does not wait for the collective
        assert bool(device.races) == (waits == "another stream")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, foreach=False)


def make_optimizer(draw, parameters, group):
    kind = draw.choice(["averaged", "local", "diloco", "streaming", "co2", "co2", "co2"])
    steps = draw.randint(2, 4)
    inner = sgd(parameters)
    if kind == "averaged":
        return Averaged(inner, group, signals=1, clip_norm=draw.choice([None, 0.5]))
    if kind == "local":
        return LocalSGD(inner, group, local_steps=steps, signals=1)
    if kind == "diloco":
        return DiLoCo(inner, group, local_steps=steps, signals=1)
    if kind == "streaming":
        fragments, delay = draw.randint(1, 2), draw.randrange(steps)
        return StreamingDiLoCo(inner, group, local_steps=steps, fragments=fragments, delay=delay)
    delay = draw.randint(0, 1)
    return CO2(
        *(inner, group),
        local_steps=steps,
        outer_momentum=0.2,
        sharded=draw.random() < 0.5,
        delay=delay,
        eager=draw.choice([0.0, 0.5]) if delay else 0.0,
    )


def train(seed, without=None):
    """Train for some steps with a random optimizer; return the device."""
    draw = random.Random(f"program {seed}")
    with nccl_group(seed, without) as (device, group):
        parameters = [torch.nn.Parameter(ones(8, 5)), torch.nn.Parameter(ones(3))]
        optimizer = make_optimizer(draw, parameters, group)
        for _ in range(draw.randint(4, 9)):
            for parameter in parameters:
                parameter.grad = OnDevice(torch.randn(parameter.shape))
            group.run(optimizer.algorithm())
            if draw.random() < 0.2 and not isinstance(optimizer, Averaged):
                group.run(optimizer.finish_pending_algorithm())
        optimizer.finalize()
        for parameter in parameters:
            parameter.detach().add_(1)
    return device


@functools.cache
def train_all(num_seeds):
    """Train without races; return the seeds that make each call."""
    seeds_by_call = {}
    for seed in range(num_seeds):
        device = train(seed)
        assert not device.races, f"{seed}: {device.races[0]}"
        for call in device.calls:
            seeds_by_call.setdefault(call, []).append(seed)
    return seeds_by_call


def test_optimizers_use_no_tensor_that_a_collective_may_still_use():
    train_all(NUM_SCHEDULES)


@pytest.mark.slow
def test_optimizers_use_no_tensor_that_a_collective_may_still_use_in_many_runs():
    train_all(MANY_SCHEDULES)


def test_leaving_out_any_wait_or_event_is_found():
    # locks of channels protect no memory of a device
    calls = {call: seeds for call, seeds in train_all(NUM_SCHEDULES).items() if call[0] != "lock"}
    assert {call[0] for call in calls} == {"record", "wait"}
    for call, seeds in calls.items():
        assert any(train(seed, call).races for seed in seeds), f"nothing is found without {call}"
