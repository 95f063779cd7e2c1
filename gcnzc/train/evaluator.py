"""Compute the outputs of the evaluated nodes by the method that --evaluate selects."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.exchange import Group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.system.host_memory import total_bytes
from gcnzc.train.config import LoadingOptions
from gcnzc.train.evaluation_cost import choose_evaluation, format_memory_warning
from gcnzc.train.inference import Progress, inference
from gcnzc.train.layerwise.layer import gather_rows
from gcnzc.train.minibatch_outputs import Spans, minibatch_outputs

# Compute the outputs of a model for nodes from sampled neighbourhoods.
#
# The nodes are divided into the same minibatches for any number of workers.
#
# Notation: M requested nodes.


# independent of the number of workers, as minibatches determine how outputs are rounded
SAMPLED_NODES = 1024


def sampled_inference(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device,
    *,
    nodes: Tensor,
    fanouts: Sequence[int],
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the logits of nodes from sampled neighbourhoods.

    The model runs in evaluation mode; its mode is restored afterwards. The sampled neighbours of a
    node depend only on the graph, the seed and the fanouts, so that two models, or the model in two
    epochs, are compared on the same neighbourhoods.

    Args:
        model: a model on `device`.
        graph: the whole graph, with N nodes.
        table: (N, in_features) features, on the host or on `device`.
        device: device of the computation.
        nodes: (M,) int64 node ids, on the host.
        fanouts: neighbours per node, one number per layer, input layer first; -1 takes all.
        seed: random seed of the sampling.
        progress: called with (done, total) of the nodes that this worker computes.
        group: the workers among which the nodes are divided; all pass the same arguments. Default:
            this process only.

    Returns:
        (M, columns) on the host, the same on all workers; those of one machine share the memory.
    """
    sampler, dtype = Sampler(graph, fanouts, seed), parameter_dtype(model)

    def compute(spans: Spans) -> Generator[Tensor, None, None]:
        for begin, end in spans:
            # a minibatch must not have a node twice
            seeds, places = nodes[begin:end].unique(return_inverse=True)
            batch = sampler.sample(seeds, epoch=0)
            x = gather_rows(table, batch.nodes, device, dtype)
            logits = model([block.to(device) for block in batch.blocks], x)
            yield logits[places.to(device)]

    shape = len(nodes), model.out_features
    return minibatch_outputs(model, shape, SAMPLED_NODES, compute, progress, group)


METHODS = ("needed", "exact", "sampled")


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
    """The cheaper one of needed and exact, or sampled if layer outputs take over half the memory.

    Args:
        fanouts: as for sampled.
    """
    return Evaluator("auto", fanouts or loading.fanouts, loading.seed)


@dataclass
class Evaluator:
    """Computes the outputs of evaluated nodes.

    Attributes:
        method: "needed", "exact", "sampled" or "auto"; `choose` replaces "auto".
        fanouts: of "sampled"; "auto" does not sample without them, or if all are -1.
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
        self,
        model: Model,
        graph: Graph,
        nodes: Tensor,
        num_columns: int,
        group: Group,
        say: Callable[[str], object],
    ) -> None:
        """Choose a method if it is "auto", and say which and why; a collective call.

        With another method, say if its rows exceed the memory.

        The choice depends on the graph, the model and the total memory of the machine of worker 0,
        not on free memory, so that a run that is resumed on this machine makes the same choice.
        """
        if group.rank == 0 and self.method in ("needed", "exact"):
            evaluated, memory = None if self.method == "exact" else nodes, total_bytes()
            if message := format_memory_warning(model, graph, evaluated, num_columns, memory):
                say(message)
        if self.method != "auto":
            return
        number = 0
        if group.rank == 0:
            memory, can_sample = total_bytes(), any(number >= 0 for number in self.fanouts)
            choice = choose_evaluation(
                model, graph, nodes, num_columns, memory, can_sample=can_sample
            )
            say(f"evaluation: {choice.method}, {choice.reason}")
            number = METHODS.index(choice.method)
        self.method = METHODS[run(all_gather_scalar(number), group)[0]]

    def outputs(
        self,
        model: Model,
        graph: Graph,
        table: FeatureTable,
        device: torch.device,
        nodes: Tensor,
        progress: Progress,
        group: Group | None,
    ) -> Tensor:
        """Return the (M, columns) outputs of (M,) nodes on the host, the same on all workers."""
        if self.method == "sampled":
            return sampled_inference(
                model,
                graph,
                table,
                device,
                nodes=nodes,
                fanouts=self.fanouts,
                seed=self.seed,
                progress=progress,
                group=group,
            )
        if self.method == "exact":
            rows = inference(model, graph, table, device, progress=progress, group=group)
            return rows[nodes]
        assert self.method == "needed", "`choose` is called first"
        return inference(model, graph, table, device, nodes=nodes, progress=progress, group=group)
