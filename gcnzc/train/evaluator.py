"""Compute the outputs of the evaluated nodes by the method that --evaluate selects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.exchange import Group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model
from gcnzc.system.host_memory import total_bytes
from gcnzc.train.config import LoadingOptions
from gcnzc.train.evaluation_cost import choose_evaluation, format_memory_warning
from gcnzc.train.inference import Progress
from gcnzc.train.node_outputs import node_outputs

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
        nodes: Tensor | None,
        progress: Progress | None = None,
        group: Group | None = None,
    ) -> Tensor:
        """Return the (M, columns) outputs of nodes, see `node_outputs`."""
        return node_outputs(
            model,
            graph,
            table,
            device,
            nodes,
            self.method,
            fanouts=self.fanouts,
            seed=self.seed,
            progress=progress,
            group=group,
        )
