"""A PyG sampler that returns the nodes and edges of a minibatch that gcnzc has sampled."""

from torch_geometric.data import HeteroData
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, SamplerOutput


class Recorded(BaseSampler):
    """Gives PyG's loaders the sampled nodes and edges of `batch`, with or without types."""

    edge_permutation = None

    def __init__(self, batch):
        self.batch = batch

    def sample_from_nodes(self, index, **kwargs):
        return self.output((index.input_id, index.time))

    def sample_from_edges(self, index, neg_sampling=None):
        batch = self.batch
        if neg_sampling is None or neg_sampling.is_binary():
            found = (batch.edge_label_index, batch.edge_label if "edge_label" in batch else None)
        else:
            found = (batch.src_index, batch.dst_pos_index, batch.dst_neg_index)
        return self.output((index.input_id, *found, None))

    def output(self, metadata):
        batch = self.batch
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
