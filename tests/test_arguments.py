"""Wrong arguments of loaders, graphs and features are rejected by name and value."""

import inspect
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from libraries import needs_dgl, needs_pyg

import gcnzc
from gcnzc import FeatureTable, FullBatchLoader, Graph, LinkSampler, Loader, Sampler
from gcnzc.features import EmbeddingTable
from gcnzc.models import gnn
from gcnzc.system.arguments import describe

NAN, HUGE = float("nan"), 2**70


class Anything:
    """An object that no argument accepts."""


WRONG = (
    *("x", NAN, float("inf"), -5, HUGE, 2.5, 2.0, True, None, Anything()),
    *([], [2.5], [HUGE], [-5], [True], ["x"], {}, torch.tensor([NAN]), np.array([2.5])),
)
# what arguments accept of these: truth values, those that may be left out, seeds
FLAG, OPTIONAL, SEED = (True,), (None,), (-5,)


@dataclass
class Case:
    """A class or function, valid arguments, and the names of those that are tested."""

    target: Any
    valid: dict[str, Any]
    names: str
    accepts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """what arguments accept of WRONG, besides what follows from their defaults"""
    call: Any = None
    """what is called with the arguments, if not the target"""

    def accepted(self, name: str) -> tuple[Any, ...]:
        """What an argument accepts of WRONG."""
        if name in self.accepts:
            return self.accepts[name]
        default = self.default(name)
        return FLAG if isinstance(default, bool) else OPTIONAL if default is None else ()

    def default(self, name: str) -> Any:
        """The default of an argument, also of a base class that gets it."""
        kinds = self.target.__mro__ if isinstance(self.target, type) else [self.target]
        for kind in kinds:
            parameters = inspect.signature(kind.__init__ if kind in kinds[1:] else kind).parameters
            if name in parameters:
                return parameters[name].default
        return inspect.Parameter.empty


NODES = 12
EDGE = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
GRAPH = Graph.from_edges(*EDGE, NODES)
TABLE = FeatureTable(torch.ones(NODES, 2))
EMBEDDINGS = EmbeddingTable(NODES, 2)
SEEDS = torch.arange(NODES)


def first_of(kind, *given):
    """What makes a loader of a class and takes one minibatch."""
    return lambda **arguments: list(itertools.islice(kind(*given, **arguments), 1))


def sample_first(kind):
    """What makes a sampler of a class and takes one minibatch."""
    return lambda **arguments: kind(**arguments).sample(SEEDS[:3], 0)


def load_state(**values):
    loader = Loader(GRAPH, TABLE, SEEDS, [2], 4, threads=1)
    loader.load_state_dict(loader.state_dict() | values)
    return list(loader)


def set_epoch(**arguments):
    loader = Loader(GRAPH, TABLE, SEEDS, [2], 4, threads=1)
    loader.set_epoch(**arguments)
    return list(loader)


