"""A heterogeneous graph of papers and authors, and runs on it, for tests."""

import numpy as np
from training import saved

from gcnzc.graph import Graph

PAPERS, AUTHORS, CLASSES = 600, 200, 3
WRITES, WRITTEN = ("author", "writes", "paper"), ("paper", "written_by", "author")
CITES = ("paper", "cites", "paper")
# options of small and fast runs
SIZES = {"fanouts": (4, 4), "hidden": 16, "batch_size": 64, "lr": 0.01}
SIZES |= {"epochs": 3, "dropout": 0.2}


def build(seed=0):
    """Papers whose class is that of most of their authors; features of papers are noisy."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, PAPERS)
    topic = np.arange(AUTHORS) % CLASSES
    papers = np.repeat(np.arange(PAPERS), 3)
    # two of three authors have the topic of the paper
    authors = random.integers(0, AUTHORS // CLASSES, 3 * PAPERS) * CLASSES
    others = random.integers(0, CLASSES, 3 * PAPERS)
    authors += np.where(np.arange(3 * PAPERS) % 3, labels[papers], others)
    authors %= AUTHORS
    x = np.eye(CLASSES, dtype=np.float32)
    order = random.permutation(PAPERS)
    cites = random.integers(0, PAPERS, (2, 2 * PAPERS))
    return Graph.from_arrays(
        {
            "paper": {
                "features": x[labels] + 2 * random.normal(size=(PAPERS, CLASSES)),
                "labels": labels,
                "split": {"train": order[:400], "valid": order[400:500], "test": order[500:]},
                "time": np.arange(PAPERS) // 10,
            },
            "author": {"features": x[topic] + random.normal(size=(AUTHORS, CLASSES))},
        },
        {
            WRITES: {"edge_index": np.stack([authors, papers])},
            WRITTEN: {"edge_index": np.stack([papers, authors])},
            CITES: {"edge_index": cites},
        },
        name="papers",
    )


def parameters(run):
    return saved(run)["model"]
