"""Draw neighbours of seeds, hop by hop, and give the nodes met local numbers.

Every destination of a hop keeps `fanout` of its in-edges, drawn uniformly without replacement by
Floyd's method (Bentley and Floyd, "A sample of brilliance", CACM 1987,
https://doi.org/10.1145/30401.315746), or all of them if it has no more. Word w of Philox becomes a
position below n as (w * n) >> 32, whose probabilities are within n / 2**32 of uniform, relatively.
The words depend on the seed, epoch, hop and node alone, so a node has the same neighbours in
whatever batch, order, thread or process it is drawn.

Letters: N nodes and E edges in the graph, L hops, S seeds, B nodes in a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numba import int64, njit, uint64
from torch import Tensor

from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key

ALL = -1  # the fan-out that keeps every neighbour


@dataclass(frozen=True)
class Sample:
    """A neighbourhood of L hops. Hop 0 is the seeds' own."""

    nodes: Tensor  # (B,) int64 ids in the graph, the seeds first, the others as they were met
    num_nodes: tuple[int, ...]  # (L + 1,) how many were known before each hop, and at the end
    indptr: tuple[Tensor, ...]  # L of (num_nodes[hop] + 1,) int64
    indices: tuple[Tensor, ...]  # L of (edges,) int32 places in `nodes`
    edge_ids: tuple[Tensor, ...] | None  # L of (edges,) int64 positions in the graph's indices


def sample_reference(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanouts: list[int], seed: int, epoch: int
) -> Sample:
    """What `sample` must equal, bit for bit, with Python's own lists and dictionaries."""
    nodes = seeds.tolist()
    places = {node: place for place, node in reversed(list(enumerate(nodes)))}
    num_nodes, blocks = [len(nodes)], []
    for hop, fanout in enumerate(fanouts):
        ends, kept, sources = [0], [], []
        for node in nodes[: num_nodes[hop]]:
            begin, end = indptr[node : node + 2].tolist()
            kept += [
                begin + position for position in _draw(end - begin, fanout, node, hop, seed, epoch)
            ]
            ends.append(len(kept))
        for source in (int(indices[edge]) for edge in kept):
            if source not in places:
                places[source] = len(nodes)
                nodes.append(source)
            sources.append(places[source])
        num_nodes.append(len(nodes))
        blocks.append((ends, sources, kept))
    indptrs, places_of_sources, edge_ids = zip(*blocks, strict=True)
    return Sample(
        torch.tensor(nodes, dtype=torch.int64),
        tuple(num_nodes),
        tuple(torch.tensor(ends, dtype=torch.int64) for ends in indptrs),
        tuple(torch.tensor(sources, dtype=torch.int32) for sources in places_of_sources),
        tuple(torch.tensor(kept, dtype=torch.int64) for kept in edge_ids),
    )


