"""Full-batch loader: one batch per epoch, of all seeds with all their neighbours."""

import time
import zlib
from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.checks import (
    check_labels,
    check_loader_device,
    check_seeds,
    check_tables,
)
from gcnzc.loader.seeds import Shares
from gcnzc.loader.state import PARTITION, check_position, check_state
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.full import build_full_blocks, find_layer_nodes
from gcnzc.sampling.neighbor import check_graph
from gcnzc.system.arguments import (
    IdsLike,
    check_device,
    check_epoch,
    check_integer,
    check_kind,
    describe,
)
from gcnzc.system.spans import Span


class FullBatchLoader:
    """Load the whole graph as one batch per epoch, for full-batch training without sampling.

    The batch has all in-neighbours in every layer, restricted to the nodes that the outputs of the
    seeds depend on. It is built once, when it is first needed, and yielded in each epoch with the
    same tensors: no step samples, gathers or transposes. With the same seeds, a step computes what
    a step of `gcnzc.Loader` with fanouts of -1 and a batch of all seeds does, up to rounding.

    If `seeds` is None, the nodes of the batch are all nodes in order, and on the host the blocks
    are the graph's own arrays. `batch.x` is then the table's own rows, without a copy, if they are
    dense, on `device` and of the right dtype.

    Args:
        graph: the whole graph, on the host.
        table: features, one row per node, on the host or on `device`; None for a batch without
            `x`. Rows need not be page-locked.
        seeds: (S,) unique node ids, as a tensor, an array or a list, such as the training nodes;
            None for all nodes, in order.
        num_layers: number of layers of the model, and of blocks.
        labels: (N,) or (N, T), one row per node, a tensor or an array; None for a batch without
            `y`.
        device: device of the batch.
        dtype: floating-point dtype of `batch.x`. Default: that of the rows, or float32 if they are
            quantized. Pass the model's dtype, so that no step converts them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or does not fit another.
    """

    def __init__(
        self,
        graph: Graph,
        table: FeatureTable | None,
        seeds: IdsLike | None,
        num_layers: int,
        labels: Tensor | NDArray[Any] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        check_graph(graph)
        graph.check_untyped()
        tables = check_tables(graph, table)
        self.graph, self.table = graph, table
        seeds = torch.arange(graph.num_nodes) if seeds is None else seeds
        self.seeds = check_seeds(seeds, graph.num_nodes, None, may_be_empty=False)
        self.num_layers = check_integer("num_layers", num_layers, 1)
        self.labels = check_labels(labels, graph.num_nodes, "nodes")
        # unlike a `Loader`, this one may gather all rows on the host and copy them
        self.device = check_loader_device(check_device("device", device), tables, copied_share=1.0)
        if dtype is not None:
            check_kind("dtype", dtype, torch.dtype, "torch.float32")
            if not dtype.is_floating_point:
                raise ValueError(f"dtype is {describe(dtype)}\n\nhint: torch.float32")
        self.dtype = dtype
        self.shares = Shares(len(self.seeds), len(self.seeds))
        self._epoch = 0
        # whether this epoch's batch was yielded
        self._position = self._resume_at = 0
        # whether the time to build the batch has been reported
        self._is_reported = False

    def __len__(self) -> int:
        """Return the number of batches of an epoch, 1."""
        return len(self.shares)

    def __getstate__(self) -> dict[str, Any]:
        # a copy builds its batch again
        return {name: value for name, value in vars(self).items() if name != "batch"}

    @cached_property
    def batch(self) -> Batch:
        """The batch, built at the first access: do not write to its tensors.

        `nodes` begins with the seeds; `x` has the features of `nodes`, and `y` the labels of the
        seeds.
        """
        began_s = time.perf_counter()
        needed = find_layer_nodes(self.graph, self.seeds, self.num_layers)
        blocks = build_full_blocks(self.graph, needed, self.device)
        built_s = time.perf_counter()
        nodes = blocks[0].nodes
        batch = Batch(nodes, nodes[: len(self.seeds)], blocks, items=self.seeds)
        if self.labels is not None:
            batch.y = self.labels[self.seeds].to(self.device)
        batch.times["sample_s"] = built_s - began_s
        batch.spans = [Span("sample", "model", began_s, built_s)]
        if self.table is None:
            return batch
        batch.x = self._rows_in_place() if needed.is_whole_graph(self.graph) else None
        if batch.x is None:
            batch.x = self._gather(needed.nodes)
            ended_s = time.perf_counter()
            batch.times["gather_s"] = ended_s - built_s
            batch.spans.append(Span("gather", "model", built_s, ended_s))
        return batch

    def _rows_in_place(self) -> Tensor | None:
        """Return the table's own rows if they can be used as they are."""
        table = self.table
        assert table is not None
        is_stored = not table.is_sparse and table.scales is None and table.device == self.device
        has_dtype = self.dtype in (None, table.stored_dtype)
        return table.rows if is_stored and has_dtype else None

    def _gather(self, nodes: Tensor) -> Tensor:
        table = self.table
        assert table is not None
        can_read = table.device == self.device or (
            self.device.type == "cuda" and not table.is_sparse and table.rows.is_pinned()
        )
        x = table.gather(nodes.to(self.device) if can_read else nodes)
        return x.to(self.device, self.dtype or x.dtype)

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between iterations; counted from 0."""
        return self._epoch

    @property
    def resume_step(self) -> int:
        """The step at which the next iteration starts: 1 if a state was loaded after the batch."""
        return self._resume_at

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; all epochs have the same batch.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is out of range.
        """
        epoch = check_epoch("epoch", epoch)
        if epoch != self._epoch:
            self._epoch, self._position, self._resume_at = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values, see `Loader.state_dict`."""
        shared = {name: getattr(self.shares, name) for name in PARTITION}
        place = {"epoch": self._epoch, "position": self._position, "done": 0}
        return place | shared | self._settings_to_match()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the position of `state`.

        Raises:
            TypeError: `state` is not a mapping, or one of its values has another type.
            ValueError: `state` is not from a `FullBatchLoader`, or from one with other seeds or
                another number of layers.
        """
        numbers = check_state(state, self._settings_to_match(), len(self.seeds))
        check_position(numbers["position"], len(self))
        self.set_epoch(numbers["epoch"])
        self._position = self._resume_at = numbers["position"]

    def _settings_to_match(self) -> dict[str, Any]:
        return {
            "num_seeds": len(self.seeds),
            "num_layers": self.num_layers,
            "seeds_crc32": zlib.crc32(self.seeds.numpy().data),
            "batch_size": self.shares.batch_size,
            "world_size": 1,
        }

    def __iter__(self) -> Generator[Batch, None, None]:
        begin, self._resume_at = self._resume_at, 0
        self._position = begin
        return self._yield_batch(begin, self._epoch)

    def _yield_batch(self, begin: int, epoch: int) -> Generator[Batch, None, None]:
        if begin == 0:
            batch = self.batch
            if self._is_reported:
                batch = replace(batch, times={}, spans=[])
            self._is_reported, self._position = True, 1
            yield batch
        # unless `set_epoch` was called in the meantime
        if self._epoch == epoch:
            self._epoch, self._position = epoch + 1, 0
