"""Excluded edges are never sampled, and the others uniformly."""

import numpy as np
import pytest
import torch
from bits import same_tensors

from gcnzc.kernels.sample import Workspace, sample, sample_reference
from gcnzc.kernels.sample.exclude import exclude_edges, exclude_edges_reference, sort_columns

FANOUTS = [[5], [3, 4, 2], [64, 65], [-1, 0, 7], [130, -1], [1, 1, 1, 1], [127, 128]]


@pytest.fixture(scope="module")
def uneven():
    """400 nodes, sorted columns: degrees 0 to 40, one of 3000, some about 64 and 128, and twins."""
    random = np.random.default_rng(0)
    degrees = random.integers(0, 40, 400)
    degrees[:9] = [3000, 0, 63, 64, 65, 66, 127, 128, 129]
    indptr = np.concatenate([[0], degrees.cumsum()])
    indices, _ = sort_columns(indptr, random.integers(0, 400, indptr[-1]))
    return indptr, indices


def some(indptr, indices, seeds, share, random):
    """Of each seed's column about a share of the sources, as pairs and as a set of edges."""
    pairs = [
        (i, source)
        for i, node in enumerate(seeds)
        for source in np.unique(indices[indptr[node] : indptr[node + 1]])
        if random.random() < share
    ]
    locals_, sources = np.array(pairs, np.int64).reshape(-1, 2).T
    return locals_, sources, {(int(s), int(seeds[i])) for i, s in pairs}


@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 1.0])
def test_equals_reference(fanouts, share, table, uneven):
    indptr, indices = uneven
    random = np.random.default_rng(1)
    # more than one lot of destinations
    seeds = np.concatenate([np.arange(9), 9 + random.permutation(391)[:300]])
    locals_, sources, edges = some(indptr, indices, seeds, share, random)
    drawn = sample(
        torch.from_numpy(indptr),
        torch.from_numpy(indices.astype(np.int32)),
        torch.from_numpy(seeds),
        fanouts,
        7,
        3,
        edge_ids=True,
        excluded=exclude_edges(indptr, indices, seeds, locals_, sources),
        workspace=Workspace(),
    )
    kept = [part.tolist() for part in exclude_edges_reference(indptr, indices, seeds, edges)]
    graph = torch.from_numpy(indptr), torch.from_numpy(indices)
    expected = sample_reference(*graph, torch.from_numpy(seeds), fanouts, 7, 3, kept)
    assert drawn.num_nodes == expected.num_nodes
    assert same_tensors(drawn, expected)
    for hop, fanout in enumerate(fanouts):
        targets = drawn.nodes[: drawn.num_nodes[hop]].repeat_interleave(drawn.indptr[hop].diff())
        met = zip(indices[drawn.edge_ids[hop]].tolist(), targets.tolist(), strict=True)
        assert not edges & set(met)
        # a node with no more than its fanout left keeps all that is left
        degrees = torch.tensor([len(part) for part in kept])
        most = degrees if fanout < 0 else degrees.clamp(max=fanout)
        assert torch.equal(drawn.indptr[hop].diff()[: len(seeds)], most)
