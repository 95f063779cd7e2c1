"""The parts of layer-wise inference: ranges of nodes, layers, workers, and rows on disk."""