def _draw(degree: int, fanout: int, node: int, hop: int, seed: int, epoch: int) -> list[int]:
    """Positions below `degree`, in the order drawn."""
    if fanout == ALL or degree <= fanout:
        return list(range(degree))
    quads = np.arange((fanout + 3) // 4)
    counter = (quads, node & 0xFFFFFFFF, (node >> 32) | (hop << 16), epoch)
    words = np.stack(philox4x32_reference(*counter, *split_key(seed)), axis=1).ravel().tolist()
    chosen: list[int] = []
    for word, last in zip(words, range(degree - fanout, degree), strict=False):
        position = word * (last + 1) >> 32
        chosen.append(last if position in chosen else position)
    return chosen


# destinations, and about how many edges, taken at once: what they need stays in the first caches
LOT_DESTINATIONS = 256
LOT_EDGES = 4096
# up to here a chosen position is looked for among those before it, above in a map of bits
SCANNED = 64
# the table is at most half full, so that a search ends after a slot or two
SLOTS_PER_NODE = 2
MAX_NODES = 2**31 - 1  # local numbers are int32
# fields of `progress`
HOP, DESTINATION, NODES, EDGES, NEED_INDPTR, NEED_NODES, NEED_EDGES = range(7)


@njit(cache=True, nogil=True)
def _ask(array, position):
    prefetch(int64(array.ctypes.data) + position * array.itemsize)


@njit(cache=True, nogil=True)
def _slot(node, shift):
    # Fibonacci hashing: the top bits of a product with 2**64 / golden ratio
    return int64((uint64(node) * uint64(0x9E3779B97F4A7C15)) >> shift)


@njit(cache=True, nogil=True)
def _place(node, table, shift, base, nodes, count):
    """The local number of `node`, or `count` after entering it as that.

    A slot holds the low half of an id above its stamp, which is `base` plus its local number; a
    stamp below `base` is of an earlier batch, and its slot is free.
    """
    low = uint64(node) & uint64(0xFFFFFFFF)
    slot = _slot(node, shift)
    while True:
        entry = table[slot]
        stamp = entry & uint64(0xFFFFFFFF)
        if stamp < base:
            table[slot] = (low << uint64(32)) | (base + uint64(count))
            return count
        # ids that differ by a multiple of 2**32 share their low half
        if entry >> uint64(32) == low and nodes[int64(stamp - base)] == node:
            return int64(stamp - base)
        slot += 1
        if slot == len(table):
            slot = 0


@njit(cache=True, nogil=True)
def _enter(table, shift, base, nodes, count):
    """Put the first `count` nodes into a table that has none of them."""
    for place in range(count):
        _place(nodes[place], table, shift, base, nodes, place)


@njit(cache=True, nogil=True)
def _choose(begin, degree, fanout, node, hop, key_0, key_1, epoch, bits, positions, filled):
    """Write `fanout` of the `degree` positions from `begin` into `positions[filled:]`."""
    low, high = node & uint64(0xFFFFFFFF), (node >> uint64(32)) | (uint64(hop) << uint64(16))
    seen = uint64(0)
    draw = 0
    while draw < fanout:
        quad = philox4x32(uint64(draw >> 2), low, high, epoch, key_0, key_1)
        for word in quad:
            if draw == fanout:
                break
            last = degree - fanout + draw
            position = int64((word * uint64(last + 1)) >> uint64(32))
            mask = uint64(1) << uint64(position & 63)
            if fanout > SCANNED:
                if bits[position >> 6] & mask:
                    position = last
                bits[position >> 6] |= uint64(1) << uint64(position & 63)
            else:
                if seen & mask:
                    # the bit is shared by positions that differ by a multiple of 64
                    for earlier in range(filled, filled + draw):
                        if positions[earlier] == begin + position:
                            position = last
                            break
                seen |= uint64(1) << uint64(position & 63)
            positions[filled + draw] = begin + position
            draw += 1
    if fanout > SCANNED:
        for earlier in range(filled, filled + fanout):
            bits[(positions[earlier] - begin) >> 6] = uint64(0)


@njit(cache=True, nogil=True)
def _sample(
    indptr,
    indices,
    fanouts,
    key_0,
    key_1,
    epoch,
    table,
    shift,
    base,
    nodes,
    out_indptr,
    out_indices,
    out_edge_ids,
    progress,
    num_nodes,
    num_edges,
):
    """Go on from `progress`; False if a buffer is too small, and then `progress` says which."""
    hop, destination = progress[HOP], progress[DESTINATION]
    count, edges = progress[NODES], progress[EDGES]
    begins = np.empty(LOT_DESTINATIONS, np.int64)
    degrees = np.empty(LOT_DESTINATIONS, np.int64)
    positions = np.empty(LOT_EDGES, np.int64)
    bits = np.zeros(1, np.uint64)
    limit = min(len(nodes), len(table) // SLOTS_PER_NODE)
    while hop < len(fanouts):
        fanout = fanouts[hop]
        num_destinations = num_nodes[hop]
        # the hops' offsets lie one behind the other, each with its own leading zero
        first = hop
        for before in range(hop):
            first += num_nodes[before]
        if destination == 0:
            if len(out_indptr) < first + num_destinations + 1:
                progress[NEED_INDPTR] = first + num_destinations + 1
                progress[HOP], progress[DESTINATION] = hop, 0
                progress[NODES], progress[EDGES] = count, edges
                return False
            out_indptr[first] = 0
        while destination < num_destinations:
            taken = 0
            total = 0
            while (
                taken < LOT_DESTINATIONS
                and destination + taken < num_destinations
                and total < LOT_EDGES
            ):
                node = nodes[destination + taken]
                begins[taken] = indptr[node]
                degree = indptr[node + 1] - indptr[node]
                degrees[taken] = degree
                total += degree if fanout < 0 else min(degree, fanout)
                taken += 1
            if edges + total > len(out_indices) or count + total > limit:
                progress[NEED_NODES], progress[NEED_EDGES] = count + total, edges + total
                progress[HOP], progress[DESTINATION] = hop, destination
                progress[NODES], progress[EDGES] = count, edges
                return False
            if total > len(positions):
                positions = np.empty(2 * total, np.int64)
            # the next lot's offsets are on their way while this lot is drawn
            ahead = min(destination + taken + LOT_DESTINATIONS, num_destinations)
            for i in range(destination + taken, ahead):
                _ask(indptr, nodes[i])

            filled = 0
            for i in range(taken):
                begin, degree = begins[i], degrees[i]
                if fanout < 0 or degree <= fanout:
                    for position in range(degree):
                        positions[filled + position] = begin + position
                    kept = degree
                else:
                    if fanout > SCANNED and degree > len(bits) * 64:
                        bits = np.zeros((degree + 63) // 64, np.uint64)
                    node = uint64(nodes[destination + i])
                    _choose(
                        begin,
                        degree,
                        fanout,
                        node,
                        hop,
                        key_0,
                        key_1,
                        epoch,
                        bits,
                        positions,
                        filled,
                    )
                    kept = fanout
                for i_kept in range(filled, filled + kept):
                    _ask(indices, positions[i_kept])
                filled += kept
                out_indptr[first + destination + i + 1] = edges - num_edges[hop] + filled

            if len(out_edge_ids):
                for i in range(total):
                    out_edge_ids[edges + i] = positions[i]
            for i in range(total):
                source = int64(indices[positions[i]])
                positions[i] = source
                _ask(table, _slot(source, shift))
            for i in range(total):
                source = positions[i]
                place = _place(source, table, shift, base, nodes, count)
                if place == count:
                    nodes[count] = source
                    count += 1
                out_indices[edges + i] = place
            edges += total
            destination += taken
        hop += 1
        destination = 0
        num_nodes[hop] = count
        num_edges[hop] = edges
    progress[NODES], progress[EDGES] = count, edges
    return True


class Workspace:
    """What one thread needs to sample, kept from batch to batch.

    A table from ids to local numbers, sized to the batches and not to the graph: 8 B a slot, two to
    four slots a node.
    """

    def __init__(self) -> None:
        self.table = np.zeros(2**12, np.uint64)
        self.base = 1
        # entries that the last batches needed, so that buffers are large enough at once
        self.room_indptr = self.room_nodes = self.room_edges = 1024

    def start(self) -> None:
        """Make the table free of the batch before."""
        if self.base + MAX_NODES >= 2**32:
            self.table[:] = 0
            self.base = 1

    @property
    def shift(self) -> np.uint64:
        """By how many bits a 64-bit product is shifted to be a slot's number."""
        return np.uint64(65 - len(self.table).bit_length())

    def grow(self, num_nodes: int, nodes: np.ndarray, known: int) -> None:
        """Make room for `num_nodes`, of which `known` are known."""
        if num_nodes * SLOTS_PER_NODE <= len(self.table):
            return
        self.table = np.zeros(1 << (num_nodes * SLOTS_PER_NODE - 1).bit_length(), np.uint64)
        self.base = 1
        _enter(self.table, self.shift, np.uint64(1), nodes, known)


def _empty(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


def sample(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    seed: int,
    epoch: int,
    *,
    edge_ids: bool = False,
    workspace: Workspace | None = None,
    empty: Callable[[int, torch.dtype], Tensor] = _empty,
) -> Sample:
    """Draw the neighbourhood of `seeds`.

    Args:
        indptr: (N + 1,) int64, monotone, on the CPU.
        indices: (E,) int32 or int64, in [0, N), on the CPU.
        seeds: (S,) int64 in [0, N), not checked: one outside reads foreign memory. One that occurs
            twice is two destinations with the same neighbours; edges lead to its first place.
        fanouts: L numbers, from the seeds outward; -1 keeps all neighbours.
        seed: the key of every choice, below 2**64.
        epoch: in [0, 2**32); another epoch makes other choices.
        edge_ids: also give the position of every edge in `indices`.
        workspace: kept from call to call, it saves time; used by one thread at a time.
        empty: gives the memory of the result.

    Raises:
        ValueError: an epoch or seed out of range, or a batch of 2**31 nodes.
    """
    if workspace is None:
        workspace = Workspace()
    if not 0 <= epoch < 2**32:
        raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
    num_hops, num_seeds = len(fanouts), len(seeds)
    nodes = empty(max(workspace.room_nodes, num_seeds), torch.int64)
    out_indptr = empty(workspace.room_indptr, torch.int64)
    out_indices = empty(workspace.room_edges, torch.int32)
    out_edge_ids = empty(workspace.room_edges if edge_ids else 0, torch.int64)
    nodes[:num_seeds] = seeds

    workspace.start()
    workspace.grow(num_seeds, nodes.numpy(), 0)
    _enter(workspace.table, workspace.shift, np.uint64(workspace.base), nodes.numpy(), num_seeds)
    num_nodes = np.zeros(num_hops + 1, np.int64)
    num_edges = np.zeros(num_hops + 1, np.int64)
    progress = np.zeros(7, np.int64)
    num_nodes[0] = progress[NODES] = num_seeds
    key_0, key_1 = split_key(seed)
    while not _sample(
        indptr.numpy(),
        indices.numpy(),
        np.asarray(fanouts, np.int64),
        np.uint64(key_0),
        np.uint64(key_1),
        np.uint64(epoch),
        workspace.table,
        workspace.shift,
        np.uint64(workspace.base),
        nodes.numpy(),
        out_indptr.numpy(),
        out_indices.numpy(),
        out_edge_ids.numpy(),
        progress,
        num_nodes,
        num_edges,
    ):
        need_nodes = int(progress[NEED_NODES])
        if need_nodes > MAX_NODES:
            raise ValueError(
                f"a batch of {num_seeds} seeds with fan-outs {list(fanouts)} reaches more than "
                f"{MAX_NODES} nodes\n\nhint: use fewer seeds or smaller fan-outs"
            )
        # half as much again, so that few batches need more than one more round
        workspace.room_indptr = max(workspace.room_indptr, int(progress[NEED_INDPTR] * 1.25))
        workspace.room_nodes = max(workspace.room_nodes, int(need_nodes * 1.25))
        workspace.room_edges = max(workspace.room_edges, int(progress[NEED_EDGES] * 1.25))
        nodes = _enlarged(nodes, workspace.room_nodes, empty)
        out_indptr = _enlarged(out_indptr, workspace.room_indptr, empty)
        out_indices = _enlarged(out_indices, workspace.room_edges, empty)
        if edge_ids:
            out_edge_ids = _enlarged(out_edge_ids, workspace.room_edges, empty)
        workspace.grow(need_nodes, nodes.numpy(), int(progress[NODES]))
    workspace.base += int(num_nodes[-1])

    ends = num_edges.tolist()
    edges_of = [slice(begin, end) for begin, end in pairwise(ends)]
    counts = num_nodes.tolist()
    firsts = [hop + sum(counts[:hop]) for hop in range(num_hops)]
    return Sample(
        nodes[: counts[-1]],
        tuple(counts),
        tuple(
            out_indptr[first : first + count + 1]
            for first, count in zip(firsts, counts, strict=False)
        ),
        tuple(out_indices[edges] for edges in edges_of),
        tuple(out_edge_ids[edges] for edges in edges_of) if edge_ids else None,
    )


def _enlarged(tensor: Tensor, length: int, empty: Callable[[int, torch.dtype], Tensor]) -> Tensor:
    if length <= len(tensor):
        return tensor
    larger = empty(length, tensor.dtype)
    larger[: len(tensor)] = tensor
    return larger
