"""Wrong arguments of loaders, graphs and features are rejected by name and value."""

import importlib.util
import itertools
import re

import numpy as np
import pytest
import torch

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

NODES = 12
EDGE = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
GRAPH = Graph.from_edges(*EDGE, NODES)
TABLE = FeatureTable(torch.ones(NODES, 2))
EMBEDDINGS = EmbeddingTable(NODES, 2)
SEEDS = torch.arange(NODES)


def use_loader(**arguments):
    loader = Loader(**arguments)
    return list(itertools.islice(loader, 2))


def use_full_batch(**arguments):
    return list(FullBatchLoader(**arguments))


def sample(**arguments):
    return Sampler(GRAPH, [2]).sample(**arguments)


def sample_links(**arguments):
    return LinkSampler(GRAPH, EDGE, [2]).sample(**arguments)


def use_links(**arguments):
    sampler = LinkSampler(**arguments)
    return sampler.sample(torch.arange(3), 0)


def use_sampler(**arguments):
    return Sampler(**arguments).sample(SEEDS[:3], 0)


def load_state(**values):
    loader = Loader(GRAPH, TABLE, SEEDS, [2], 4, threads=1)
    loader.load_state_dict(loader.state_dict() | values)
    return list(loader)


def set_epoch(**arguments):
    loader = Loader(GRAPH, TABLE, SEEDS, [2], 4, threads=1)
    loader.set_epoch(**arguments)
    return list(loader)


