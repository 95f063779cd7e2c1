"""The task of link prediction in heterogeneous graphs."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.features.embedding import EmbeddingTable
from gcnzc.models.link import Dot, HadamardMLP
from gcnzc.models.metrics import score_pairs
from gcnzc.models.ranking import HeldOutEdges, score_ranks
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.sampling.link import Exclude, LinkSampler
from gcnzc.train.build import build_hetero_sampler, choose_fanouts
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.hetero.edge_split import (
    describe_missing_times,
    split_edges_of_run,
)
from gcnzc.train.hetero.inference import pair_outputs, typed_outputs, with_embeddings
from gcnzc.train.inference import Progress
from gcnzc.train.node_outputs import Evaluated, Spans, minibatch_outputs
from gcnzc.train.tasks.base import EVALUATED, Scores, broadcast_scores, build_evaluator
from gcnzc.train.tasks.link import Decoder

# edges that a worker ranks at once; independent of the number of workers
RANKED_EDGES = 1024

# pairs of a minibatch of an evaluation
EVALUATED_PAIRS = 4096

# accepted also for destination types of fewer nodes, which it then repeats
DEFAULT_EVALUATE_NEGATIVES = 100


class HeteroLinkTask:
    """The edges of one type.

    Each held-out edge is ranked among pairs of its source with random destinations, or with all
    nodes of their type.

    Args:
        config: options of the run.
        data: the graph.
        edge_type: type of the edges to predict, such as user,buys,item, or the name of its
            relation; by default the only edge type. `load_hetero` has found it.
        reverse_types: edge types with the reverse edges, such as item,bought_by,user, or names of
            relations, separated by commas; they are held out together. none: no edge type; auto:
            those that are found by their edges and names.
        split: edges that are held out: the latest, of which the test edges are the last (time), or
            random ones; auto: time if the edges or their nodes have times.
        valid_edges: fraction of the edges that is held out for validation.
        test_edges: fraction of the edges that is held out for test.
        evaluate_negatives: random destinations with which each held-out edge is ranked in an
            evaluation; all: all nodes of their type to which its source has no training edge (for
            test: no training or validation edge), which gives recall@K and hit_rate@K instead of
            auc; more than 100 must be below the number of destinations.
        decoder: scores a pair from the elementwise product of its embeddings: mlp applies three
            linear layers, dot sums.
        num_negatives: negative pairs per edge, with the source of the edge.
        strict: reject negative pairs that are edges of the graph.
        exclude: edges excluded from the sampled neighbourhoods: none, those of the minibatch
            (self), or these and their reverse edges (reverse).

    Raises:
        ValueError: the edges cannot be split as the options say.
    """

    has_accuracy: bool = False
    best_accuracy: float | None = None
    labels: Tensor | None = None
    metric = "mrr"

    def __init__(
        self,
        config: TrainConfig,
        data: HeteroDataset,
        *,
        edge_type: str = "",
        reverse_types: str = "auto",
        split: Literal["auto", "time", "random"] = "auto",
        valid_edges: float = 0.1,
        test_edges: float = 0.1,
        evaluate_negatives: int | Literal["all"] = DEFAULT_EVALUATE_NEGATIVES,
        decoder: Decoder = "mlp",
        num_negatives: int = 1,
        strict: bool = True,
        exclude: Exclude = "reverse",
    ) -> None:
        self.evaluate_negatives, self.strict = evaluate_negatives, strict
        self.config, self.data = config, data
        self.is_temporal = config.graph.is_temporal
        self.split = split_edges_of_run(config, data)
        if self.is_temporal and self.split.times is None:
            chosen = config.graph.temporal
            missing = describe_missing_times(self.split.edge_type, chosen["time"])
            remedy = "" if chosen["time"] == "both" else "omit time to use others, or "
            raise ValueError(
                f"--temporal {chosen}: {missing}, which limit the neighbours of an edge"
                f"\n\nhint: {remedy}omit --temporal"
            )
        self.sampler: Any = self._build_sampler(
            "train", config.loading.fanouts, num_negatives, exclude=exclude
        )
        self.evaluator = build_evaluator(config)
        self.seeds = torch.arange(self.sampler.num_items)
        # of the node types without features; set when the model is known
        self.embeddings: Mapping[str, EmbeddingTable] = {}

    def _build_sampler(
        self, split: str, fanouts: Sequence[int], num_negatives: int, *, exclude: Any
    ) -> LinkSampler:
        times = self.split.times if self.is_temporal else None
        return LinkSampler(
            build_hetero_sampler(self.config, self.split.graph, fanouts),
            self.split.edges[split],
            self.split.edge_type,
            times=None if times is None else times[split],
            num_negatives=num_negatives,
            strict=self.strict,
            # None removes no edges, because neighbourhoods are earlier than their edge, but checks
            # that reverse types have times
            exclude=None if self.split.are_kept else exclude,
            reverse_types=self.split.reverse_types,
            known=self.data.graph,
            seed=self.config.loading.seed,
        )

    def logits(self, model: nn.Module, batch: HeteroBatch) -> Tensor:
        """See `Task`."""
        logits: Tensor = model(batch.blocks, with_embeddings(batch, self.embeddings), batch.pairs)
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See `Task`."""
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def evaluate(self, of: Evaluated, splits: Sequence[str] = EVALUATED) -> Scores:
        """See `Task`."""
        result: Scores = {}
        count = self.evaluate_negatives
        for split in (name for name in splits if name in EVALUATED):
            if count == "all":
                scores = self._rank_among_all(of, split)
            else:
                rows = self._score_with_negatives(of, split, count)
                scores = score_pairs(rows[:, 0], rows[:, 1:], self.metric)
            for name, value in scores.items():
                result.setdefault(name, {})[split] = value
        return broadcast_scores(result, of.group)

    def _rank_among_all(self, of: Evaluated, name: str) -> dict[str, float]:
        """Rank the edges of a split among all nodes of the destination type, without known ones.

        The known destinations of a source are those of its training edges, and in the test split
        also those of its validation edges.
        """
        split, time = self.split, None
        source, _, destination = split.edge_type
        earlier = ("train",) if name == "valid" else ("train", "valid")
        num_destinations = split.graph.nodes(destination).num_nodes
        held_out = HeldOutEdges(
            split.edges[name],
            torch.cat([split.edges[each] for each in earlier], dim=1),
            num_destinations,
            is_one_type=source == destination,
        )
        if self.is_temporal:
            assert split.times is not None, "checked by the constructor"
            # neighbours are earlier than all edges of the split
            time = int(split.times[name].min()) - 1

        def embed(node_type: str, nodes: Tensor) -> Tensor:
            return typed_outputs(
                replace(of, model=of.model.encoder),
                self.config,
                split.graph,
                self.embeddings,
                (node_type, nodes),
                fanouts=self.evaluator.sampled_fanouts,
                times=None if time is None else torch.full((len(nodes),), time),
            )

        sources = embed(source, held_out.sources)
        destinations = embed(destination, torch.arange(num_destinations)).to(of.device)
        decoder = cast(Dot | HadamardMLP, of.model.decoder)

        def score(rows: Tensor) -> Tensor:
            return decoder.score_all_pairs(sources[rows].to(of.device), destinations).cpu()

        def compute_ranks(spans: Spans) -> Generator[Tensor, None, None]:
            yield from held_out.compute_ranks(spans, score)

        shape = held_out.edges.shape[1], 2
        ranks = minibatch_outputs(of, shape, RANKED_EDGES, compute_ranks)
        return score_ranks(held_out.edges, ranks.double())

    def _score_with_negatives(self, of: Evaluated, split: str, num_negatives: int) -> Tensor:
        """Return the logits of each edge of a split, and then of its negatives.

        The pairs of an edge are divided into parts of at most `EVALUATED_PAIRS`, so that a
        minibatch takes bounded memory for any number of negatives.
        """
        fanouts = choose_fanouts(self.evaluator.sampled_fanouts, self.config.layers)
        sampler = self._build_sampler(split, fanouts, num_negatives, exclude="none")
        size = max(1, EVALUATED_PAIRS - 1)
        firsts = range(0, num_negatives, size)
        rows = torch.empty(sampler.num_items, 1 + num_negatives)
        for number, first in enumerate(firsts):
            count = min(size, num_negatives - first)
            part = replace(of, progress=_part_of_progress(of.progress, number, len(firsts)))
            of_part = sampler.with_negatives(first, count)
            edges = max(1, EVALUATED_PAIRS // (1 + count))
            own = pair_outputs(part, self.config, of_part, edges, self.embeddings)
            # every part has the edges themselves; minibatches determine how logits are rounded
            rows[:, 1 + first : 1 + first + count] = own[:, 1:]
            if not first:
                rows[:, 0] = own[:, 0]
        return rows

    def choose_evaluation(
        self, of: Evaluated, say: Callable[[str], object], splits: Sequence[str] = EVALUATED
    ) -> None:
        """See `Task`; there is no choice, but edges must have enough negatives."""
        if self.evaluate_negatives != "all":
            self._check_evaluate_negatives(self.evaluate_negatives, say)
            for name in (each for each in splits if each in EVALUATED):
                times = self.split.times if self.is_temporal else None
                self.sampler.check_negatives(
                    self.split.edges[name], None if times is None else times[name]
                )
        counts = ", ".join(f"{ids.shape[1]:,} {name}" for name, ids in self.split.edges.items())
        how = "latest" if self.split.kind == "time" else "random"
        reverses = self.split.reverse_types
        message = f"edges {self.split.edge_type}: {counts}; the {how} ones are held out"
        if reverses is not None:
            message += f"; reverse edge types: {', '.join(map(str, reverses)) or 'none'}"
        say(message)

    def _check_evaluate_negatives(self, count: int, say: Callable[[str], object]) -> None:
        """Check that edges are not ranked among as many random nodes as there are.

        The default is accepted for types of few nodes.

        Raises:
            ValueError: `count` is larger than the default, and there are not more destinations.
        """
        name = self.split.edge_type[2]
        num_nodes = self.split.graph.nodes(name).num_nodes
        if count < num_nodes:
            return
        if count > DEFAULT_EVALUATE_NEGATIVES:
            raise ValueError(
                f"evaluate_negatives={count}, but there are {num_nodes:,} nodes of type "
                f"{name!r}\n\nhint: evaluate_negatives=all ranks each edge among all "
                "of them"
            )
        say(
            f"evaluation: each edge is ranked among {count} random nodes of type {name!r}, of "
            f"which there are {num_nodes:,}, so that nodes repeat; evaluate_negatives=all "
            "ranks it among all of them"
        )

    def outputs(self, of: Evaluated) -> tuple[Tensor, Scores]:
        """Raise a ValueError: a node has another embedding in the neighbourhood of each pair."""
        raise ValueError(
            "--predictions is not supported for link prediction in heterogeneous graphs\n\n"
            "hint: omit --predictions"
        )


def _part_of_progress(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Return the progress of one of several parts of equal work."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, count * total)
