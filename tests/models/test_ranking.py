"""Ranks of held-out edges among all nodes, compared with a ranking of each edge on its own."""

import numpy as np
import pytest
import torch

from gcnzc.models import ranking
from gcnzc.models.link import Dot, HadamardMLP
from gcnzc.models.ranking import HeldOutEdges, score_ranks


def brute_force(edges, known, scores, is_one_type):
    """Ranks by sorting the candidates of each edge, with the mean place of equal scores."""
    known = {tuple(pair) for pair in known.T.tolist()}
    held_out = {tuple(pair) for pair in edges.T.tolist()}
    count, found = scores.shape[1], []
    for source, item in edges.T.tolist():
        ranks = []
        for has_others in (False, True):
            candidates = [
                other
                for other in range(count)
                if other == item
                or ((source, other) in held_out and has_others)
                or (
                    (source, other) not in known | held_out
                    and not (is_one_type and other == source)
                )
            ]
            own = np.sort(-scores[source, candidates])
            value = -scores[source, item]
            best = np.searchsorted(own, value)
            worst = np.searchsorted(own, value, side="right") - 1
            ranks.append((best + worst) / 2 + 1)
        found.append(ranks)
    return np.array(found)


def brute_metrics(edges, ranks):
    result = {"mrr": np.mean(1 / ranks[:, 0])}
    for k in (1, 3, 10):
        result[f"hits@{k}"] = np.mean(ranks[:, 0] <= k)
    by_source = {}
    for (source, item), rank in zip(edges.T.tolist(), ranks[:, 1], strict=True):
        by_source.setdefault(source, {})[item] = rank
    for k in (10, 20, 50):
        shares = [np.mean([r <= k for r in own.values()]) for own in by_source.values()]
        result[f"recall@{k}"] = np.mean(shares)
        result[f"hit_rate@{k}"] = np.mean([share > 0 for share in shares])
    return result


@pytest.mark.parametrize("is_one_type", [False, True])
@pytest.mark.parametrize("levels", [6, 10**6])
def test_ranks_and_metrics_equal_those_of_each_edge(is_one_type, levels, monkeypatch):
    random = np.random.default_rng(levels + is_one_type)
    users, items, chunk = 23, 70, 200
    if is_one_type:
        users = items
    # few levels have many equal scores
    scores = random.integers(0, levels, (users, items)).astype(np.float32)
    edges = torch.from_numpy(random.integers(0, [[users], [items]], (2, 150)))
    # pairs that occur twice, and held-out pairs that are known
    edges = torch.cat([edges, edges[:, :20]], dim=1)
    known = torch.from_numpy(random.integers(0, [[users], [items]], (2, 300)))
    known = torch.cat([known, edges[:, 10:30]], dim=1)
    # several chunks of sources and of edges
    monkeypatch.setattr(ranking, "PAIRS_PER_CHUNK", chunk)
    held_out = HeldOutEdges(edges, known, items, is_one_type=is_one_type)
    assert torch.equal(held_out.edges, edges[:, edges[0].argsort(stable=True)])
    sizes = []

    def score(rows):
        sizes.append(len(rows))
        return torch.from_numpy(scores[held_out.sources[rows].numpy()])

    spans = [(0, 1), (1, 60), (60, 170)]
    ranks = torch.cat(list(held_out.compute_ranks(spans, score)))
    expected = brute_force(held_out.edges, known, scores, is_one_type)
    np.testing.assert_array_equal(ranks, expected)
    assert max(sizes) * items <= max(chunk, items)
    found = score_ranks(held_out.edges, ranks)
    wanted = brute_metrics(held_out.edges, expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value), name


def test_a_perfect_ranking_and_scores_without_a_rank():
    edges = torch.tensor([[0, 0, 1], [3, 4, 5]])
    held_out = HeldOutEdges(edges, torch.tensor([[0, 1], [0, 1]]), 100)
    scores = torch.zeros(2, 100)
    scores[edges[0], edges[1]] = 1
    # known destinations have the best scores, and are no candidates
    scores[0, 0] = scores[1, 1] = 2
    (ranks,) = held_out.compute_ranks([(0, 3)], lambda rows: scores[rows])
    assert ranks.tolist() == [[1, 1.5], [1, 1.5], [1, 1]]
    assert set(score_ranks(edges, ranks).values()) == {1.0}
    scores[1, 7] = torch.nan
    with pytest.raises(ValueError, match="scores: 1 of 200 values are NaN or infinite"):
        list(held_out.compute_ranks([(0, 3)], lambda rows: scores[rows]))


@pytest.mark.parametrize("decoder", [Dot(), HadamardMLP(8)])
def test_decoders_score_all_pairs_as_each_pair(decoder, monkeypatch):
    monkeypatch.setattr("gcnzc.models.link.PAIRS_PER_CHUNK", 20)
    torch.manual_seed(0)
    sources, targets = torch.randn(5, 8), torch.randn(11, 8)
    with torch.no_grad():
        found = decoder.score_all_pairs(sources, targets)
        for i, source in enumerate(sources):
            expected = decoder(source.expand_as(targets), targets)
            torch.testing.assert_close(found[i], expected)
