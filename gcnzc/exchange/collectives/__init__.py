"""Collectives: their requests, and their algorithms made of point-to-point messages.

Each algorithm is a generator that yields `Scratch`, `Send` and `Receive`, and `Start` and `Wait` of
messages. The table has their times for W ranks, M bytes, a latency of α seconds per message and an
outgoing bandwidth of B bytes/s per rank (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005):

    doubling_sum     log2 W (α + M/B), if W is a power of two
    halving_sum      2 log2 W α + 2 (W - 1)/W M/B, if W is a power of two
    ring_sum         2 (W - 1) α + 2 (W - 1)/W M/B
    doubling_gather  ⌈log2 W⌉ α + (W - 1) M/B
    chain            (⌈M/C⌉ + W - 2) (α + C/B), in pieces of C bytes
    binomial         ⌈log2 W⌉ (α + M/B)

For another W, sums by doubling and halving use the next lower power of two, and two more messages
of M bytes: some ranks first send their values to another rank, which sends the result back.

All receives are posted at the start, or in a ring of many ranks those of the next turns. gloo sends
a message only when its receiver has posted the receive, and the notification takes as long as a
message; so only the first round takes 2 α. A message cannot overwrite memory that is still read:
the sender computed the message from the data that this rank sent from that memory.
"""

from gcnzc.exchange.collectives.all_gather import AllGather, AllGatherScalar
from gcnzc.exchange.collectives.all_reduce import Mean, Sum
from gcnzc.exchange.collectives.all_to_all import AllToAll, ReduceScatter
from gcnzc.exchange.collectives.broadcast import Broadcast
from gcnzc.exchange.collectives.pairs import SendReceive
from gcnzc.exchange.collectives.subgroup import Subgroup
from gcnzc.exchange.requests import Collective

__all__ = [
    "COLLECTIVES",
    "AllGather",
    "AllGatherScalar",
    "AllToAll",
    "Broadcast",
    "Mean",
    "ReduceScatter",
    "SendReceive",
    "Subgroup",
    "Sum",
]

COLLECTIVES: dict[str, type[Collective]] = {
    each.kind: each
    for each in (Sum, AllGather, Broadcast, ReduceScatter, AllToAll, SendReceive, AllGatherScalar)
}
"""By kind, a request of it; a `Mean` has the kind "Sum"."""
