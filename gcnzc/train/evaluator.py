"""Compute the outputs of the evaluated nodes by the method that --evaluate selects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gcnzc.exchange import run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.graph.graph import Graph
from gcnzc.system.host_memory import total_bytes
from gcnzc.train.config import LoadingOptions
from gcnzc.train.evaluation_cost import choose_evaluation, format_memory_warning
from gcnzc.train.node_outputs import Evaluated, node_outputs

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
        self, of: Evaluated, graph: Graph, nodes: Tensor, say: Callable[[str], object]
    ) -> None:
        """Choose a method if it is "auto", and say which and why; a collective call.

        With another method, say if its rows exceed the memory.

        The choice depends on the graph, the model and the total memory of the machine of worker 0,
        not on free memory, so that a run that is resumed on this machine makes the same choice.
        """
        asked = of.model, graph, None if self.method == "exact" else nodes, of.table.num_columns
        number = 0
        if of.group.rank == 0 and self.method == "auto":
            can_sample = any(fanout >= 0 for fanout in self.fanouts)
            choice = choose_evaluation(*asked, total_bytes(), can_sample=can_sample)
            say(f"evaluation: {choice.method}, {choice.reason}")
            number = METHODS.index(choice.method)
        elif of.group.rank == 0 and self.method != "sampled":
            message = format_memory_warning(*asked, total_bytes())
            if message:
                say(message)
        if self.method == "auto":
            self.method = METHODS[run(all_gather_scalar(number), of.group)[0]]

    def outputs(self, of: Evaluated, graph: Graph, nodes: Tensor | None) -> Tensor:
        """Return the (M, columns) outputs of nodes, see `node_outputs`."""
        return node_outputs(of, graph, nodes, self.method, fanouts=self.fanouts, seed=self.seed)
