"""How often the host waits for a device in a step: each read of a tensor's values there is one."""

import torch
from simulated_device import OnDevice, Reads

from gcnzc.exchange import AllGather, Broadcast, Group, Mean, Vote
from gcnzc.optim import Averaged


def answer_as_replica(algorithm, world_size):
    """Answer the requests of an algorithm as if all ranks had the same values."""
    answer = None
    while True:
        try:
            request = algorithm.send(answer)
        except StopIteration:
            return
        if isinstance(request, Mean | Broadcast):
            answer = request.values
        elif isinstance(request, Vote):
            answer = (request.value,) * world_size
        else:
            assert isinstance(request, AllGather)
            answer = torch.stack([request.values] * world_size)


@torch.no_grad()
def test_a_step_of_averaged_reads_a_device_once_however_many_vectors_there_are():
    with Reads():
        parameters = [
            torch.nn.Parameter(OnDevice(torch.ones(3, dtype=dtype)))
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
        ]
        group = Group()
        group.world_size = 2
        optimizer = Averaged(torch.optim.SGD(parameters, lr=0.5), group, signals=1)
        for step in range(3):
            for number, parameter in enumerate(parameters):
                ones = OnDevice(torch.ones(3, dtype=parameter.dtype))
                parameter.grad = ones if number < 3 - step else None
            Reads.seen.clear()
            answer_as_replica(optimizer.algorithm(), 2)
            # the first one has the start's as well
            assert step == 0 or len(Reads.seen) == 1, Reads.seen
        # one without a gradient on any worker is left alone
        assert [float(each.inner[0]) for each in parameters] == [-0.5, 0.0, 0.5]
