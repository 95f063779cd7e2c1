"""Drop-in loaders for DGL, PyG, GraphBolt and Lightning, each imported on use."""