LOADER = {"graph": GRAPH, "table": TABLE, "seeds": SEEDS, "fanouts": [2], "batch_size": 4}
LINKS = {"sampler": Sampler(GRAPH, [2]), "edges": EDGE}
SAMPLER = {"graph": GRAPH, "fanouts": [2]}
MODEL = {"norm": "batch", "in_features": 2, "hidden": 3, "num_classes": 2, "num_layers": 2}
# pre_activation needs them
MODEL |= {"input_linear": True, "output_linear": True}
MODEL_NAMES = "in_features hidden num_classes num_layers dropout input_dropout norm pre_norm "
MODEL_NAMES += "pre_activation residual input_linear output_linear jumping activation init"
ATTENTION = f"{MODEL_NAMES} heads output_heads attention_dropout"
CHOICES = "bidirected self_loops duplicates"
ROWS = {"rows": TABLE.rows}
CODES = {"rows": torch.ones(NODES, 2, dtype=torch.int8), "scales": torch.ones(NODES)}
GIVEN = {"bidirected": FLAG, "self_loops": (), "duplicates": ()}
COMPRESSED = {"indptr": [0, 1], "indices": [0]}
EDGES = {"src": EDGE[0], "dst": EDGE[1], "num_nodes": NODES}
INFERENCE = {"model": gnn.SAGE(2, 3, 2, 2), "graph": GRAPH, "table": TABLE}
CACHE = {"table": TABLE, "size": 0.5, "ranking": torch.ones(NODES)}
PRESAMPLED = {"graph": GRAPH, "seeds": SEEDS, "fanouts": [2], "batch_size": 4, "batches": 4}
WITH_SEED = {"seed": SEED}
STATE = "epoch position done batch_size world_size seed fanouts"
SAMPLE = {"seeds": SEEDS, "epoch": 0}, "seeds epoch", {"seeds": ([],)}
CASES = {
    "Graph": Case(
        Graph, {"indptr": [0, 0], "indices": []}, "indptr indices check", {"indices": ([],)}
    ),
    "Graph.from_edges": Case(Graph.from_edges, EDGES, f"src dst num_nodes {CHOICES}", GIVEN),
    "Graph.from_csc": Case(Graph.from_csc, COMPRESSED, f"indptr indices {CHOICES}", GIVEN),
    "Graph.from_csr": Case(Graph.from_csr, COMPRESSED, f"indptr indices {CHOICES}", GIVEN),
    "Graph.from_dgl": Case(Graph.from_dgl, {}, "graph"),
    "Graph.from_pyg": Case(Graph.from_pyg, {}, "data"),
    "FeatureTable": Case(FeatureTable, ROWS, "rows kernel_config"),
    # codes without scales are rows of int8
    "FeatureTable of codes": Case(FeatureTable, CODES, "scales scale_columns"),
    "FeatureTable.quantized": Case(FeatureTable.quantized, ROWS, "rows dtype scale_columns"),
    "FeatureTable.to": Case(TABLE.to, {}, "device"),
    "FeatureTable.gather": Case(TABLE.gather, {"ids": SEEDS}, "ids out threads"),
    "EmbeddingTable": Case(
        EmbeddingTable,
        {"num_rows": NODES, "num_columns": 2},
        "num_rows num_columns dtype init scale seed threads",
        # any standard deviation
        {"scale": (2.5, 2.0, HUGE), **WITH_SEED},
    ),
    "EmbeddingTable.gather": Case(EMBEDDINGS.gather, {"ids": SEEDS}, "device threads"),
    "Sampler": Case(
        Sampler, SAMPLER, "graph fanouts seed edge_ids", WITH_SEED, sample_first(Sampler)
    ),
    "Sampler.sample": Case(Sampler(GRAPH, [2]).sample, *SAMPLE),
    "LinkSampler": Case(
        LinkSampler,
        LINKS,
        "sampler edges negatives num_negatives strict exclude known seed",
        WITH_SEED,
        sample_first(LinkSampler),
    ),
    "LinkSampler.sample": Case(LinkSampler(**LINKS).sample, *SAMPLE),
    "Loader": Case(
        Loader,
        LOADER,
        "graph table seeds fanouts batch_size labels device shuffle drop_last seed rank world_size "
        "threads ahead sampler copied_share priority in_degrees may_be_empty",
        {"table": OPTIONAL, "priority": (-5,), **WITH_SEED},
        first_of(Loader),
    ),
    "FullBatchLoader": Case(
        FullBatchLoader,
        {"graph": GRAPH, "table": TABLE, "seeds": SEEDS, "num_layers": 2},
        "graph table seeds num_layers labels device dtype",
        {"table": OPTIONAL, "seeds": OPTIONAL},
        first_of(FullBatchLoader),
    ),
    "Loader.set_epoch": Case(Loader.set_epoch, {}, "epoch", {}, set_epoch),
    "Loader.load_state_dict": Case(load_state, {}, STATE),
    "presample": Case(
        gcnzc.presample,
        PRESAMPLED,
        "graph seeds fanouts batch_size seed batches threads progress",
        WITH_SEED,
    ),
    "cached": Case(gcnzc.cached, CACHE, "table size ranking device devices"),
    "cached_share": Case(
        gcnzc.cached_share,
        CACHE | {"rank": 0, "world_size": 1},
        "table size ranking rank world_size device",
    ),
    "inference": Case(
        gcnzc.inference,
        INFERENCE,
        "model graph table device nodes batch_nodes progress group",
        {"nodes": (None, [])},
    ),
    "SAGE": Case(gnn.SAGE, MODEL, MODEL_NAMES),
    "GCN": Case(gnn.GCN, MODEL, MODEL_NAMES),
    "GAT": Case(gnn.GAT, MODEL, f"{ATTENTION} skip"),
    "GATv2": Case(gnn.GATv2, MODEL, ATTENTION),
}


def is_among(value, accepted):
    return any(value is one or (type(value) is type(one) and value == one) for one in accepted)


