"""The typed graph of the heterogeneous examples, as PyG's `HeteroData`.

    gcnzc make data/typed --kind typed --nodes 20000 --edges 300000 --num-features 16 --classes 8
    python examples/pyg_hetero.py data/typed

Any graph will do; this is the part that you have in some other form.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import HeteroData

_parser = argparse.ArgumentParser()
_parser.add_argument("folder", type=Path, help="a folder of `gcnzc make --kind typed`")
_parser.add_argument("--seed", type=int, default=0, help="seed of every random choice")
_parser.add_argument("--epochs", type=int, help="passes over the training items")
OPTIONS = _parser.parse_args()


def _arrays(name):
    with np.load(OPTIONS.folder / f"raw/{name}.npz") as archive:
        return {key: torch.from_numpy(archive[key]) for key in archive}


def read():
    """The graph; ids of users by "train", "valid" and "test"; and the best possible accuracy.

    Edges have the attribute `time`, and users `label_time`, the time for which `y` is predicted.
    """
    data = HeteroData()
    for name, features in _arrays("node_feat_dict").items():
        data[name].x = features
    for key, edges in _arrays("edge_index_dict").items():
        data[tuple(key.split("___"))].edge_index = edges
    for key, times in _arrays("edge_time_dict").items():
        data[tuple(key.split("___"))].time = times[:, 0]
    # reverse edges, so that each node type has in-edges
    for source, relation, target in (("brand", "makes", "item"), ("query", "asked_by", "user")):
        forward, back = data[source, relation, target], data[target, f"rev_{relation}", source]
        back.edge_index, back.time = forward.edge_index.flip(0), forward.time
    data["user"].label_time = _arrays("node_time_dict")["user"][:, 0]
    data["user"].y = _arrays("node-label")["user"][:, 0]
    split = {}
    for part in ("train", "valid", "test"):
        path = OPTIONS.folder / f"split/time/user/{part}.csv.gz"
        split[part] = torch.from_numpy(np.loadtxt(path, dtype=np.int64))
    task = json.loads((OPTIONS.folder / "task.json").read_text())
    return data, split, task["best_accuracy"]
