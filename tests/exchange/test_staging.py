"""Requests with tensors on a device over gloo, which uses host memory."""

import torch
from processes import results
from simulated_device import OnDevice, Reads

from gcnzc import exchange


def exchange_on_device(rank):
    def filled(value, *shape):
        return OnDevice(torch.full(shape, float(value)))

    peer = 1 - rank
    for _ in range(2):
        first, second = filled(-1, 2, 3), filled(-1, 5)
        if rank:
            answer = yield exchange.Receive(first, 0)
            yield exchange.Send(filled(7, 4), 0)
        else:
            yield exchange.Send(filled(5, 2, 3), 1)
            answer = yield exchange.Receive(filled(-1, 4), 1)
        receive = yield exchange.Start(exchange.Receive(second, peer))
        # a request of the same size, while the other is pending
        mean = yield exchange.Mean(filled(rank, 5))
        send = yield exchange.Start(exchange.Send(filled(10 + rank, 5), peer))
        late = yield exchange.Wait(receive)
        yield exchange.Wait(send)
        swapped = yield exchange.SendReceive(filled(20 + rank, 3), peer)
        gathered = yield exchange.AllGather(filled(rank, 2))
        shared = yield exchange.Broadcast(filled(rank, 2), 1)
    return [answer, late, second, mean, swapped, gathered, shared]


@torch.no_grad()
def answers():
    with Reads(), exchange.init_group(timeout_s=20) as workers:
        found = exchange.run(exchange_on_device(workers.rank), workers)
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
