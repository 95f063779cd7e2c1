"""Handwritten digits as a k-nearest-neighbour graph: small real data without a download.

scikit-learn contains 1,797 images of 8 x 8 pixels (Alpaydin and Kaynak, "Optical Recognition of
Handwritten Digits", UCI, 1998, CC BY 4.0). Edges connect each image with the images nearest to it.
"""

import numpy as np

from gcnzc.datasets.generated import Chunks, Generated, random_split
from gcnzc.datasets.rows import rows_from_array

NUM_CLASSES = 10
LARGEST_PIXEL = 16


def digits(*, neighbours: int = 8, seed: int = 0, name: str = "digits") -> Generated:
    """Build the k-nearest-neighbour graph of the digits, by Euclidean distance.

    Args:
        neighbours: k, at least 1. An edge between mutual neighbours is stored once.
        seed: of the split: 60 % train, 20 % valid, 20 % test.
        name: of the dataset.

    Raises:
        ValueError: `neighbours` is out of range.
    """
    # on use: few processes build this graph, and the import takes longer than torch's
    from sklearn.datasets import load_digits
    from sklearn.neighbors import NearestNeighbors

    pixels, labels = load_digits(return_X_y=True)
    num_nodes = len(pixels)
    if not 1 <= neighbours < num_nodes:
        raise ValueError(
            f"{neighbours} neighbours of {num_nodes} images\n\n"
            f"hint: neighbours is from 1 to {num_nodes - 1}"
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
        random_split(seed, num_nodes, {"train": 0.6, "valid": 0.2, "test": 0.2}),
        Chunks(lambda chunk, begin, end: ends[:, begin:end], ends.shape[1], ends.shape[1], 1),
        rows_from_array((pixels / LARGEST_PIXEL).astype(np.float32), f"{name}'s features"),
        None,
        {"generator": "digits", "seed": seed, "neighbours": neighbours, "licence": "CC BY 4.0"},
    )
