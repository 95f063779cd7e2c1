"""PyG's own loaders of nodes and edges that gcnzc has sampled, and equality of minibatches."""

import torch
from torch_geometric.data import HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NegativeSampling,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample


def assert_equal(mine, other, left_out=()):
    """Check that two minibatches have the same values; those of `mine` may be on a GPU."""
    found, expected = values_of(mine, left_out), values_of(other, left_out)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name].cpu(), value), name
        else:
            assert found[name] == value, name


def assert_same(found, expected, left_out=()):
    """Check that two loaders yield the same minibatches."""
    for mine, other in zip(found, expected, strict=True):
        assert_equal(mine, other, left_out)


def values_of(batch, left_out):
    """Return all values but None by type and name."""
    return {
        (store._key, name): value
        for store in batch.stores
        for name, value in store.items()
        if value is not None and name not in left_out
    }


class Fixed(NegativeSampling):
    """Returns given negative nodes, by endpoint."""

    def sample(self, num_samples, endpoint, num_nodes=None):
        assert len(self.negatives[endpoint]) == num_samples
        return self.negatives[endpoint]


class Recorded(BaseSampler):
    """Gives PyG's loaders the sampled nodes, edges and negatives of minibatches, one after another.

    Args:
        batches: with or without types.
        edge_type: of the seed edges, in minibatches with types.
    """

    edge_permutation = None

    def __init__(self, *batches, edge_type=None):
        self.batches, self.edge_type = iter(batches), edge_type

    def sample_from_nodes(self, index, **kwargs):
        return self.output(next(self.batches), (index.input_id, index.time))

    def sample_from_edges(self, index, neg_sampling=None):
        batch = next(self.batches)
        if neg_sampling is not None:
            neg_sampling = Fixed(neg_sampling.mode, neg_sampling.amount)
            neg_sampling.negatives = self.negatives_of(batch, len(index.row))
        is_typed = isinstance(batch, HeteroData)
        num_nodes = dict.fromkeys(batch.node_types, 0) if is_typed else 0
        is_disjoint = any("batch" in store for store in batch.node_stores)

        def sample(seeds, times):
            for kind, ids in seeds.items() if is_typed else [(None, seeds)]:
                nodes = batch[kind].n_id if is_typed else batch.n_id
                assert torch.equal(nodes[: len(ids)], ids)
            return self.output(batch)

        return edge_sample(index, sample, num_nodes, is_disjoint, None, neg_sampling)

    def negatives_of(self, batch, num_pairs):
        """The negative nodes of a minibatch, in the order in which PyG samples them."""
        edges, ends = batch, (batch, batch)
        if self.edge_type is not None:
            edges, ends = batch[self.edge_type], [batch[kind] for kind in self.edge_type[::2]]
        if "edge_label_index" in edges:
            local = edges.edge_label_index[:, num_pairs:]
            found = [end.n_id[ids] for end, ids in zip(ends, local, strict=True)]
            return {"src": found[0], "dst": found[1]}
        found = ends[1].dst_neg_index
        return {"dst": ends[1].n_id[(found.t() if "batch" in ends[1] else found).flatten()]}

    def output(self, batch, metadata=None):
        is_typed = isinstance(batch, HeteroData)

        def collect(name, stores):
            if not is_typed:
                return batch.get(name)
            found = {store._key: store[name] for store in stores if name in store}
            return found or None

        ends, edge = collect("edge_index", batch.edge_stores), None
        if is_typed:
            row, col = ({each: pair[end] for each, pair in ends.items()} for end in (0, 1))
            # None for each type without ids of edges
            edge = {each: batch[each].get("e_id") for each in batch.edge_types}
        else:
            (row, col), edge = ends, batch.e_id
        return (HeteroSamplerOutput if is_typed else SamplerOutput)(
            node=collect("n_id", batch.node_stores),
            row=row,
            col=col,
            edge=edge,
            batch=collect("batch", batch.node_stores),
            num_sampled_nodes=collect("num_sampled_nodes", batch.node_stores),
            num_sampled_edges=collect("num_sampled_edges", batch.edge_stores),
            metadata=metadata,
        )
