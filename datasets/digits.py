"""Handwritten digits as a graph: a small real one that needs no download.

1,797 images of 8 x 8 pixels come with scikit-learn (Alpaydin and Kaynak, "Optical Recognition of
Handwritten Digits", UCI, 1998, CC BY 4.0). Every image is joined to the images nearest to it.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

from gcnzc.datasets.generated import Chunks, Generated, random_parts
from gcnzc.datasets.rows import rows_of_array

NUM_CLASSES = 10
LARGEST_PIXEL = 16


def digits(*, neighbours: int = 8, seed: int = 0, name: str = "digits") -> Generated:
    """The digits, each joined to its `neighbours` nearest by Euclidean distance.

    Args:
        neighbours: at least 1. Two images are joined once, also if each is near the other.
        seed: of the split: 60 % train, 20 % valid, 20 % test.
        name: of the graph.

    Raises:
        ValueError: there are not as many neighbours.
    """
    pixels, labels = load_digits(return_X_y=True)
    num_nodes = len(pixels)
    if not 1 <= neighbours < num_nodes:
        raise ValueError(
            f"{neighbours} neighbours of {num_nodes} images\n\nhint: from 1 to {num_nodes - 1}"
        )
    nearest = NearestNeighbors(n_neighbors=neighbours, algorithm="brute").fit(pixels)
    found = nearest.kneighbors(return_distance=False).reshape(-1)
    ends = np.stack([np.repeat(np.arange(num_nodes), neighbours), found])
    ends = np.unique(np.sort(ends, axis=0), axis=1)
    return Generated(
        name,
        num_nodes,
        ends.shape[1],
        NUM_CLASSES,
        labels,
        random_parts(seed, num_nodes, {"train": 0.6, "valid": 0.2, "test": 0.2}),
        Chunks(lambda chunk, begin, end: ends[:, begin:end], ends.shape[1], ends.shape[1], 1),
        rows_of_array((pixels / LARGEST_PIXEL).astype(np.float32), f"{name}'s features"),
        None,
        {"generator": "digits", "seed": seed, "neighbours": neighbours, "licence": "CC BY 4.0"},
    )
