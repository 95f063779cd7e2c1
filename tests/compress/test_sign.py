import math

import pytest
import torch
from compress.ways import mean_of, reducers, vectors

from gcnzc.compress import Sign


def signs(x):
    return torch.where(x >= 0, 1.0, -1.0).double()


def magnitude(x, scale):
    return x.square().mean().sqrt() if scale == "rms" else x.abs().mean()


@pytest.mark.parametrize("scale", ["rms", "l1"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_it_is_the_paper_s_algorithm(scale, world_size):
    """Tang et al., 2021, algorithm 1, in float64: every worker's buffer in as many blocks as parts,
    since there are as many magnitudes."""
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


# of a normal distribution: 2 - 2 sqrt(2 / pi), and 1 - 2 / pi
@pytest.mark.parametrize(
    ("scale", "share"), [("rms", 2 - 2 * math.sqrt(2 / math.pi)), ("l1", 1 - 2 / math.pi)]
)
@pytest.mark.parametrize("block", [4096, None])
def test_of_a_normal_vector_a_known_share_is_left_out(scale, share, block):
    # all have the same, of which the signs are the same, and those of the mean
    vector = torch.randn(40_000)
    way = Sign(block=block, scale=scale, has_feedback=False)
    found = mean_of(reducers(way, 40_000, 2), [vector, vector])[0]
    left_out = (vector - found).square().sum() / vector.square().sum()
    assert left_out == pytest.approx(share, rel=0.03)


def test_mistaken_options_are_told():
    with pytest.raises(ValueError, match=r"(?s)no scale 'l2'.*hint: rms or l1"):
        Sign(scale="l2")
    with pytest.raises(ValueError, match=r"(?s)blocks of 33 elements.*multiple of 32"):
        Sign(block=33)
