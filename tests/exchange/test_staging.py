"""Requests with tensors on a device over gloo, which uses host memory."""

import torch
from processes import results
from simulated_device import OnDevice, Reads

from gcnzc.exchange import (
    AllGather,
    Broadcast,
    Mean,
    Receive,
    Send,
    SendReceive,
    Start,
    Wait,
    init_group,
    run,
)


def exchange_on_device(rank):
    def filled(value, *shape):
        return OnDevice(torch.full(shape, float(value)))

    peer = 1 - rank
    for _ in range(2):
        first, second = filled(-1, 2, 3), filled(-1, 5)
        if rank:
            answer = yield Receive(first, 0)
            yield Send(filled(7, 4), 0)
        else:
            yield Send(filled(5, 2, 3), 1)
            answer = yield Receive(filled(-1, 4), 1)
        receive = yield Start(Receive(second, peer))
        # a request of the same size, while the other is pending
        mean = yield Mean(filled(rank, 5))
        send = yield Start(Send(filled(10 + rank, 5), peer))
        late = yield Wait(receive)
        yield Wait(send)
        swapped = yield SendReceive(filled(20 + rank, 3), peer)
        gathered = yield AllGather(filled(rank, 2))
        shared = yield Broadcast(filled(rank, 2), 1)
    return [answer, late, second, mean, swapped, gathered, shared]


@torch.no_grad()
def answers():
    with Reads(), init_group(timeout_s=20) as workers:
        found = run(exchange_on_device(workers.rank), workers)
        return [type(each) is OnDevice for each in found], [each.inner for each in found]


def test_device_tensors_are_exchanged_through_host_memory_over_gloo(tmp_path):
    for rank, (are_on_device, found) in enumerate(results(2, tmp_path, answers)):
        assert all(are_on_device)
        received = torch.full((2, 3), 5.0) if rank else torch.full((4,), 7.0)
        late = torch.full((5,), 11.0 - rank)
        expected = [
            *(received, late, late, torch.full((5,), 0.5), torch.full((3,), 21.0 - rank)),
            *(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.ones(2)),
        ]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
