"""Compute the outputs of the evaluated nodes by the method that --evaluate selects."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gcnzc.exchange import run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.graph.graph import Graph
from gcnzc.models.layers import Layer
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.system.host_memory import total_bytes
from gcnzc.train.config import LoadingOptions
from gcnzc.train.inference import inference
from gcnzc.train.layerwise.layer import gather_rows, is_projected
from gcnzc.train.layerwise.ranges import BATCH_NODES, limit_batch_nodes, needed_nodes
from gcnzc.train.node_outputs import Evaluated, Spans, minibatch_outputs

# half of the memory remains for the features, the graph and the minibatches
MEMORY_SHARE = 0.5

# independent of the number of workers, as minibatches determine how outputs are rounded
SAMPLED_NODES = 1024


def needed(loading: LoadingOptions) -> "Evaluator":
    """The nodes that the evaluated nodes depend on."""
    return Evaluator("needed", loading.fanouts, loading.seed)


def exact(loading: LoadingOptions) -> "Evaluator":
    """All nodes."""
    return Evaluator("exact", loading.fanouts, loading.seed)


def sampled(loading: LoadingOptions, *, fanouts: tuple[int, ...] = ()) -> "Evaluator":
    """Sampled neighbours of the evaluated nodes.

    Args:
        fanouts: neighbours sampled per node, one number per layer, input layer first; by default
            those of --fanouts.
    """
    return Evaluator("sampled", fanouts or loading.fanouts, loading.seed)


def auto(loading: LoadingOptions, *, fanouts: tuple[int, ...] = ()) -> "Evaluator":
    """The needed nodes, or sampled neighbours if layer outputs take over half the memory.

    Args:
        fanouts: as for sampled.
    """
    return Evaluator("auto", fanouts or loading.fanouts, loading.seed)


@dataclass
class Evaluator:
    """Computes the outputs of evaluated nodes of a graph of one type.

    The sampled neighbours of a node depend only on the graph, the seed and the fanouts, so that two
    models, or the model in two epochs, are compared on the same neighbourhoods.

    Attributes:
        method: which outputs of hidden layers are computed: those of all nodes ("exact"), of those
            that the evaluated nodes depend on ("needed"), or of sampled neighbours ("sampled");
            `choose` replaces "auto".
        fanouts: of "sampled": neighbours per node, one number per layer, input layer first; -1
            takes all. "auto" does not sample without them, or if all are -1.
        seed: random seed of "sampled".
    """

    method: str = "needed"
    fanouts: Sequence[int] = ()
    seed: int = 0

    @property
    def sampled_fanouts(self) -> Sequence[int] | None:
        """The fanouts if the method is "sampled"; None if all neighbours are read."""
        return self.fanouts if self.method == "sampled" else None

    def choose(
        self, of: Evaluated, graph: Graph, nodes: Tensor, say: Callable[[str], object]
    ) -> None:
        """Choose a method if it is "auto", and say which; a collective call.

        With another method, say if its rows exceed the memory.

        The choice depends on the graph, the model and the total memory of the machine of worker 0,
        not on free memory, so that a run that is resumed on this machine makes the same choice.
        """
        is_auto, is_large = self.method == "auto", False
        if of.group.rank == 0 and self.method != "sampled":
            memory, sizes = total_bytes(), (of.model, graph, of.table.num_columns)
            limit = int(MEMORY_SHARE * memory) if is_auto else memory
            # an upper bound for fewer nodes, which need not be found then
            num_bytes = peak_bytes(*sizes, None)
            if num_bytes > limit and self.method != "exact":
                num_bytes = peak_bytes(*sizes, nodes)
            is_large = num_bytes > limit
            needs = f"an evaluation takes {num_bytes / 1e9:.3g} GB for layer outputs"
            available = f"{memory / 1e9:.3g} GB of memory"
            if is_auto:
                is_large = is_large and any(fanout >= 0 for fanout in self.fanouts)
                chosen = "sampled" if is_large else "needed"
                say(f"evaluation: {chosen}, because without sampling {needs}, of {available}")
            elif is_large:
                say(f"warning: {needs}, but there are {available}; use --evaluate sampled or auto")
        if is_auto:
            is_large = bool(run(all_gather_scalar(int(is_large)), of.group)[0])
            self.method = "sampled" if is_large else "needed"

    def outputs(self, of: Evaluated, graph: Graph, nodes: Tensor | None) -> Tensor:
        """Compute the outputs of a model for nodes.

        Args:
            of: the model, and the features of the graph.
            graph: the whole graph.
            nodes: (M,) int64 node ids, on the host; None for all nodes.

        Returns:
            (M, columns) on the host, the same on all workers; those of one machine share the
            memory.
        """
        model, table, device = of.model, of.table, of.device
        if self.method != "sampled":
            asked = nodes if self.method == "needed" else None
            rows = inference(
                model, graph, table, device, nodes=asked, progress=of.progress, group=of.group
            )
            return rows if asked is nodes else rows[nodes]
        ids = torch.arange(graph.num_nodes) if nodes is None else nodes
        sampler, dtype = Sampler(graph, self.fanouts, self.seed), parameter_dtype(model)

        def compute(spans: Spans) -> Generator[Tensor, None, None]:
            for begin, end in spans:
                # a minibatch must not have a node twice
                seeds, places = ids[begin:end].unique(return_inverse=True)
                batch = sampler.sample(seeds, epoch=0)
                x = gather_rows(table, batch.nodes, device, dtype)
                logits = model([block.to(device) for block in batch.blocks], x)
                yield logits[places.to(device)]

        return minibatch_outputs(of, (len(ids), model.out_features), SAMPLED_NODES, compute)


def peak_bytes(model: Model, graph: Graph, num_columns: int, nodes: Tensor | None) -> int:
    """Predict the bytes of the layer inputs and outputs that are in memory at once in `inference`.

    Args:
        model: the model, on any device.
        graph: the whole graph.
        num_columns: columns of the features.
        nodes: (M,) int64 ids of the evaluated nodes; None for all nodes.
    """
    layers = [cast(Layer, layer) for layer in model.layers]
    needed = needed_nodes(graph, len(layers), nodes, limit_batch_nodes(graph, BATCH_NODES))
    counts = [graph.num_nodes if ids is None else len(ids) for ids in needed]
    widths = [num_columns if model.input_linear is None else layers[0].in_features, *model.widths]
    # elements that are in memory at once, and outputs of the nodes that are combined to the logits
    peak = kept = 0
    for index, layer in enumerate(layers):
        sources, targets = counts[index : index + 2]
        # unprojected features are in memory anyway
        has_inputs = index > 0 or model.input_linear is not None
        columns = has_inputs * widths[index]
        columns += is_projected(layer) * layer.heads * layer.out_features
        peak = max(peak, kept + columns * sources + widths[index + 1] * targets)
        if model.jumping != "none":
            kept += widths[index + 1] * counts[-1]
    return peak * parameter_dtype(model).itemsize
