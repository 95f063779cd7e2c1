"""Estimate the memory that a run needs at least, and compare it with that of the machine.

The estimates are lower bounds, so that no run is rejected that would fit: they do not include the
loader, temporary tensors, evaluation, checkpoints, and the sampled neighbours of a minibatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.models.stack import Model
from gcnzc.system.host_memory import total_bytes
from gcnzc.train.config import TrainConfig
from gcnzc.train.precision import AUTOCAST_DTYPES


@dataclass(frozen=True)
class Footprint:
    """Bytes that a run needs at least."""

    training: int  # per worker: weights, gradients, and the optimizer's state
    minibatch: int  # per worker: features of the seeds, and the outputs of all layers for them
    is_full_batch: bool = False  # whether `minibatch` is for all nodes of a full-batch step

    def describe(self) -> str:
        """Format the sizes of the parts, for a message."""
        return (
            f"{_shown(self.training)} for weights, gradients and the optimizer's state, "
            f"{_shown(self.minibatch)} for a "
            f"{'full-batch step' if self.is_full_batch else 'minibatch'}"
        )


def footprint_of(
    config: TrainConfig,
    build: Callable[[], nn.Module],
    num_nodes: int,
    num_columns: int,
    num_seeds: int,
    layer_nodes: Sequence[int] | None = None,
) -> Footprint:
    """Estimate the memory of a run, without allocating its model.

    Args:
        config: options of the run.
        build: builds the model; it is called with the device `meta`.
        num_nodes: nodes of the graph.
        num_columns: feature columns.
        num_seeds: seeds per epoch.
        layer_nodes: in full-batch training, the numbers of nodes that each layer reads and, at the
            end, of the seeds; see `LayerNodes.counts`.

    Raises:
        RuntimeError: the size of a weight exceeds 64 bits.
    """
    try:
        with torch.device("meta"):
            model = build()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise RuntimeError(_refusal("more bytes for its weights than 64 bits can count")) from error
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # mixed precision has features and outputs of 16 bits
    item = AUTOCAST_DTYPES.get(config.training.precision, next(model.parameters()).dtype).itemsize
    # muon has one for weight matrices, which are nearly all parameters
    states = 1 if config.training.optimizer.name in ("sgd", "muon") else 2
    widths = next(part.widths for part in model.modules() if isinstance(part, Model))
    training = weights * (2 + states)
    if layer_nodes is not None:
        # if the seeds are all nodes, the features may be used in place
        gathered = layer_nodes[0] if layer_nodes[-1] < num_nodes else 0
        outputs = sum(n * width for n, width in zip(layer_nodes[1:], widths, strict=True))
        return Footprint(training, (gathered * num_columns + outputs) * item, is_full_batch=True)
    assert isinstance(config.loading.batch_size, int), "a full-batch run has layer_nodes"
    seeds = min(config.loading.batch_size, num_seeds, num_nodes)
    return Footprint(training, minibatch=seeds * (num_columns + sum(widths)) * item)


def check_memory(found: Footprint, device: torch.device, group: Group) -> None:
    """Compare the memory that a run needs with that of this machine or its GPU.

    Args:
        found: the estimate for the run.
        device: device of this worker.
        group: all workers.

    Raises:
        RuntimeError: there is not enough memory; raised on all workers if on one.
    """
    with joint_work(group):
        needs = found.training + found.minibatch
        if device.type == "cuda":
            who, has = str(device), torch.cuda.get_device_properties(device).total_memory
        else:
            who, has, needs = "this machine", total_bytes(), needs * group.local_world_size
        if needs > has:
            amounts = f"at least {_shown(needs)}, but {who} has {_shown(has)}"
            raise RuntimeError(_refusal(f"{amounts}: {found.describe()}", found.is_full_batch))


def _refusal(needs: str, is_full_batch: bool = False) -> str:
    remedy = "use a smaller --hidden or --batch-size, fewer heads, or fewer --workers"
    if is_full_batch:
        remedy = "use minibatches with --batch-size 1024, a smaller --hidden or fewer heads"
    return f"not enough memory: this run needs {needs}\n\nhint: {remedy}"


def _shown(num_bytes: int) -> str:
    units = {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6}
    unit = next((unit for unit, size in units.items() if num_bytes >= size), "MB")
    return f"{num_bytes / units[unit]:,.1f} {unit}"
