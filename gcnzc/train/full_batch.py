"""Evaluate the whole graph in one pass, in full-batch training."""

from torch import Tensor, nn

from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.train.config import TrainConfig
from gcnzc.train.inference import evaluation_mode

# A pass over the whole graph needs more memory than a training step if the training nodes depend
# on few nodes. It is used if the graph has at most MAX_NODES_FACTOR times as many nodes as a step,
# or if the features and two hidden layers of all nodes take at most MAX_PASS_BYTES.
MAX_NODES_FACTOR, MAX_PASS_BYTES = 2, 1 << 30


def build_evaluation_loader(
    config: TrainConfig,
    data: Dataset,
    table: FeatureTable,
    model: nn.Module,
    training: FullBatchLoader,
) -> FullBatchLoader | None:
    """Build the loader of all nodes for `compute_logits`; None if a pass may need much more memory.

    Args:
        config: options of the run.
        data: the graph.
        table: feature table of the run.
        model: the model of the run.
        training: the loader of the training nodes.
    """
    assert isinstance(model, Model), "the models of node classification are"
    num_nodes, dtype = data.graph.num_nodes, parameter_dtype(model)
    # with jumping knowledge, the outputs of all layers are kept and combined
    columns = 2 * (max(model.widths) if model.jumping == "none" else sum(model.widths))
    pass_bytes = num_nodes * (table.num_columns + columns) * dtype.itemsize
    is_small = num_nodes <= MAX_NODES_FACTOR * training.batch.blocks[0].num_src
    if not is_small and pass_bytes > MAX_PASS_BYTES:
        return None
    return FullBatchLoader(
        data.graph,
        table,
        None,
        config.layers,
        labels=data.labels,
        device=training.device,
        dtype=dtype,
    )


def compute_logits(model: Model, loader: FullBatchLoader, nodes: Tensor) -> Tensor:
    """Compute the logits of nodes with one pass of the model over the whole graph.

    The model runs in evaluation mode; its mode is restored afterwards.

    Args:
        model: on the device of `loader`.
        loader: of all nodes, in order.
        nodes: (M,) int64 node ids, on the host.

    Returns:
        (M, classes) on the host.
    """
    batch = loader.batch
    with evaluation_mode(model):
        logits: Tensor = model(batch.blocks, batch.x)
        return logits[nodes.to(logits.device)].cpu()
