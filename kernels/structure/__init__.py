"""Conversions of graph structure: edge lists, CSC, and the transpose of a block."""