def outcomes_of(cases):
    """What is wrong with the answers to wrong arguments."""
    found = []
    for title, case in cases.items():
        call, valid = case.call or case.target, case.valid
        if set(valid) >= set(case.names.split()):
            call(**valid)
        for name, value in itertools.product(case.names.split(), WRONG):
            accepted, given = case.accepted(name), f"{title}({name}={describe(value)})"
            try:
                call(**(valid | {name: value}))
            except (TypeError, ValueError) as error:
                text = str(error)
                if is_among(value, accepted):
                    found.append(f"{given} is rejected: {text!r}")
                elif not names(text, name, value):
                    found.append(f"{given}: {type(error).__name__} {text!r}")
            except Exception as error:
                found.append(f"{given}: {type(error).__name__} {error!s:.200}")
            else:
                if not is_among(value, accepted):
                    found.append(f"{given} is accepted")
    return found


def names(text, name, value):
    """Whether a message has the argument's name and what the value is."""
    shown = [describe(value)]
    if isinstance(value, list):
        count = len(value)
        shown += [*map(describe, value), f"dst {count}", "empty", f"shape ({count},)"]
        shown += [f"{count} numbers", f"{count} elements", f"{count} indices"]
    if isinstance(value, torch.Tensor | np.ndarray):
        shown += ["ndarray", str(value.dtype), str(tuple(value.shape))]
        shown += map(describe, value.tolist())
    return re.search(rf"\b{name}\b", text) is not None and any(one in text for one in shown)


def pyg_cases():
    from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader, TableStore
    from gcnzc.interop.pyg.importing import import_pyg

    data = import_pyg().data.Data(x=TABLE.rows, edge_index=EDGE)
    common = "is_sorted transform tables seed device batch_size drop_last shuffle num_workers "
    common += "threads ahead generator data num_neighbors filter_per_worker "
    # those of torch's loader among them have no default here
    accepts = {"tables": (None, {}), "seed": (None, -5), "shuffle": (None, True)}
    accepts |= {"filter_per_worker": (None, True), "drop_last": FLAG, "generator": OPTIONAL}
    accepts |= {"num_neighbors": ([],), "batch_size": (), "num_workers": (), "device": ()}
    links = {**accepts, "neg_sampling_ratio": (None, 2.0, 2.5)}
    valid = {"data": data, "num_neighbors": [2]}
    return {
        "NeighborLoader": Case(
            NeighborLoader,
            valid,
            f"{common} input_id input_nodes",
            {**accepts, "input_nodes": (None, [])},
            first_of(NeighborLoader),
        ),
        "NeighborLoader of ranks": Case(
            NeighborLoader,
            {"rank": 0, "world_size": 1},
            "rank world_size",
            {"rank": (), "world_size": ()},
            first_of(NeighborLoader, data, [2]),
        ),
        "LinkNeighborLoader": Case(
            LinkNeighborLoader,
            valid,
            f"{common} input_id edge_label_index edge_label neg_sampling neg_sampling_ratio",
            links,
            first_of(LinkNeighborLoader),
        ),
        "TableStore": Case(TableStore, {}, "tables", {"tables": ({},)}),
    }


def dgl_cases():
    from gcnzc.interop.dgl import DataLoader, DglSampler, import_dgl

    dgl = import_dgl()
    graph, sampler = dgl.graph(tuple(EDGE)), dgl.dataloading.NeighborSampler([2])
    accepts = {"indices": ([],), "ddp_seed": SEED, "seed": (None, -5), "tables": (None, {})}
    accepts |= {"drop_last": FLAG, "shuffle": (None, True), "device": OPTIONAL}
    accepts |= {"generator": OPTIONAL}
    return {
        "DataLoader": Case(
            DataLoader,
            {"graph": graph, "indices": SEEDS, "graph_sampler": sampler},
            "graph indices graph_sampler device ddp_seed batch_size drop_last shuffle "
            "sampler_library seed threads ahead tables num_workers generator",
            {**accepts, "batch_size": (), "num_workers": (), "sampler_library": ()},
            first_of(DataLoader),
        ),
        "DglSampler": Case(
            DglSampler,
            SAMPLER,
            "graph fanouts seed",
            WITH_SEED,
            lambda **arguments: DglSampler(**arguments).sample(SEEDS, 0),
        ),
    }


@needs_pyg
def test_wrong_arguments_of_pyg_loaders_are_rejected_by_name_and_value():
    found = outcomes_of(pyg_cases())
    assert not found, "\n".join(found)


@needs_dgl
def test_wrong_arguments_of_dgls_loader_are_rejected_by_name_and_value():
    found = outcomes_of(dgl_cases())
    assert not found, "\n".join(found)


def test_wrong_arguments_are_rejected_by_name_and_value():
    found = outcomes_of(CASES)
    assert not found, "\n".join(found)
