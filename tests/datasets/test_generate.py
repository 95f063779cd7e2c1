import numpy as np
import pytest
from tiny_graph import rows_of

from gcnzc.datasets.generate import SHAPES, Shape, generate, like, make
from gcnzc.datasets.ogb import OgbGraph
from gcnzc.datasets.rows import allocate_in_memory, no_progress

SMALL = Shape(2000, 9000, 12, 5)


def contents(graph):
    edges = graph.edges(allocate_in_memory, no_progress)
    return [*edges, rows_of(graph.features), *graph.split().values()]


@pytest.mark.parametrize("kind", ["planted", "rmat", "digits"])
@pytest.mark.parametrize("binary", [True, False], ids=["npz", "csv.gz"])
def test_generated_datasets_are_read_back(tmp_path, kind, binary):
    told, options = [], {"progress": lambda *words: told.append(words), "binary": binary}
    made = make(tmp_path / "graph", kind, SMALL, **options)
    read = OgbGraph(tmp_path / "graph")
    for found, expected in zip(contents(read), contents(made), strict=True):
        np.testing.assert_array_equal(found.astype(expected.dtype), expected)
    np.testing.assert_array_equal(read.labels().reshape(-1), made.labels())
    assert read.name == "graph"
    assert read.num_classes == made.num_classes
    assert read.best_accuracy == made.best_accuracy
    assert read.edge_defaults().bidirected
    assert read.split_name == "random"
    assert read.origin["generator"] == kind
    assert {what for what, _, _ in told} == {"edges", "features"}
    assert ("features", made.num_nodes, made.num_nodes) in told


def test_the_dataset_depends_on_the_seed(tmp_path):
    one, same, other = (generate("planted", SMALL, seed=seed) for seed in (0, 0, 1))
    for a, b in zip(contents(one), contents(same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (contents(one)[0] != contents(other)[0]).any()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ogbn-arxiv", (169_343, 1_166_243, 128, 40)),
        ("ogbn-products", (2_449_029, 61_859_140, 100, 47)),
        ("ogbn-papers100M", (111_059_956, 1_615_685_872, 128, 172)),
        ("reddit", (232_965, 57_307_946, 602, 41)),
    ],
)
def test_sizes_of_public_graphs_are_available(name, expected):
    shape = like(name)
    found = shape.num_nodes, shape.num_edges, shape.num_features, shape.num_classes
    assert found == expected
    tenth = like(name, 0.1)
    assert abs(tenth.num_nodes / shape.num_nodes - 0.1) < 1e-4
    assert abs(tenth.num_edges / shape.num_edges - 0.1) < 1e-4
    assert (tenth.num_features, tenth.num_classes) == expected[2:]
    assert tenth.shares == shape.shares
    assert name in SHAPES


def test_the_smallest_scale_gives_a_valid_graph():
    graph = generate("planted", like("ogbn-arxiv", 1e-9))
    assert graph.num_nodes == 40
    assert graph.num_edges == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: like("ogbn-arxive"), "no shape ogbn-arxive"),
        (lambda: like("reddit", 0), "scale is 0"),
        (lambda: generate("plant"), "no kind plant"),
        (lambda: generate("rmat", Shape(num_edges=0)), r"are \(100000, 0, 100, 10\)"),
        (lambda: generate("rmat", seed=-1), "the seed is -1"),
    ],
)
def test_invalid_requests_are_rejected(call, message):
    with pytest.raises(ValueError, match=f"{message}(.|\n)*\n\nhint: "):
        call()