LOADER = {"graph": GRAPH, "table": TABLE, "seeds": SEEDS, "fanouts": [2], "batch_size": 4}
LINKS = {"graph": GRAPH, "edges": EDGE, "fanouts": [2]}
SAMPLER = {"graph": GRAPH, "fanouts": [2]}
MODEL = {"norm": "batch", "in_features": 2, "hidden": 3, "num_classes": 2, "num_layers": 2}
# pre_activation needs them
MODEL |= {"input_linear": True, "output_linear": True}
MODEL_KINDS = {
    "in_features": (),
    "hidden": (),
    "num_classes": (),
    "num_layers": (),
    "dropout": (),
    "input_dropout": (),
    "norm": (),
    "pre_norm": FLAG,
    "pre_activation": FLAG,
    "residual": FLAG,
    "input_linear": FLAG,
    "output_linear": FLAG,
    "jumping": (),
    "activation": (),
    "init": (),
}
CHOICES = {"bidirected": FLAG, "self_loops": (), "duplicates": ()}
CODES = torch.ones(NODES, 2, dtype=torch.int8)
STATE = {"epoch": (), "position": (), "done": (), "batch_size": (), "world_size": ()}
# what is called, its valid arguments, and what each argument accepts of WRONG
CASES = {
    "Graph": (
        Graph,
        {"indptr": [0, 0], "indices": []},
        {"indptr": (), "indices": ([],), "check": FLAG},
    ),
    "Graph.from_edges": (
        Graph.from_edges,
        {"src": EDGE[0], "dst": EDGE[1], "num_nodes": NODES},
        {"src": (), "dst": (), "num_nodes": (), **CHOICES},
    ),
    "Graph.from_csc": (
        Graph.from_csc,
        {"indptr": [0, 1], "indices": [0]},
        {"indptr": (), "indices": (), **CHOICES},
    ),
    "Graph.from_csr": (
        Graph.from_csr,
        {"indptr": [0, 1], "indices": [0]},
        {"indptr": (), "indices": (), **CHOICES},
    ),
    "Graph.from_dgl": (Graph.from_dgl, {}, {"graph": ()}),
    "Graph.from_pyg": (Graph.from_pyg, {}, {"data": ()}),
    "FeatureTable": (FeatureTable, {"rows": TABLE.rows}, {"rows": (), "kernel_config": OPTIONAL}),
    "FeatureTable of codes": (
        FeatureTable,
        {"rows": CODES, "scales": torch.ones(NODES)},
        # codes without scales are rows of int8
        {"scales": OPTIONAL, "scale_columns": OPTIONAL},
    ),
    "FeatureTable.quantized": (
        FeatureTable.quantized,
        {"rows": TABLE.rows},
        {"rows": (), "dtype": (), "scale_columns": OPTIONAL},
    ),
    "FeatureTable.to": (TABLE.to, {}, {"device": ()}),
    "FeatureTable.gather": (
        TABLE.gather,
        {"ids": SEEDS},
        {"ids": (), "out": OPTIONAL, "threads": OPTIONAL},
    ),
    "EmbeddingTable": (
        EmbeddingTable,
        {"num_rows": NODES, "num_columns": 2},
        {
            "num_rows": (),
            "num_columns": (),
            "dtype": (),
            "init": (),
            # any standard deviation
            "scale": (2.5, 2.0, HUGE),
            "seed": SEED,
            "threads": OPTIONAL,
        },
    ),
    "EmbeddingTable.gather": (
        EMBEDDINGS.gather,
        {"ids": SEEDS},
        {"device": OPTIONAL, "threads": OPTIONAL},
    ),
    "Sampler": (use_sampler, SAMPLER, {"graph": (), "fanouts": (), "seed": SEED, "edge_ids": FLAG}),
    "Sampler.sample": (sample, {"seeds": SEEDS, "epoch": 0}, {"seeds": ([],), "epoch": ()}),
    "LinkSampler": (
        use_links,
        LINKS,
        {
            "graph": (),
            "edges": (),
            "fanouts": (),
            "negatives": (),
            "num_negatives": (),
            "strict": FLAG,
            "exclude": (),
            "known": OPTIONAL,
            "seed": SEED,
            "edge_ids": FLAG,
        },
    ),
    "LinkSampler.sample": (
        sample_links,
        {"seeds": SEEDS, "epoch": 0},
        {"seeds": ([],), "epoch": ()},
    ),
    "Loader": (
        use_loader,
        LOADER,
        {
            "graph": (),
            "table": OPTIONAL,
            "seeds": (),
            "fanouts": (),
            "batch_size": (),
            "labels": OPTIONAL,
            "device": (),
            "shuffle": FLAG,
            "drop_last": FLAG,
            "seed": SEED,
            "rank": (),
            "world_size": (),
            "threads": OPTIONAL,
            "ahead": OPTIONAL,
            "sampler": OPTIONAL,
            "copied_share": (),
            "priority": (-5,),
            "in_degrees": FLAG,
            "may_be_empty": FLAG,
        },
    ),
    "FullBatchLoader": (
        use_full_batch,
        {"graph": GRAPH, "table": TABLE, "seeds": SEEDS, "num_layers": 2},
        {
            "graph": (),
            "table": OPTIONAL,
            "seeds": OPTIONAL,
            "num_layers": (),
            "labels": OPTIONAL,
            "device": (),
            "dtype": OPTIONAL,
        },
    ),
    "Loader.set_epoch": (set_epoch, {}, {"epoch": ()}),
    "Loader.load_state_dict": (load_state, {}, {**STATE, "seed": (), "fanouts": ()}),
    "presample": (
        gcnzc.presample,
        {"graph": GRAPH, "seeds": SEEDS, "fanouts": [2], "batch_size": 4, "batches": 4},
        {
            "graph": (),
            "seeds": (),
            "fanouts": (),
            "batch_size": (),
            "seed": SEED,
            "batches": (),
            "threads": OPTIONAL,
            "progress": OPTIONAL,
        },
    ),
    "cached": (
        gcnzc.cached,
        {"table": TABLE, "size": 0.5, "ranking": torch.ones(NODES)},
        {"table": (), "size": (), "ranking": (), "device": OPTIONAL, "devices": OPTIONAL},
    ),
    "cached_share": (
        gcnzc.cached_share,
        {"table": TABLE, "size": 0.5, "ranking": torch.ones(NODES), "rank": 0, "world_size": 1},
        {"table": (), "size": (), "ranking": (), "rank": (), "world_size": (), "device": OPTIONAL},
    ),
    "inference": (
        gcnzc.inference,
        {"model": gnn.SAGE(2, 3, 2, 2), "graph": GRAPH, "table": TABLE},
        {
            "model": (),
            "graph": (),
            "table": (),
            "device": (),
            "nodes": (None, []),
            "batch_nodes": (),
            "progress": OPTIONAL,
            "group": OPTIONAL,
        },
    ),
    "SAGE": (gnn.SAGE, MODEL, MODEL_KINDS),
    "GCN": (gnn.GCN, MODEL, MODEL_KINDS),
    "GAT": (
        gnn.GAT,
        MODEL,
        {
            **MODEL_KINDS,
            "heads": (),
            "output_heads": OPTIONAL,
            "attention_dropout": (),
            "skip": FLAG,
        },
    ),
    "GATv2": (
        gnn.GATv2,
        MODEL,
        {
            **MODEL_KINDS,
            "heads": (),
            "output_heads": OPTIONAL,
            "attention_dropout": (),
            "skip": FLAG,
        },
    ),
}


