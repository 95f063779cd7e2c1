"""Heterogeneous graphs in OGB's layout; `datasets/test_ogb_saver.py` has the `ogb` package."""

import gzip
import shutil

import numpy as np
import pytest
import torch
from hetero_graphs import assert_same_graph

import gcnzc
from gcnzc.datasets import ogb_write
from gcnzc.datasets.ogb_hetero import OgbHetero
from gcnzc.graph import Graph, load
from gcnzc.graph.ogb import to_ogb

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
SIZES = {"author": 7, "paper": 30}
PARTS = ("train", "valid", "test")


def drawn(seed=0, num_edges=50):
    """A graph with everything that the layout can hold, its arrays by id, and its split."""
    random = np.random.default_rng(seed)
    sources = {
        each: np.stack([random.integers(SIZES[end], size=num_edges) for end in (each[0], each[2])])
        for each in (WRITES, CITES)
    }
    order = random.permutation(SIZES["paper"])
    return {
        "edges": sources,
        "features": random.standard_normal((SIZES["paper"], 5)).astype(np.float32),
        "edge_features": random.standard_normal((num_edges, 2)).astype(np.float32),
        "labels": random.integers(4, size=SIZES["paper"]),
        "year": random.integers(2010, 2020, size=SIZES["paper"]),
        "time": random.integers(2**60, 2**61, size=num_edges),
        "weight": random.random(num_edges).astype(np.float32),
        "split": dict(zip(PARTS, np.split(order[:24], [12, 18]), strict=True)),
    }


def build(given):
    paper = {
        "features": given["features"],
        "labels": given["labels"],
        "split": given["split"],
        "time": given["year"],
    }
    return Graph.from_arrays(
        {"author": 7, "paper": paper},
        {
            WRITES: {"edge_index": given["edges"][WRITES], "weight": given["weight"]},
            CITES: {
                "edge_index": given["edges"][CITES],
                "time": given["time"],
                "features": given["edge_features"],
            },
        },
        name="mine",
    )


BOTH_FORMS = pytest.mark.parametrize("binary", [False, True], ids=["csv", "binary"])


@BOTH_FORMS
def test_a_graph_is_read_back(tmp_path, binary):
    graph = build(drawn())
    to_ogb(graph, tmp_path / "a", binary=binary, split_name="time", num_classes=9)
    assert_same_graph(gcnzc.load(tmp_path / "a").graph, graph)
    opened = OgbHetero(tmp_path / "a")
    assert (opened.name, opened.num_classes, opened.split_name) == ("mine", 9, "time")
    assert OgbHetero(tmp_path / "a", "ogbn-mag").name == "ogbn-mag"
    assert ogb_write.meta_dict(tmp_path / "a")["is hetero"] == "True"
    # the split in one file
    split = {part: {"paper": ids} for part, ids in drawn()["split"].items()}
    torch.save(split, tmp_path / "a/split/time/split_dict.pt")
    shutil.rmtree(tmp_path / "a/split/time/paper")
    assert_same_graph(gcnzc.load(tmp_path / "a").graph, graph)
    with pytest.raises(FileExistsError, match="already exists"):
        to_ogb(graph, tmp_path / "a")


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ({"a/b": {"labels": [0]}}, {}, "the type 'a/b' cannot be part of the name of a file"),
        ({"a": 3}, {}, "no node type has labels"),
        ({"a": {"labels": [0, 1]}}, {}, "the splits have the node types"),
        (
            {"a": {"labels": [0, 1, 2], "split": {"train": [0], "val": [1], "test": [2]}}},
            {("a", "r", "a"): np.empty((2, 0), int)},
            "has no edges, which OGB cannot read from a csv.gz",
        ),
    ],
)
def test_graphs_that_the_layout_cannot_hold_are_rejected(tmp_path, nodes, edges, words):
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: "):
        to_ogb(Graph.from_arrays(nodes, edges), tmp_path / "a", binary=False)
    assert not list(tmp_path.iterdir())


def test_reverse_edge_types(tmp_path):
    to_ogb(build(drawn()), tmp_path / "a")
    graph = gcnzc.load(tmp_path / "a", bidirected=True).graph
    assert set(graph.edge_types) == {
        *(WRITES, CITES),
        *(("paper", "rev_writes", "author"), ("paper", "rev_cites", "paper")),
    }
    for name in ("writes", "cites"):
        forward, back = graph.edges(name), graph.edges(f"rev_{name}")
        assert torch.equal(forward.edge_index().flip(0), back.edge_index())
        ids = torch.arange(50) if back.edge_ids is None else back.edge_ids
        values = "weight" if name == "writes" else "time"
        by_id = torch.empty_like(getattr(back, values))
        by_id[ids] = getattr(back, values)
        assert (by_id.numpy() == drawn()[values]).all()


# prepared folders


