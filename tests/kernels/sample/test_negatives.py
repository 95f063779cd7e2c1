"""Negatives equal the reference, are no edges if strict, and are uniform."""

import numpy as np
import pytest
from scipy.stats import chi2

from gcnzc.kernels.sample.exclude import has_edge
from gcnzc.kernels.sample.negatives import (
    TRIES,
    in_batch_negatives,
    sample_negative_reference,
    sample_negatives,
)


def graph_of(pairs, num_nodes):
    """CSC with sorted columns."""
    pairs = sorted((t, s) for s, t in pairs)
    counts = np.bincount([t for t, _ in pairs], minlength=num_nodes)
    indices = np.array([s for _, s in pairs], np.int32)
    return np.concatenate([[0], counts.cumsum()]), indices


@pytest.fixture(scope="module")
def dense():
    """50 nodes, every second pair of which has an edge."""
    random = np.random.default_rng(0)
    there = random.random((50, 50)) < 0.5
    return graph_of([(s, t) for s in range(50) for t in range(50) if there[s, t]], 50)


@pytest.mark.parametrize("kind", ["uniform", "both"])
@pytest.mark.parametrize("strict", [False, True])
def test_equals_reference(kind, strict, dense):
    random = np.random.default_rng(1)
    items = np.array([0, 5, 2**32 + 1, 2**48 - 1, 7, 3])
    sources = random.integers(0, 50, len(items))
    drawn = sample_negatives(*dense, sources, items, 3, kind, strict, 2**64 - 5, 2**32 - 1)
    assert drawn.shape == (2, 18)
    for place, (source, target) in enumerate(drawn.T.tolist()):
        i, draw = divmod(place, 3)
        for attempt in range(TRIES):
            expected = sample_negative_reference(
                int(items[i]), draw, attempt, 50, 2**64 - 5, 2**32 - 1
            )
            s, t = expected[1] if kind == "both" else int(sources[i]), expected[0]
            if not strict or (s != t and not has_edge(*dense, s, t)):
                break
        assert (source, target) == (s, t)


@pytest.mark.parametrize("kind", ["uniform", "both"])
def test_strict_negatives_are_never_edges(kind, dense):
    sources = np.arange(1000) % 50
    loose = sample_negatives(*dense, sources, np.arange(1000), 5, kind, False, 0, 0)
    strict = sample_negatives(*dense, sources, np.arange(1000), 5, kind, True, 0, 0)
    for drawn, expected in ((loose, 0.5), (strict, 0.0)):
        share = np.mean([has_edge(*dense, *pair) for pair in drawn.T])
        assert abs(share - expected) <= (0.05 if expected else 0)
    assert (strict[0] != strict[1]).all()


@pytest.mark.parametrize("kind", ["uniform", "both"])
def test_the_only_remaining_pair_is_found(kind):
    # all pairs of 300 nodes but 7 -> 200: 32 tries hardly ever meet it
    graph = graph_of([(s, t) for s in range(300) for t in range(300) if (s, t) != (7, 200)], 300)
    drawn = sample_negatives(*graph, np.full(20, 7), np.arange(20), 2, kind, True, 0, 0)
    assert (drawn == [[7], [200]]).all()


@pytest.mark.parametrize(
    ("kind", "who"), [("uniform", "node 2 and all others"), ("both", "every pair")]
)
def test_sources_without_negatives_are_reported(kind, who):
    graph = graph_of([(s, t) for s in range(5) for t in range(5) if s != t], 5)
    with pytest.raises(ValueError, match=rf"edges between {who}.*\n\nhint: "):
        sample_negatives(*graph, np.array([2, 1]), np.arange(2), 1, kind, True, 0, 0)
    assert sample_negatives(*graph, np.array([2, 1]), np.arange(2), 1, kind, False, 0, 0).shape == (
        2,
        2,
    )


@pytest.mark.parametrize("strict", [False, True])
def test_destinations_are_uniform(strict):
    # node 0 has edges to a quarter of the nodes
    num_nodes, num_items = 60, 60_000
    graph = graph_of([(0, t) for t in range(0, 60, 4)], num_nodes)
    drawn = sample_negatives(
        *graph, np.zeros(num_items, np.int64), np.arange(num_items), 1, "uniform", strict, 3, 0
    )
    counts = np.bincount(drawn[1], minlength=num_nodes)
    may = np.arange(num_nodes) % 4 > 0 if strict else np.ones(num_nodes, bool)
    assert (counts[~may] == 0).all()
    expected = num_items / may.sum()
    statistic = ((counts[may] - expected) ** 2 / expected).sum()
    assert 1e-3 < chi2.sf(statistic, may.sum() - 1) < 1 - 1e-3


def test_epochs_seeds_items_and_draws_give_different_negatives(dense):
    def drawn(seed, epoch, first):
        items = np.arange(first, first + 100)
        return sample_negatives(*dense, items % 50, items, 2, "uniform", False, seed, epoch)[1]

    first = drawn(0, 0, 0)
    for other in (drawn(1, 0, 0), drawn(0, 1, 0), drawn(0, 0, 1000), first[::-1]):
        assert (other == first).mean() < 0.2
    assert (first[::2] == first[1::2]).mean() < 0.2


def test_in_batch_negatives_are_the_next_destinations():
    edges = np.array([[0, 1, 2, 3], [4, 5, 6, 4]])
    graph = graph_of([(0, 5), (2, 4)], 7)
    everything = in_batch_negatives(*graph, edges, 2, False)
    assert everything.T.tolist() == [
        [0, 5], [0, 6], [1, 6], [1, 4], [2, 4], [2, 4], [3, 5]
    ]  # fmt: skip
    # 0 -> 5 and 2 -> 4 are edges
    assert in_batch_negatives(*graph, edges, 2, True).T.tolist() == [[0, 6], [1, 6], [1, 4], [3, 5]]
    # there are three others at most, and none of a single edge
    assert (
        in_batch_negatives(*graph, edges, 9, False).tolist()
        == in_batch_negatives(*graph, edges, 3, False).tolist()
    )
    assert in_batch_negatives(*graph, edges[:, :1], 9, False).shape == (2, 0)
