"""Random programs of typed minibatches, as those of `transfer_programs`.

Each node type has its own kind of table and its own share of copied rows. Minibatches have types
without nodes, tensors that occur several times, and blocks that are the same.
"""

from functools import lru_cache

import numpy as np
import torch
from transfer_programs import (
    KINDS,
    NUM_NODES,
    LoaderProgram,
    TransferProgram,
    host_table,
    row_of,
    table_on,
)

from gcnzc.graph.hetero import HeteroGraph
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.sampling import HeteroLinkSampler, HeteroSampler
from gcnzc.sampling.hetero import HeteroBatch, HeteroBlock, HeteroMetadata

# "c" has no table
TYPES = ("a", "b", "c")
TO, BACK, OWN = ("a", "to", "b"), ("b", "rev_to", "a"), ("a", "own", "a")
LATER = ("c", "later", "a")
METADATA = HeteroMetadata(TYPES, (TO, BACK, OWN, LATER))


@lru_cache(maxsize=1)
def graph():
    random = np.random.default_rng(1)
    pairs = random.integers(0, NUM_NODES, (2, 300))
    times = random.integers(0, 9, 300)
    return HeteroGraph.from_arrays(
        dict.fromkeys(TYPES, NUM_NODES),
        {
            TO: {"edge_index": pairs, "time": times},
            BACK: {"edge_index": pairs[::-1], "time": times},
            OWN: {"edge_index": random.integers(0, NUM_NODES, (2, 100))},
            LATER: {"edge_index": random.integers(0, NUM_NODES, (2, 100))},
        },
    )


class TypedTables:
    """The tables of a program by node type, of which each has its kind and its share."""

    def table(self):
        """Return the tables; from now on the device may fail."""
        draw = self.draw
        self.kinds = {name: draw.choice(KINDS[:-1]) for name in TYPES[: draw.randint(0, 2)]}
        self.share = {
            name: {"sparse": 1.0, "on the device": 0.0}.get(
                kind, draw.choice([0.0, 0.0, 0.3, 0.6, 1.0])
            )
            for name, kind in self.kinds.items()
        }
        tables = {name: table_on(self.device, kind) for name, kind in self.kinds.items()}
        if draw.random() < 0.2:
            self.device.fails_in = draw.randrange(150)
        return tables


class TypedTransferProgram(TypedTables, TransferProgram):
    """Threads that copy typed batches, and threads that read them."""

    def batch(self, number):
        draw, empty = self.draw, self.transfer.host.empty

        def values(shape, dtype=torch.int64):
            tensor = empty(shape, dtype)
            self.device.write(tensor)
            return tensor

        sizes = {name: draw.choice([0, 1, 5, 9, 13]) for name in TYPES}
        nodes = {}
        for name, size in sizes.items():
            nodes[name] = empty(size, torch.int64)
            # an id out of range is an error in the middle of the transfer
            nodes[name].fill_(NUM_NODES if draw.random() < 0.03 else number)
            self.device.write(nodes[name])
        has = [draw.random() < 0.5 for _ in range(6)]
        counts = {TO: sizes["b"], BACK: sizes["b"], OWN: sizes["a"], LATER: 0}
        row = {each: values(count) for each, count in counts.items()}
        col = {each: values(count) for each, count in counts.items()}
        if has[0]:
            # as in bidirectional subgraphs
            row[BACK], col[BACK] = col[TO], row[TO]
        blocks = [
            HeteroBlock(
                *(values(5), values(8, torch.int32), values(8, torch.int32)),
                tuple(sizes.values()),
                tuple(sizes.values()),
                METADATA,
            )
            for _ in range(draw.randint(1, 2))
        ]
        if has[1]:
            blocks.append(blocks[-1])
        return HeteroBatch(
            nodes=nodes,
            seeds={"a": nodes["a"][: sizes["a"] // 2]},
            row=row,
            col=col,
            edge_ids={each: values(count) for each, count in counts.items()} if has[2] else None,
            num_nodes={name: (size,) for name, size in sizes.items()},
            num_edges=None,
            subgraphs={name: values(size) for name, size in sizes.items()} if has[3] else None,
            seed_times=values(sizes["a"] // 2) if has[3] else None,
            blocks=tuple(blocks),
            y=values(sizes["a"] // 2) if has[4] else None,
            pairs=values((2, 3)) if has[5] else None,
        )

    def check(self, batch):
        # all nodes of a batch are the same
        assert batch.x.keys() == self.kinds.keys()
        for name, nodes in batch.nodes.items():
            ids = nodes.unique().tolist()
            assert len(ids) <= 1, "ids were not copied"
            if name in self.kinds and ids:
                rows = row_of(self.kinds[name], ids[0])
                assert (batch.x[name] == rows).all(), "rows were not gathered"


class HeteroLoaderProgram(TypedTables, LoaderProgram):
    """A typed loader whose iterators are read by one or more threads."""

    def loader(self, tables):
        draw = self.draw
        options = {"threads": draw.randint(1, 3), "ahead": draw.randint(1, 4), "tables": tables}
        kind = draw.choice(["directional", "bidirectional", "induced", "temporal", "links"])
        is_link, is_temporal = kind == "links", kind == "temporal"
        sampler = HeteroSampler(
            graph(),
            [2, 2, 2][: draw.randint(1, 3)],
            subgraph_type="directional" if is_link or is_temporal else kind,
            temporal="last" if is_temporal else None,
            time="edge",
            edge_ids=draw.random() < 0.5,
        )
        batch_size = draw.choice([3, 5, 8, 16])
        if is_link:
            links = HeteroLinkSampler(sampler, TO, torch.arange(24).view(2, 12))
            return HeteroLoader(links, None, batch_size, **options)
        ids = torch.arange(0, NUM_NODES, 2)
        if is_temporal:
            options["seed_times"] = torch.arange(len(ids)) % 9
        if draw.random() < 0.5:
            options["labels"] = torch.arange(len(ids))
        return HeteroLoader(sampler, ("a", ids), batch_size, **options)

    def check(self, batch):
        for name, kind in self.kinds.items():
            # of the device's memory, not of the table that the device gathers from
            assert torch.equal(batch.x[name], host_table(kind).gather(batch.nodes[name]))
