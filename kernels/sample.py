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
from numba import int64, njit, uint32, uint64
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.kernels.csc import VERIFY
from gcnzc.kernels.edges import LeftOut, num_removed, position_of
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
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: list[int],
    seed: int,
    epoch: int,
    kept_edges: Sequence[Sequence[int]] = (),
    once: bool = False,
) -> Sample:
    """What `sample` must equal, bit for bit, with Python's own lists and dictionaries.

    `kept_edges` are the positions in `indices` that may be drawn, of each of the first nodes.
    """
    nodes = seeds.tolist()
    places = {node: place for place, node in reversed(list(enumerate(nodes)))}
    num_nodes, blocks = [len(nodes)], []
    for hop, fanout in enumerate(fanouts):
        ends, kept, sources = [0], [], []
        drawn_before = num_nodes[hop - 1] if once and hop > 0 else 0
        for place, node in enumerate(nodes[: num_nodes[hop]]):
            if place < drawn_before:
                ends.append(0)
                continue
            edges: Sequence[int] = range(*indptr[node : node + 2].tolist())
            if place < len(kept_edges):
                edges = kept_edges[place]
            drawn = _draw(len(edges), fanout, node, hop, seed, epoch)
            kept += [edges[position] for position in drawn]
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
AHEAD = 64  # slots of a table are asked for this many edges before they are due
LINE_IDS = 8  # ids of 8 B in a line of the cache
# Up to here a position is compared with all those chosen before it, many destinations at a time;
# beyond, each destination marks its positions in a map of bits.
COMPARED = 64
# A table with a slot for every node takes 4 B a node in every thread: 64 MB here, and 444 MB for
# the 111 M nodes of ogbn-papers100M, where the hash table takes 8 MB for batches of 400,000 nodes.
# Batches with the hash table take a third longer, on graphs of any size (bench/sample.py).
DIRECT_NODES = 2**24
# the hash table is at most half full, so that a search ends after a slot or two
SLOTS_PER_NODE = 2
MAX_NODES = 2**31 - 1  # local numbers are int32
MAX_DEGREE = 2**32 - 1  # positions are drawn from words of 32 bits
# fields of `progress`; WRONG_NODE is -1 unless the graph's numbers for a node are damaged
HOP, DESTINATION, NODES, EDGES, WRONG_NODE, NEED_INDPTR, NEED_NODES, NEED_EDGES = range(8)


@njit(cache=True, nogil=True)
def _ask(array, position):
    prefetch(int64(array.ctypes.data) + position * array.itemsize)


