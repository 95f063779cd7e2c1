"""A graph of the examples: a .npz archive with edge_index, node features, labels and a split.

    python examples/dgl_node.py amazon_photo.npz

Any graph will do; this is the part that you have in some other form.
"""

import argparse

import numpy as np
import torch

_parser = argparse.ArgumentParser()
_parser.add_argument("archive", help="a .npz archive, such as amazon_photo.npz")
_parser.add_argument("--seed", type=int, help="seed of every random choice")
_parser.add_argument("--epochs", type=int, help="passes over the training items")
OPTIONS = _parser.parse_args()


def read():
    """Edges (2, E), features (N, F), labels (N,), and ids of nodes by "train", "valid", "test"."""
    archive = np.load(OPTIONS.archive, allow_pickle=False)
    labels = torch.from_numpy(archive["node_label"]).long()
    if "node_feat" in archive:
        features = torch.from_numpy(archive["node_feat"]).float()
    else:
        parts = (archive[f"feat_{name}"] for name in ("indptr", "indices", "data"))
        indptr, indices, data = (torch.from_numpy(part) for part in parts)
        rows = torch.arange(len(labels)).repeat_interleave(indptr.diff())
        features = torch.zeros(*archive["feat_shape"].tolist())
        features[rows, indices.long()] = data.float()
    edges = torch.from_numpy(archive["edge_index"]).long()
    if archive["add_inverse_edge"]:
        edges = torch.cat([edges, edges.flip(0)], dim=1)
    split = {}
    for part in ("train", "valid", "test"):
        name = f"{part}_idx" if f"{part}_idx" in archive else f"made_{part}_idx"
        split[part] = torch.from_numpy(archive[name]).long()
    return edges, features, labels, split


def option(name, default):
    """The value of `--name VALUE` on the command line."""
    value = getattr(OPTIONS, name)
    return default if value is None else value
