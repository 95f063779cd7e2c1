import pytest
import torch
from compress.cases import mean_of, reducers, vectors

from gcnzc.compress import Sign


def signs(x):
    return torch.where(x >= 0, 1.0, -1.0).double()


def magnitude(x, scale):
    return x.square().mean().sqrt() if scale == "rms" else x.abs().mean()


@pytest.mark.parametrize("scale", ["rms", "l1"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_means_are_those_of_algorithm_1_of_1_bit_adam(scale, world_size):
    """Algorithm 1 of Tang et al., 2021, in float64, with one magnitude per rank and part."""
    part = 64
    count = part * world_size
    them = reducers(Sign(block=None, scale=scale), count, world_size)
    errors = torch.zeros(world_size, world_size, part, dtype=torch.float64)
    servers = torch.zeros(world_size, part, dtype=torch.float64)
    for step in range(5):
        given = vectors(count, world_size, step)
        expected = []
        y = torch.stack(given).double().view_as(errors) + errors
        sent = torch.zeros_like(y)
        for worker in range(world_size):
            for server in range(world_size):
                own = y[worker, server]
                sent[worker, server] = magnitude(own, scale) * signs(own)
        errors = y - sent
        for server in range(world_size):
            z = sent[:, server].mean(dim=0) + servers[server]
            expected.append(magnitude(z, scale) * signs(z))
            servers[server] = z - expected[-1]
        found = mean_of(them, given)[0].double()
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)
    for worker, each in enumerate(them):
        torch.testing.assert_close(
            each.worker_error.double(), errors[worker].flatten(), rtol=1e-5, atol=1e-4
        )
