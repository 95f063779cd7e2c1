"""Execute collectives of any size by gcnzc's messages, or by the process group's collectives."""

from bench.network.collectives import executed_by
from gcnzc.exchange import lockstep

WAYS = ("messages", "builtin")


def lockstep_by(way, algorithms, *arguments, **options):
    """Run `lockstep` with all collectives by "messages" or "builtin"."""
    with executed_by(way):
        return lockstep(algorithms, *arguments, **options)
