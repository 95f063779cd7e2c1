"""Measure DGL's GraphBolt: its loader with 0 to 2 workers, with and without features."""

import dgl
import dgl.graphbolt as gb
import torch
from serve import BATCH_SIZE, FANOUTS, arrays, serve


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    graph = gb.fused_csc_sampling_graph(torch.from_numpy(indptr), torch.from_numpy(indices).long())
    store = gb.BasicFeatureStore(
        {("node", None, "features"): gb.TorchBasedFeature(torch.from_numpy(features))}
    )

    def load(workers, with_features):
        def batches(seeds):
            items = gb.ItemSet(torch.from_numpy(seeds), names="seed_nodes")
            pipe = gb.ItemSampler(items, batch_size=BATCH_SIZE, shuffle=False)
            pipe = pipe.sample_neighbor(graph, FANOUTS)
            if with_features:
                pipe = pipe.fetch_feature(store, node_feature_keys=["features"])
            for batch in gb.DataLoader(pipe, num_workers=workers, persistent_workers=False):
                nodes = len(batch.input_nodes)
                if with_features:
                    assert batch.node_features["features"].shape == (nodes, features.shape[1])
                layers = batch.sampled_subgraphs
                yield nodes, sum(len(layer.sampled_csc.indices) for layer in layers)

        return batches

    configurations = {f"loader, {workers} workers": load(workers, True) for workers in (0, 1, 2)}
    versions = {"dgl": dgl.__version__, "torch": torch.__version__}
    return configurations | {"loader without features": load(0, False)}, versions


serve(make)