def is_among(value, accepted):
    return any(value is one or (type(value) is type(one) and value == one) for one in accepted)


def outcomes_of(cases):
    """What is wrong with the answers to wrong arguments."""
    found = []
    for title, (call, valid, arguments) in cases.items():
        if set(valid) >= set(arguments):
            call(**valid)
        for (name, accepted), value in itertools.product(arguments.items(), WRONG):
            given = f"{title}({name}={describe(value)})"
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
        shown += [
            *map(describe, value),
            f"{len(value)} numbers",
            f"dst {len(value)}",
            f"{len(value)} elements",
        ]
        shown += [f"{len(value)} indices", "empty"]
    if isinstance(value, np.ndarray):
        shown.append("ndarray")
    if isinstance(value, list):
        shown.append(f"shape ({len(value)},)")
    if isinstance(value, torch.Tensor | np.ndarray):
        shown += [str(value.dtype), str(tuple(value.shape)), *map(describe, value.tolist())]
    return re.search(rf"\b{name}\b", text) is not None and any(one in text for one in shown)


def pyg_cases():
    from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader, TableStore
    from gcnzc.interop.pyg.importing import import_pyg

    data = import_pyg().data.Data(x=TABLE.rows, edge_index=EDGE)
    common = {"is_sorted": FLAG, "transform": OPTIONAL, "tables": (None, {}), "seed": (None, -5)}
    common |= {"device": (), "batch_size": (), "drop_last": FLAG, "shuffle": (None, True)}
    common |= {"num_workers": (), "threads": OPTIONAL, "ahead": OPTIONAL, "generator": OPTIONAL}
    common |= {"data": (), "num_neighbors": ([],), "input_id": OPTIONAL}
    common |= {"filter_per_worker": (None, True)}
    return {
        "NeighborLoader": (
            lambda **arguments: list(itertools.islice(NeighborLoader(**arguments), 1)),
            {"data": data, "num_neighbors": [2]},
            {**common, "input_nodes": (None, [])},
        ),
        "NeighborLoader of ranks": (
            lambda **arguments: list(itertools.islice(NeighborLoader(data, [2], **arguments), 1)),
            {"rank": 0, "world_size": 1},
            {"rank": (), "world_size": ()},
        ),
        "LinkNeighborLoader": (
            lambda **arguments: list(itertools.islice(LinkNeighborLoader(**arguments), 1)),
            {"data": data, "num_neighbors": [2]},
            {
                **common,
                "edge_label_index": OPTIONAL,
                "edge_label": OPTIONAL,
                "neg_sampling": OPTIONAL,
                "neg_sampling_ratio": (None, 2.0, 2.5),
            },
        ),
        "TableStore": (TableStore, {}, {"tables": ({},)}),
    }


def dgl_cases():
    from gcnzc.interop.dgl import DataLoader, DglSampler, import_dgl

    dgl = import_dgl()
    graph, sampler = dgl.graph(tuple(EDGE)), dgl.dataloading.NeighborSampler([2])
    return {
        "DataLoader": (
            lambda **arguments: list(itertools.islice(DataLoader(**arguments), 1)),
            {"graph": graph, "indices": SEEDS, "graph_sampler": sampler},
            {
                "graph": (),
                "indices": ([],),
                "graph_sampler": (),
                "device": OPTIONAL,
                "ddp_seed": SEED,
                "batch_size": (),
                "drop_last": FLAG,
                "shuffle": FLAG,
                "sampler_library": (),
                "seed": (None, -5),
                "threads": OPTIONAL,
                "ahead": OPTIONAL,
                "tables": (None, {}),
                "num_workers": (),
                "generator": OPTIONAL,
            },
        ),
        "DglSampler": (
            lambda **arguments: DglSampler(**arguments).sample(SEEDS, 0),
            SAMPLER,
            {"graph": (), "fanouts": (), "seed": SEED},
        ),
    }


@pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="PyG is not installed"
)
def test_wrong_arguments_of_pyg_loaders_are_rejected_by_name_and_value():
    found = outcomes_of(pyg_cases())
    assert not found, "\n".join(found)


@pytest.mark.skipif(
    importlib.util.find_spec("dgl") is None, reason="DGL has no wheel for this Python"
)
def test_wrong_arguments_of_dgls_loader_are_rejected_by_name_and_value():
    found = outcomes_of(dgl_cases())
    assert not found, "\n".join(found)


def test_wrong_arguments_are_rejected_by_name_and_value():
    found = outcomes_of(CASES)
    assert not found, "\n".join(found)
