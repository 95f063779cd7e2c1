"""What sparse compressions send, and of which elements."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from collective_sizes import lockstep_by
from compress import cases

from gcnzc.compress import Dense, RandomBlock, RandomK, Threshold, TopK
from gcnzc.compress.value_formats import VALUE_FORMATS, decode_values, encode_values, value_bytes

LAYERS = (300, 1, 0, 699)


def layered(way, world_size, layers=LAYERS):
    """Reducers that know the layers of their vector."""
    return cases.reducers(way, sum(layers), world_size, layers=layers)


def largest(values, bounds, density):
    """(n,) bool: the largest magnitudes of each segment, by sorting."""
    found = np.zeros(len(values), bool)
    for begin, end in pairwise(bounds):
        if end > begin:
            count = max(1, int(density * (end - begin)))
            order = np.argsort(-np.abs(values[begin:end]), kind="stable")[:count]
            found[begin + order] = True
    return found


@pytest.mark.parametrize(
    ("per", "bounds"),
    [
        ("all", [0, 1000]),
        ("layer", [0, 300, 301, 301, 1000]),
        (64, [*range(0, 1000, 64), 1000]),
    ],
)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("world_size", [2, 3])
def test_top_k_is_that_of_a_numpy_loop(world_size, decay, per, bounds):
    them = layered(TopK(0.05, per, error_decay=decay), world_size)
    errors = np.zeros((world_size, 1000))
    for step in range(5):
        given = cases.vectors(1000, world_size, step)
        y = np.stack([each.double().numpy() for each in given]) + decay * errors
        kept = np.stack([largest(row, bounds, 0.05) for row in y])
        errors = np.where(kept, 0, y)
        found = cases.mean_of(them, given)[0]
        expected = np.where(kept, y, 0).mean(axis=0)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(them[0].support, torch.from_numpy(kept.any(axis=0)))
    for each, error in zip(them, errors, strict=True):
        np.testing.assert_allclose(each.worker_error.numpy(), error, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", [TopK(1.0), TopK(1.0, "layer"), RandomK(1.0), RandomBlock(1.0)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_a_density_of_one_computes_the_dense_mean(way, world_size):
    them, dense = cases.reducers(way, 500, world_size), cases.reducers(Dense(), 500, world_size)
    for step in range(3):
        given = cases.vectors(502, world_size, step)
        found, expected = cases.mean_of(them, given, 2)[0], cases.mean_of(dense, given, 2)[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert all(each.worker_error is None or not each.worker_error.any() for each in them)


SUMMED = ["randomk", "randomk most", "randomk without errors", "block"]


@pytest.mark.parametrize("name", SUMMED)
def test_bytes_of_one_all_reduce_match_the_formula(name):
    way = cases.SPARSE[name]
    for world_size, extras in [(1, 0), (2, 1), (4, 1), (8, 5)]:
        # K elements, a count and the extras, in as many equal parts as ranks
        count = 1000
        sent = max(1, int(way.density * count)) + 1 + extras
        extras += -sent % world_size
        pairs = zip(
            cases.reducers(way, count, world_size),
            cases.vectors(count + extras, world_size),
            strict=True,
        )
        outcome = lockstep_by("builtin", [each.mean(vector, extras) for each, vector in pairs])
        for ledger in outcome.ledgers:
            assert ledger.bytes_sent == way.bytes_sent(count, world_size, extras)
            assert ledger.requests == (world_size > 1)
    # 2 (W - 1) / W of 4 K bytes, without indices
    assert RandomK(0.01).bytes_sent(10**6, 4) == 6 * (4 * (10**4 + 1)) // 4


def test_bytes_of_thresholds_match_the_numbers_of_elements():
    way = Threshold(0.1, per="layer")
    them = layered(way, 3)
    for step in range(4):
        before = [each.worker_error.clone() for each in them]
        given = cases.vectors(1000 + 2, 3, step)
        outcome, _ = cases.attempt(them, given, 2)
        for rank, (ledger, reducer) in enumerate(zip(outcome.ledgers, them, strict=True)):
            y = given[rank][:1000] + before[rank]
            count = int(((y != 0) & (reducer.worker_error == 0)).sum())
            low = int(math.log2(1000 // count))
            code = -(-count * low // 8) + -(-(count + (999 >> low) + 1) // 8)
            expected = 2 * (4 * (2 + 2) + 4 * count + -(-code // 4) * 4)
            assert ledger.bytes_sent == expected
            assert ledger.requests == 2
            if step == 0:
                assert ledger.bytes_sent == way.bytes_sent(1000, 3, 2, LAYERS)


@pytest.mark.parametrize("value_format", VALUE_FORMATS)
def test_values_are_decoded_in_their_format(value_format):
    counts = torch.tensor([3, 1, 40, 7])
    values = cases.vectors(51, 1, 3)[0]
    code = torch.full((value_bytes(value_format, 51, 4),), 255, dtype=torch.uint8)
    encode_values(values, value_format, counts, code)
    found = decode_values(code, value_format, counts, 51)
    if value_format != "int2":
        assert torch.equal(found, values.to(getattr(torch, value_format)))
        return
    for part, own in zip(values.split(counts.tolist()), found.split(counts.tolist()), strict=True):
        magnitudes = part.abs()
        is_large = magnitudes > magnitudes.mean()
        expected = torch.where(is_large, 0.0, magnitudes[~is_large].mean())
        if is_large.any():
            expected += torch.where(is_large, magnitudes[is_large].mean(), 0.0)
        torch.testing.assert_close(own, torch.where(part < 0, -expected, expected))
        # the error is smaller than that of one level
        one_level = (magnitudes - magnitudes.mean()).norm()
        assert (own - part).norm() <= one_level * (1 + 1e-6)


def test_values_too_large_for_their_format_are_reported():
    given = cases.vectors(100, 2)
    given[1][7] = 1e6
    them = cases.reducers(TopK(0.1, value_format="float16"), 100, 2)
    before = cases.errors_of(them)
    outcome, _ = cases.attempt(them, given)
    assert outcome.results == ["elements that are not finite or too large: rank 1 has 1"] * 2
    assert cases.are_same(cases.errors_of(them), before)


@pytest.mark.parametrize("name", cases.SPARSE)
def test_the_support_has_all_elements_that_were_sent(name):
    them = cases.reducers(cases.SPARSE[name], 400, 3)
    active = cases.masked(400)
    for step in range(3):
        if step == 2:
            for each in them:
                each.restrict_to(active)
        found = cases.mean_of(them, cases.vectors(400, 3, step))[0]
        for each in them:
            assert torch.equal(each.support, them[0].support)
        assert not found[~them[0].support].any()
        assert them[0].support.sum() < 400
        assert not (step == 2 and them[0].support[~active].any())
    assert cases.reducers(cases.SPARSE[name], 400, 1)[0].support is None


def test_selections_are_drawn_anew_in_each_mean_and_are_equal_on_all_ranks():
    for way in (RandomK(0.1), RandomBlock(0.1), RandomK(0.1, same=False)):
        them = cases.reducers(way, 1000, 3)
        seen = []
        for step in range(3):
            cases.mean_of(them, cases.vectors(1000, 3, step))
            seen.append(them[0].support.clone())
            count = int(seen[-1].sum())
            assert count == 100 if way.is_reduced else 200 < count <= 300
        assert not torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[1], seen[2])
        other = cases.reducers(type(way)(0.1, 1), 1000, 3)
        cases.mean_of(other, cases.vectors(1000, 3))
        assert not torch.equal(other[0].support, seen[0])


def test_blocks_are_consecutive_and_wrap_around():
    way = RandomBlock(0.3)
    begins = set()
    for step in range(200):
        indices = way.select(100, step, 0)
        begins.add(int(indices[0]))
        assert indices.tolist() == [(int(indices[0]) + at) % 100 for at in range(30)]
    assert min(begins) < 10
    assert max(begins) > 90


def test_without_feedback_random_means_are_unbiased():
    given = cases.vectors(60, 2)
    mean = torch.stack(given).double().mean(dim=0)
    for way in (
        RandomK(0.25, error_feedback=False),
        RandomK(0.25, same=False, error_feedback=False),
        RandomBlock(0.25, error_feedback=False),
    ):
        them, total = cases.reducers(way, 60, 2), 0
        for _ in range(600):
            total = total + cases.mean_of(them, given)[0].double()
        assert (total / 600 - mean).norm() < 0.2 * mean.norm(), way


def test_thresholds_are_renewed_at_different_steps():
    layers = (400, 400, 400, 400)
    them = layered(Threshold(0.1, refresh=8), 2, layers)
    renewals, kept = [], []
    given = [torch.randn(1600, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(25):
        before = them[0].thresholds.clone()
        # the vectors and thereby the numbers of elements change little
        for each in them:
            each.worker_error.zero_()
        cases.mean_of(them, [each.clone() for each in given])
        renewals.append(them[0].renewals)
        kept.append(before)
    assert renewals[0] == 4
    # then one every second step
    assert [after - before for before, after in pairwise(renewals)] == [
        int(step % 2 == 0) for step in range(1, 25)
    ]
    assert torch.equal(them[0].thresholds, given[0].view(4, 400).abs().topk(40).values.amin(dim=1))


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_threshold_is_renewed_at_once_if_it_does_not_fit(factor):
    them = cases.reducers(Threshold(0.1, refresh=1000), 500, 2)
    given = cases.vectors(500, 2)
    cases.mean_of(them, given)
    for each in them:
        each.worker_error.zero_()
    cases.mean_of(them, [factor * each for each in given])
    for each in them:
        # neither nothing nor nearly everything
        assert 50 / 4 <= int((each.worker_error == 0).sum()) - 72 <= 4 * 50
        assert each.renewals == 2


def test_zeros_send_no_elements():
    them = cases.reducers(Threshold(0.1), 1000, 3)
    for given in ([torch.zeros(1000)] * 3, cases.vectors(1000, 3)):
        outcome, _ = cases.attempt(them, given)
    assert outcome.ledgers[0].requests == 2
    for each in them:
        each.worker_error.zero_()
    outcome, found = cases.attempt(them, [torch.zeros(1000)] * 3)
    assert not found[0].any()
    for ledger in outcome.ledgers:
        assert (ledger.bytes_sent, ledger.requests) == (2 * 8, 1)
    # one rank alone
    given = [torch.zeros(1000), torch.ones(1000), torch.zeros(1000)]
    outcome, _ = cases.attempt(them, given)
    sent = [ledger.bytes_sent for ledger in outcome.ledgers]
    assert sent[0] == sent[2] == 2 * 8 < sent[1]
