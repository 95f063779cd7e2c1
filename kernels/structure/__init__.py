"""The structure of a graph: edge lists, columns and their transpose."""
