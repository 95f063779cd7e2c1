"""When workers exchange, and what is done with it."""

from gcnzc.optim.averaged import Averaged

__all__ = ["Averaged"]