def test_prepare_and_info(tmp_path):
    from gcnzc.graph.prepare import prepare

    graph = build(drawn())
    to_ogb(graph, tmp_path / "raw", split_name="time")
    about = load.info(tmp_path / "raw")
    assert about["kind"] == "ogb-hetero"
    assert (about["num_nodes"], about["num_edges"]) == (37, 100)
    assert about["nodes"] == [
        {"type": "author", "num_nodes": 7},
        {"type": "paper", "num_nodes": 30},
    ]
    load.verify(tmp_path / "raw")
    prepare(tmp_path / "raw", tmp_path / "a", feature_dtype="float16")
    found = gcnzc.load(tmp_path / "a").graph
    half = graph.nodes("paper").features.half()
    assert torch.equal(found.nodes("paper").features, half)
    about = load.info(tmp_path / "a")
    assert about["kind"] == "hetero"
    assert about["origin"]["format"] == "ogb"
    load.verify(tmp_path / "a")
    # a prepared folder is prepared again
    prepare(tmp_path / "a", tmp_path / "b", feature_dtype="float32")
    again = gcnzc.load(tmp_path / "b").graph
    assert torch.equal(again.nodes("paper").features, half.float())
    assert load.info(tmp_path / "b")["origin"]["source"] == str(tmp_path / "raw")
    prepare(tmp_path / "raw", tmp_path / "c", bidirected=True)
    assert len(gcnzc.load(tmp_path / "c").graph.edge_types) == 4


# damaged and missing files


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    here = tmp_path_factory.mktemp("written")
    for name, binary in (("csv", False), ("binary", True)):
        to_ogb(build(drawn()), here / name, binary=binary)
    return here


NEEDED = [
    *("raw/num-node-dict", "raw/triplet-type-list", "raw/nodetype-has-label"),
    *("raw/relations/paper___cites___paper/edge", "raw/node-label/paper/node-label"),
    *("raw/relations/paper___cites___paper/num-edge-list", "split/random/paper/valid"),
    "split/random/nodetype-has-split",
]
OPTIONAL = [
    *("raw/node-feat/paper/node-feat", "raw/node-feat/paper/node_time"),
    *("raw/relations/paper___cites___paper/edge_time",),
    *("raw/relations/author___writes___paper/edge_weight",),
]


@pytest.mark.parametrize("file", [*NEEDED, *OPTIONAL])
def test_damaged_and_missing_csv_files_are_named(written, tmp_path, file):
    path = tmp_path / "a"
    shutil.copytree(written / "csv", path)
    own = path / f"{file}.csv.gz"
    whole = own.read_bytes()
    for broken in (whole[: len(whole) // 2], b"words"):
        own.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"{file}\.csv\.gz.*\n\nhint: "):
            gcnzc.load(path)
    own.unlink()
    if file in NEEDED:
        with pytest.raises(FileNotFoundError, match=rf"no file .*{file}\.csv\.gz\n\nhint: "):
            gcnzc.load(path)
    else:
        gcnzc.load(path)


EDGES = "raw/relations/paper___cites___paper/edge"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("raw/num-node-dict", "author,paper\n7,30\n8,31\n", r"has the numbers \[7, 8\]"),
        ("raw/num-node-dict", "author,paper\n7,29\n", r"has the node 29|29 nodes"),
        ("raw/triplet-type-list", "paper,cites\n", "has 2 columns, not 3"),
        ("raw/triplet-type-list", "a,b,c\nd\n", "its lines have different numbers of columns"),
        ("raw/triplet-type-list", "paper,cites,book\n", "no file|'book'"),
        (EDGES, "0,1\n", "has 1 edges, but the stored number of edges is 50"),
        (EDGES, "0,30\n" * 50, "cites.* edge 0 has the node 30, but nodes are 0 to 29"),
        ("raw/nodetype-has-label", "author,paper\nFalse,7\n", "has 2 lines"),
        ("raw/node-label/paper/node-label", "1\n" * 29, r"shape \(29, 1\) for 30 nodes"),
        ("raw/node-feat/paper/node-feat", "1,2\n" * 29, "29 rows of features for 30"),
        ("raw/node-feat/paper/node-feat", "1,nan\n" * 30, "nan in row 0, column 1"),
        ("split/random/paper/valid", "30\n", "contains node 30, but nodes are 0 to 29"),
    ],
)
def test_wrong_contents_are_rejected_with_a_message_that_names_them(
    written, tmp_path, file, text, words
):
    path = tmp_path / "a"
    shutil.copytree(written / "csv", path)
    (path / f"{file}.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises((ValueError, FileNotFoundError), match=f"({words})(.|\n)*\n\nhint: "):
        gcnzc.load(path)


@pytest.mark.parametrize(
    ("file", "arrays", "words"),
    [
        ("edge_index_dict", {"paper___cites___paper": np.zeros((3, 50), int)}, r"shape \(3, 50\)"),
        ("edge_index_dict", {"paper___cites___paper": np.zeros((2, 50))}, "float64"),
        ("num_nodes_dict", {"paper": np.array([30])}, "'author', which has no number"),
        ("node_feat_dict", {"book": np.zeros((3, 2))}, "has the node type 'book'"),
        ("node_time_dict", {"paper": np.full((30, 1), np.nan)}, "has the time nan"),
        ("edge_time_dict", {"paper___reads___paper": np.zeros((3, 1))}, "has the edge type"),
    ],
)
def test_wrong_arrays_are_rejected_with_a_message_that_names_them(
    written, tmp_path, file, arrays, words
):
    path = tmp_path / "a"
    shutil.copytree(written / "binary", path)
    if file == "edge_index_dict":
        with np.load(path / "raw/edge_index_dict.npz") as whole:
            arrays = dict(whole) | arrays
    np.savez(path / f"raw/{file}.npz", **arrays)
    with pytest.raises(ValueError, match=f"{words}(.|\n)*\n\nhint: "):
        gcnzc.load(path)
