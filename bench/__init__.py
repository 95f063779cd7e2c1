"""Benchmarks of gcnzc, run from the root of the repository: `python -m bench.<group>.<name>`."""
