"""Selection of elements, codes of indices and random indices of sparse compressions."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from gcnzc.kernels.codec import index_codes, selection
from gcnzc.kernels.codec.random_indices import draw_index, draw_indices, draw_indices_reference


def numbers(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator, dtype=torch.float64)
    return (found * torch.exp(3 * torch.randn(count, generator=generator))).to(dtype)


SEGMENTS = {
    "one": selection.Segments.of_density([1000], 0.1),
    "chunks": selection.Segments.of_chunks(1000, 64, 0.05),
    "layers": selection.Segments.of_density([1, 0, 500, 3, 496], 0.03),
    "most": selection.Segments.of_density([400, 600], 0.9),
    "all": selection.Segments.of_chunks(1000, 300, 1.0),
    "some none": selection.Segments(np.array([0, 500, 1000]), np.array([0, 7])),
}


def by_hand(values, segments):
    """The indices of the k largest of each segment, the first of equal ones, in ascending order."""
    found, limits = [], []
    magnitudes = values.float().abs().tolist()
    for (begin, end), k in zip(pairwise(segments.bounds), segments.counts, strict=True):
        order = sorted(range(begin, end), key=lambda at: (-magnitudes[at], at))[:k]
        found += sorted(order)
        limits.append(min((magnitudes[at] for at in order), default=0.0))
    return found, limits


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_magnitudes_of_each_segment_are_selected(name, dtype):
    segments, values = SEGMENTS[name], numbers(1000, dtype=dtype)
    indices, limits = selection.select_largest(values, segments)
    assert (indices.tolist(), limits.tolist()) == by_hand(values, segments)
    for again in (
        *(selection.select_largest(values, segments, threads=threads) for threads in (1, 3)),
        selection.select_largest_reference(values, segments),
    ):
        assert torch.equal(again[0], indices)
        assert torch.equal(again[1], limits)


@pytest.mark.parametrize("name", SEGMENTS)
def test_of_equal_magnitudes_the_first_are_selected(name):
    segments = SEGMENTS[name]
    for values in (
        torch.zeros(1000),
        torch.ones(1000).neg_(),
        torch.arange(1000.0).remainder(5) - 2,
        # which differ in the last bit of their significands only
        1 + 2**-23 * torch.arange(1000.0).remainder(3),
        1e-44 * torch.arange(1000.0).remainder(7),
    ):
        indices, limits = selection.select_largest(values, segments)
        assert (indices.tolist(), limits.tolist()) == by_hand(values, segments)


def test_elements_that_are_not_finite_are_selected_first():
    values = numbers(1000)
    values[[3, 500, 999]] = torch.tensor([torch.nan, -torch.inf, torch.inf])
    indices, _ = selection.select_largest(values, selection.Segments.of_density([1000], 0.003))
    assert indices.tolist() == [3, 500, 999]


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_above_a_limit_are_counted_and_selected(name, dtype):
    segments, values = SEGMENTS[name], numbers(1000, 1, dtype)
    values[::3] = 0
    limits = torch.rand(len(segments), generator=torch.Generator().manual_seed(2))
    limits[0] = 0
    expected = selection.select_above_reference(values, segments, limits)
    for threads in (1, 2):
        counts = selection.count_above(values, segments, limits, threads)
        assert torch.equal(
            selection.select_above(values, segments, limits, counts, threads), expected
        )
    assert counts.tolist() == np.histogram(expected, segments.bounds)[0].tolist()


def test_at_least_one_element_of_each_segment_is_selected():
    assert selection.Segments.of_density([1, 10, 300, 0], 0.01).counts.tolist() == [1, 1, 3]
    assert selection.Segments.of_chunks(0, 64, 0.5).total == 0
    assert selection.Segments.of_chunks(8192 + 5, 4096, 1 / 128).counts.tolist() == [32, 32, 1]


@pytest.mark.parametrize(
    ("num_elements", "count"),
    [
        *((1, 1), (1, 0), (2, 1), (9, 8), (9, 9), (1000, 1), (1000, 10), (1000, 700)),
        *((4096, 32), (2**31, 3), (2**40, 5), (100_000, 1000)),
    ],
)
def test_codes_of_indices_are_decoded_exactly(num_elements, count):
    generator = np.random.default_rng(count)
    for kind in ("random", "first", "last"):
        if kind == "random" and num_elements < 10**6:
            chosen = np.sort(generator.choice(num_elements, count, replace=False))
        else:
            chosen = np.arange(count) + (num_elements - count) * (kind == "last")
        indices = torch.from_numpy(chosen.astype(np.int64))
        code = torch.full((index_codes.code_bytes(num_elements, count),), 255, dtype=torch.uint8)
        index_codes.pack_indices(indices, num_elements, code)
        assert torch.equal(index_codes.unpack_indices(code, num_elements, count), indices)
        assert torch.equal(index_codes.unpack_indices_reference(code, num_elements, count), indices)
        again = torch.empty_like(code)
        index_codes.pack_indices_reference(indices, num_elements, again)
        assert torch.equal(again, code)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (10, 3), (10, 9), (1000, 50), (500, 499)])
def test_random_indices_equal_those_of_the_reference(sizes):
    num_elements, count = sizes
    for seed, step in [(0, 0), (2**64 - 1, 5), (7, 2**40)]:
        found = draw_indices(num_elements, count, seed, step)
        assert found.tolist() == draw_indices_reference(num_elements, count, seed, step)
        assert found.tolist() == sorted(set(found.tolist()))
        assert len(found) == count
    if count == 1:
        assert draw_index(num_elements, 3, 4) == int(draw_indices(num_elements, 1, 3, 4))


def test_random_indices_are_uniform_and_independent():
    trials, num_elements, count = 4000, 20, 5
    marks = np.zeros((trials, num_elements))
    for step in range(trials):
        marks[step, draw_indices(num_elements, count, 1, step).numpy()] = 1
    # a share of 1/4, whose standard deviation is 0.007
    assert np.abs(marks.mean(axis=0) - 0.25).max() < 0.03
    pairs = marks.T @ marks / trials
    off_diagonal = pairs[~np.eye(num_elements, dtype=bool)]
    assert np.abs(off_diagonal - 5 * 4 / (20 * 19)).max() < 0.02
    firsts = [draw_index(7, 1, step) for step in range(trials)]
    assert np.abs(np.bincount(firsts, minlength=7) / trials - 1 / 7).max() < 0.03
