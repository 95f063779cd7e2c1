"""Training on graphs with several types of nodes and edges."""