@njit(cache=True, nogil=True)
def _draw_few(low, high, degrees, num_drawn, fanout, key, words, clash):
    """Floyd's method for many destinations at once, in loops that become vector code.

    Column i of `words` becomes the `fanout` positions of destination i below `degrees[i]`.
    """
    key_0, key_1, epoch = key[0], key[1], key[2]
    for quad in range((fanout + 3) // 4):
        for i in range(num_drawn):
            w0, w1, w2, w3 = philox4x32(quad, low[i], high[i], epoch, key_0, key_1)
            words[4 * quad, i] = w0
            words[4 * quad + 1, i] = w1
            words[4 * quad + 2, i] = w2
            words[4 * quad + 3, i] = w3
    for draw in range(fanout):
        for i in range(num_drawn):
            below = degrees[i] - uint32(fanout - draw - 1)
            words[draw, i] = (uint64(words[draw, i]) * uint64(below)) >> uint64(32)
            clash[i] = 0
        for earlier in range(draw):
            for i in range(num_drawn):
                clash[i] |= words[earlier, i] == words[draw, i]
        for i in range(num_drawn):
            if clash[i]:
                words[draw, i] = degrees[i] - uint32(fanout - draw)


@njit(cache=True, nogil=True)
def _draw_many(low, high, degree, fanout, key, bits, positions):
    """Floyd's method for one destination with a map of bits, which is left empty."""
    for quad in range((fanout + 3) // 4):
        words = philox4x32(quad, low, high, key[2], key[0], key[1])
        for draw in range(4 * quad, min(4 * quad + 4, fanout)):
            last = degree - fanout + draw
            position = int64((words[draw - 4 * quad] * uint64(last + 1)) >> uint64(32))
            if bits[position >> 6] >> uint64(position & 63) & uint64(1):
                position = last
            bits[position >> 6] |= uint64(1) << uint64(position & 63)
            positions[draw] = position
    for position in positions[:fanout]:
        bits[position >> 6] = 0


@njit(cache=True, nogil=True)
def _number_directly(sources, table, base, nodes, count, places):
    """Write the local numbers of `sources`; new ones get the next, and join `nodes`.

    A node's slot holds its stamp, which is `base` plus its local number; a stamp below `base` is of
    an earlier batch. There is no branch to be foretold: every slot is written, changed or not.
    """
    for i in range(min(AHEAD, len(sources))):
        _ask(table, sources[i])
    for i in range(len(sources)):
        if i + AHEAD < len(sources):
            _ask(table, sources[i + AHEAD])
        source = sources[i]
        stamp = int64(table[source])
        new = stamp < base
        stamp = base + count if new else stamp
        table[source] = stamp
        nodes[count] = source
        count += 1 if new else 0
        places[i] = stamp - base
    return count


@njit(cache=True, nogil=True)
def _slot(node, num_slots):
    # Fibonacci hashing: the top bits of a product with 2**64 / golden ratio
    product = uint64(node) * uint64(0x9E3779B97F4A7C15)
    return int64(((product >> uint64(32)) * uint64(num_slots)) >> uint64(32))


@njit(cache=True, nogil=True)
def _look(entry, source, base, nodes, wide):
    """What a slot holds: a local number; all ones if it is free; nonzero if of another node.

    In words, since the processor cannot foretell whether a node is new.
    """
    local = (entry & 0xFFFFFFFF) - base
    free = local >> 63
    other = ((entry >> 32) ^ source) & 0xFFFFFFFF & ~free
    # ids that differ by a multiple of 2**32 share their low half; for None this is not compiled
    if wide is not None:
        other = (nodes[local & ~free] ^ source) & ~free
    return local, free, other


@njit(cache=True, nogil=True)
def _number_by_hash(sources, table, base, nodes, count, places, wide):
    """The same with a hash table of a power of two of slots, searched one by one.

    A slot holds the low half of an id above its stamp; with a stamp below `base` it is free. The
    one branch is taken where the first slot holds another node, and that is rare.
    """
    for i in range(min(AHEAD, len(sources))):
        _ask(table, _slot(sources[i], len(table)))
    for i in range(len(sources)):
        if i + AHEAD < len(sources):
            _ask(table, _slot(sources[i + AHEAD], len(table)))
        source = sources[i]
        slot = _slot(source, len(table))
        local, free, other = _look(table[slot], source, base, nodes, wide)
        # not `while` alone, which becomes twice as slow
        if other != 0:
            while other != 0:
                slot = (slot + 1) & (len(table) - 1)
                local, free, other = _look(table[slot], source, base, nodes, wide)
        local += (count - local) & free
        table[slot] = (source << 32) | (base + local)
        nodes[count] = source
        count -= free
        places[i] = local
    return count


@njit(cache=True, nogil=True)
def _enter(direct, hashed, base, nodes, count, wide):
    """Number the first `count` nodes by their places; one that occurs twice by its first."""
    for place in range(count):
        node = nodes[place]
        if len(direct):
            if direct[node] < base:
                direct[node] = base + place
        else:
            slot = _slot(node, len(hashed))
            _, free, other = _look(hashed[slot], node, base, nodes, wide)
            while other != 0:
                slot = (slot + 1) & (len(hashed) - 1)
                _, free, other = _look(hashed[slot], node, base, nodes, wide)
            if free:
                hashed[slot] = (node << 32) | (base + place)


@njit(cache=True, nogil=True)
def _draw_lot(
    nodes, begins, degrees, hop, fanout, key, scratch, bits, indices, positions, ends
):  # fmt: skip
    """Write where the kept edges of a lot of destinations stand in `indices`, and their ends.

    The edges are asked for as their positions are written: by the time the lot is drawn they have
    come, which is twice as quick as to ask 64 entries ahead while they are read.
    """
    low, high, drawn_degrees, words, clash = scratch
    if 0 <= fanout <= COMPARED:
        num_drawn = 0
        for i in range(len(nodes)):
            if degrees[i] > fanout:
                low[num_drawn] = nodes[i] & 0xFFFFFFFF
                high[num_drawn] = (nodes[i] >> 32) | (hop << 16)
                drawn_degrees[num_drawn] = degrees[i]
                num_drawn += 1
        _draw_few(low, high, drawn_degrees, num_drawn, fanout, key, words, clash)
    filled = 0
    column = 0
    for i in range(len(nodes)):
        begin, degree = begins[i], degrees[i]
        if fanout < 0 or degree <= fanout:
            for position in range(degree):
                positions[filled + position] = begin + position
                if position % LINE_IDS == 0:
                    _ask(indices, begin + position)
            filled += degree
        elif fanout <= COMPARED:
            for draw in range(fanout):
                position = begin + words[draw, column]
                positions[filled + draw] = position
                _ask(indices, position)
            column += 1
            filled += fanout
        else:
            chosen = positions[filled : filled + fanout]
            half, rest = nodes[i] & 0xFFFFFFFF, (nodes[i] >> 32) | (hop << 16)
            _draw_many(half, rest, degree, fanout, key, bits, chosen)
            for draw in range(fanout):
                chosen[draw] += begin
                _ask(indices, chosen[draw])
            filled += fanout
        ends[i] = filled


@njit(cache=True, nogil=True)
def _pass_over(left, destination, begins, ends, taken, positions):
    """Turn positions among the edges that are kept into positions among all."""
    first, kept_before, removed = left
    filled = 0
    for i in range(taken):
        if num_removed(first, removed, destination + i) > 0:
            for place in range(filled, ends[i]):
                kept = positions[place] - begins[i]
                positions[place] = begins[i] + position_of(
                    first, kept_before, removed, destination + i, kept
                )
        filled = ends[i]


@njit(cache=True, nogil=True)
def _are_outside(numbers, end):
    """Whether one of the numbers is below 0 or not below `end`.

    A pass of its own over numbers that are in the first cache, which becomes vector code. As part
    of the loop that reads them from the graph it costs several times as much.
    """
    signs = int64(0)
    for i in range(len(numbers)):
        signs |= numbers[i] | (end - 1 - numbers[i])
    return signs < 0


@njit(cache=True, nogil=True)
def _first_wrong_source(sources, ends, end):
    """The first destination of a lot with a source that is no node."""
    wrong = 0
    while 0 <= sources[wrong] < end:
        wrong += 1
    place = 0
    while ends[place] <= wrong:
        place += 1
    return place


@njit(cache=True, nogil=True)
def _first_wrong_column(begins, degrees, num_edges):
    """The first destination of a lot whose edges are not those of the graph, or -1."""
    for i in range(len(begins)):
        # no number of 64 bits can wrap round once the first two are known to be in range
        if not (0 <= begins[i] <= num_edges and 0 <= degrees[i] <= num_edges - begins[i]):
            return i
    return -1


@njit(cache=True, nogil=True)
def _sample(
    indptr,
    indices,
    fanouts,
    key,
    left,
    once,
    direct,
    hashed,
    base,
    wide,
    out,
    progress,
    num_nodes,
    num_edges,
):
    """Go on from `progress`; False if it cannot, and then `progress` says why.

    Either a buffer is too small, or the numbers of a node lead outside the graph. All are checked
    here, where they are read first, since a graph may be a mapped file that nobody has read.
    """
    nodes, out_indptr, out_indices, out_edge_ids = out
    hop, destination = progress[HOP], progress[DESTINATION]
    count, edges = progress[NODES], progress[EDGES]
    begins = np.empty(LOT_DESTINATIONS, np.int64)
    degrees = np.empty(LOT_DESTINATIONS, np.int64)
    ends = np.empty(LOT_DESTINATIONS, np.int64)
    scratch = (
        np.empty(LOT_DESTINATIONS, np.uint32),
        np.empty(LOT_DESTINATIONS, np.uint32),
        np.empty(LOT_DESTINATIONS, np.uint32),
        # a line more, so that a column's entries fall into different sets of the cache
        np.empty((COMPARED, LOT_DESTINATIONS + 16), np.uint32),
        np.empty(LOT_DESTINATIONS, np.uint32),
    )
    positions = np.empty(LOT_EDGES + 64 * LOT_DESTINATIONS, np.int64)
    bits = np.zeros(1, np.uint64)
    room = len(nodes)
    if not len(direct):
        room = min(room, len(hashed) // SLOTS_PER_NODE)
    done = True
    while hop < len(fanouts) and done:
        fanout, num_destinations = fanouts[hop], num_nodes[hop]
        # the hops' offsets lie one behind the other, each with its own leading zero
        first = hop + num_nodes[:hop].sum()
        if len(out_indptr) < first + num_destinations + 1:
            progress[NEED_INDPTR] = first + num_destinations + 1
            done = False
            break
        # nodes of earlier hops were drawn for, and get no edges again
        drawn_before = num_nodes[hop - 1] if once and hop > 0 else 0
        out_indptr[first : first + drawn_before + 1] = 0
        destination = max(destination, drawn_before)
        while destination < num_destinations:
            taken = total = longest = 0
            while (
                taken < LOT_DESTINATIONS
                and total < LOT_EDGES
                and destination + taken < num_destinations
            ):
                node = nodes[destination + taken]
                begin, degree = indptr[node], indptr[node + 1] - indptr[node]
                # for None this is not compiled
                if left is not None:
                    degree -= num_removed(left[0], left[2], destination + taken)
                begins[taken], degrees[taken] = begin, degree
                total += degree if fanout < 0 else min(degree, fanout)
                longest = max(longest, degree)
                taken += 1
            wrong = _first_wrong_column(begins[:taken], degrees[:taken], len(indices))
            if wrong >= 0:
                progress[WRONG_NODE], progress[NODES] = nodes[destination + wrong], count
                return False
            if count + total > room or edges + total > len(out_indices):
                progress[NEED_NODES], progress[NEED_EDGES] = count + total, edges + total
                done = False
                break
            # the next lot's offsets are on their way while this lot is drawn
            last = destination + taken
            for i in range(last, min(last + LOT_DESTINATIONS, num_destinations)):
                _ask(indptr, nodes[i])
            if total > len(positions):
                positions = np.empty(2 * total, np.int64)
            if fanout > COMPARED and longest > 64 * len(bits):
                bits = np.zeros((longest + 63) // 64, np.uint64)
            _draw_lot(
                nodes[destination:last],
                begins,
                degrees,
                hop,
                fanout,
                key,
                scratch,
                bits,
                indices,
                positions,
                ends,
            )
            # the seeds come first, and no other column has edges to leave out
            if left is not None and destination < len(left[0]) - 1:
                _pass_over(left, destination, begins, ends, taken, positions)
            for i in range(taken):
                out_indptr[first + destination + i + 1] = edges - num_edges[hop] + ends[i]
            if len(out_edge_ids):
                out_edge_ids[edges : edges + total] = positions[:total]
            sources = positions[:total]
            for i in range(total):
                sources[i] = indices[positions[i]]
            if _are_outside(sources, len(indptr) - 1):
                wrong = _first_wrong_source(sources, ends, len(indptr) - 1)
                progress[WRONG_NODE], progress[NODES] = nodes[destination + wrong], count
                return False
            places = out_indices[edges : edges + total]
            if len(direct):
                count = _number_directly(sources, direct, base, nodes, count, places)
            else:
                count = _number_by_hash(sources, hashed, base, nodes, count, places, wide)
            edges += total
            destination += taken
        if done:
            hop += 1
            destination = 0
            num_nodes[hop], num_edges[hop] = count, edges
    progress[HOP], progress[DESTINATION] = hop, destination
    progress[NODES], progress[EDGES] = count, edges
    return done


class Workspace:
    """What one thread needs to sample, kept from batch to batch.

    The tables from ids to local numbers are never emptied: stamps grow from batch to batch.
    """

    def __init__(self) -> None:
        self.direct = np.zeros(0, np.int32)
        self.hashed = np.zeros(2**12, np.int64)
        self.base = 1
        self.wide: bool | None = None
        # entries that batches needed so far, so that buffers are large enough at once
        self.room_indptr = self.room_nodes = self.room_edges = 1024

    def start(self, graph_nodes: int) -> None:
        """Make tables for a graph, free of the batch before."""
        self.wide = True if graph_nodes > 2**32 else None
        num_direct = graph_nodes if graph_nodes <= DIRECT_NODES else 0
        if num_direct != len(self.direct):
            self.direct, self.base = np.zeros(num_direct, np.int32), 1
        stamps = 2**31 if num_direct else 2**32
        if self.base + min(graph_nodes, MAX_NODES) >= stamps:
            self.direct[:], self.hashed[:], self.base = 0, 0, 1

    def make_room(self, num_nodes: int, nodes: NDArray[np.int64], known: int) -> None:
        """Let the hash table take `num_nodes`, and number the first `known` of `nodes`."""
        if len(self.hashed) < num_nodes * SLOTS_PER_NODE and not len(self.direct):
            num_slots = 1 << (num_nodes * SLOTS_PER_NODE - 1).bit_length()
            self.hashed, self.base = np.zeros(num_slots, np.int64), 1
        _enter(self.direct, self.hashed, self.base, nodes, known, self.wide)


class _Buffers:
    """Where a batch is written, with room for what batches needed so far."""

    def __init__(
        self,
        workspace: Workspace,
        empty: Callable[[int, torch.dtype], Tensor],
        num_seeds: int,
        edge_ids: bool,
    ) -> None:
        self.workspace, self.empty, self.with_edge_ids = workspace, empty, edge_ids
        self.nodes = empty(max(workspace.room_nodes, num_seeds), torch.int64)
        self.indptr = empty(workspace.room_indptr, torch.int64)
        self.indices = empty(workspace.room_edges, torch.int32)
        self.edge_ids = empty(workspace.room_edges if edge_ids else 0, torch.int64)

    def numpy(self) -> tuple[NDArray[np.integer], ...]:
        """As `_sample` takes them."""
        parts = self.nodes, self.indptr, self.indices, self.edge_ids
        return tuple(part.numpy() for part in parts)

    def enlarge(self, progress: NDArray[np.int64]) -> None:
        """Make room for what is needed by now, and a quarter more, so that few batches ask."""
        space = self.workspace
        need_indptr, need_nodes, need_edges = (progress[NEED_INDPTR:] * 1.25).astype(int).tolist()
        space.room_indptr = max(space.room_indptr, need_indptr)
        space.room_nodes = max(space.room_nodes, need_nodes)
        space.room_edges = max(space.room_edges, need_edges)
        self.nodes = self._enlarged(self.nodes, space.room_nodes)
        self.indptr = self._enlarged(self.indptr, space.room_indptr)
        self.indices = self._enlarged(self.indices, space.room_edges)
        if self.with_edge_ids:
            self.edge_ids = self._enlarged(self.edge_ids, space.room_edges)

    def cut(self, num_nodes: list[int], num_edges: list[int]) -> Sample:
        """What was written, hop by hop."""
        firsts = [hop + sum(num_nodes[:hop]) for hop in range(len(num_nodes) - 1)]
        edges = [slice(begin, end) for begin, end in pairwise(num_edges)]
        return Sample(
            self.nodes[: num_nodes[-1]],
            tuple(num_nodes),
            tuple(
                self.indptr[first : first + count + 1]
                for first, count in zip(firsts, num_nodes, strict=False)
            ),
            tuple(self.indices[of_hop] for of_hop in edges),
            tuple(self.edge_ids[of_hop] for of_hop in edges) if self.with_edge_ids else None,
        )

    def _enlarged(self, part: Tensor, length: int) -> Tensor:
        if length <= len(part):
            return part
        larger = self.empty(length, part.dtype)
        larger[: len(part)] = part
        return larger


def _empty(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


def _describe_damage(indptr: Tensor, indices: Tensor, node: int) -> str:
    num_nodes, num_edges = len(indptr) - 1, len(indices)
    begin, end = indptr[node : node + 2].tolist()
    if not 0 <= begin <= end <= num_edges:
        return (
            f"the edges into node {node} are numbered from {begin} to {end}, but the graph has "
            f"{num_edges} edges\n\n{VERIFY}"
        )
    column = indices[begin:end]
    wrong = column[(column < 0) | (column >= num_nodes)][:4].tolist()
    return f"node {node} has the in-neighbours {wrong} in a graph of {num_nodes} nodes\n\n{VERIFY}"


def sample(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    seed: int,
    epoch: int,
    *,
    edge_ids: bool = False,
    without: LeftOut | None = None,
    once: bool = False,
    workspace: Workspace | None = None,
    empty: Callable[[int, torch.dtype], Tensor] = _empty,
) -> Sample:
    """Draw the neighbourhood of `seeds`.

    Args:
        indptr: (N + 1,) int64, monotone, on the CPU.
        indices: (E,) int32 or int64, in [0, N), on the CPU. What is read of both is checked, since
            they may be mapped from a damaged file.
        seeds: (S,) int64 in [0, N), not checked: one outside reads foreign memory. One that occurs
            twice is two destinations with the same neighbours; edges lead to its first place.
        fanouts: L numbers, from the seeds outward; -1 keeps all neighbours.
        seed: the key of every choice, below 2**64.
        epoch: in [0, 2**32); another epoch makes other choices.
        edge_ids: also give the position of every edge in `indices`.
        without: edges of the seeds' columns that are never drawn, at any hop, as
            `gcnzc.kernels.edges.left_out` gives them for `seeds`, all different.
        once: draw for each node at the hop after the one that met it, and at no other, as PyG does;
            hops still have all nodes met before them as destinations, some without an edge.
        workspace: kept from call to call, it saves time; used by one thread at a time.
        empty: gives the memory of the result.

    Raises:
        ValueError: an epoch or seed out of range, a batch of 2**31 nodes, or a neighbour or a range
            of neighbours outside the graph.
    """
    if workspace is None:
        workspace = Workspace()
    if not 0 <= epoch < 2**32:
        raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
    num_hops, num_seeds = len(fanouts), len(seeds)
    out = _Buffers(workspace, empty, num_seeds, edge_ids)
    out.nodes[:num_seeds] = seeds
    workspace.start(len(indptr) - 1)
    workspace.make_room(num_seeds, out.nodes.numpy(), num_seeds)
    num_nodes, num_edges = np.zeros((2, num_hops + 1), np.int64)
    progress = np.zeros(8, np.int64)
    progress[WRONG_NODE] = -1
    num_nodes[0] = progress[NODES] = num_seeds
    key = np.array([*split_key(seed), epoch], np.uint64)
    left = None if without is None else (without.first, without.kept_before, without.removed)
    try:
        while not _sample(
            indptr.numpy(),
            indices.numpy(),
            np.asarray(fanouts, np.int64),
            key,
            left,
            once,
            workspace.direct,
            workspace.hashed,
            workspace.base,
            workspace.wide,
            out.numpy(),
            progress,
            num_nodes,
            num_edges,
        ):
            if progress[WRONG_NODE] >= 0:
                raise ValueError(_describe_damage(indptr, indices, int(progress[WRONG_NODE])))
            if progress[NEED_NODES] > MAX_NODES:
                raise ValueError(
                    f"a batch of {num_seeds} seeds with fan-outs {list(fanouts)} reaches more than "
                    f"{MAX_NODES} nodes\n\nhint: use fewer seeds or smaller fan-outs"
                )
            out.enlarge(progress)
            workspace.make_room(int(progress[NEED_NODES]), out.nodes.numpy(), int(progress[NODES]))
    finally:
        # also what a batch that failed has entered is of an earlier batch now
        workspace.base += int(progress[NODES])
    return out.cut(num_nodes.tolist(), num_edges.tolist())
