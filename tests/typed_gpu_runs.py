"""Train on a heterogeneous graph on the CPU and on a fake GPU.

    python -m fake_cuda -m typed_gpu_runs FOLDER

Users have embeddings, and the features of items are page-locked.
"""

import sys
import warnings
from pathlib import Path

import typed_shop

import gcnzc
from gcnzc.train import TrainConfig, results, tracing, train


def main():
    folder = Path(sys.argv[1])
    gcnzc.prepare(typed_shop.without_features(typed_shop.build(), "user"), folder / "shop")
    # pictures would take most of the time
    tracing.timeline = results.curves = lambda *_: None
    warnings.filterwarnings("ignore", "the graph has times")
    for device in ("cpu", "cuda"):
        config = TrainConfig(
            data=folder / "shop",
            # evaluated without the area under the curve, for which sklearn would be imported
            task="link:edge_type=buys,evaluate_negatives=all",
            model="hetero-sage",
            hidden=8,
            fanouts=(3, 3),
            embeddings="adagrad:dim=4",
            batch_size=120,
            epochs=1,
            trace=2,
            device=device,
        )
        train(config, folder / device)


if __name__ == "__main__":
    main()
