"""Link property datasets in OGB's layout are read as written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.ogb_folders import write_links
from gcnzc import load, prepare
from gcnzc.datasets.ogb import OgbGraph
from gcnzc.datasets.ogb_layout import is_link_layout
from gcnzc.datasets.ogb_link import KNOWN, OgbLinkGraph
from gcnzc.datasets.source import EdgeSplitArrays
from gcnzc.graph.load import info

PARTS = ("train", "valid", "test")


def parts(ranked: bool = False, metric: str = "hits@50") -> EdgeSplitArrays:
    random = np.random.default_rng(0)
    sizes = {"train": 60, "valid": 7, "test": 9}
    edges = {part: random.integers(0, 40, (2, size)) for part, size in sizes.items()}
    shapes = {part: (sizes[part], 11) if ranked else (2, 30) for part in PARTS[1:]}
    negatives = {part: random.integers(0, 40, shape) for part, shape in shapes.items()}
    return EdgeSplitArrays(edges, negatives, "mrr" if ranked else metric, "time")


def written(path: Path, links: EdgeSplitArrays, **how) -> Path:
    features = np.random.default_rng(1).random((40, 3)).astype(np.float32)
    write_links(path, links.edges["train"], 40, links, **{"features": features, **how})
    return path


@pytest.mark.parametrize("ranked", [False, True])
def test_written_datasets_are_read_back(tmp_path, ranked):
    links = parts(ranked)
    path = written(tmp_path / "a", links, add_inverse_edge=True)
    assert is_link_layout(path)
    with pytest.raises(ValueError, match="is a link property dataset"):
        OgbGraph(path)
    prepare(path, tmp_path / "prepared")
    for data in (load(path), load(tmp_path / "prepared")):
        for part in PARTS:
            assert np.array_equal(data.links.edges[part], links.edges[part])
        for part in PARTS[1:]:
            assert np.array_equal(data.links.negatives[part], links.negatives[part])
        assert data.links.metric == links.metric
        assert data.graph.num_edges == 120
        assert data.features.shape == (40, 3)
        assert (data.labels == -1).all()
        assert {part: len(ids) for part, ids in data.split.items()} == dict.fromkeys(PARTS, 0)
    assert info(path)["links"] is True
    told = info(tmp_path / "prepared")["links"]
    there = {frozenset(pair) for pair in links.edges["train"].T.tolist()}
    in_graph = sum(frozenset(pair) in there for pair in links.edges["test"].T.tolist())
    assert told["test_in_graph"] == in_graph
    assert (told["name"], told["metric"], told["valid"]) == ("time", links.metric, 7)


@pytest.mark.parametrize("name", KNOWN)
def test_known_datasets_need_no_metadata_file(tmp_path, name):
    links = replace(parts(name == "ogbl-citation2"), name=KNOWN[name].split)
    path = written(tmp_path / name.replace("-", "_"), links)
    (path / "task.json").unlink()
    # other splits do not confuse
    (path / "split/other").mkdir()
    for source in (OgbLinkGraph(path), OgbLinkGraph(path, name)):
        assert source.name == name
        assert source.links().metric == KNOWN[name].metric
        defaults = source.edge_defaults()
        assert defaults.bidirected
        assert defaults.duplicates == ("remove" if KNOWN[name].symmetric else "keep")


def test_meta_dict_has_the_metric_and_the_stored_direction(tmp_path):
    path = written(tmp_path / "a", parts())
    (path / "task.json").unlink()
    fields = {"eval metric": "hits@50", "dir_path": "submission_ogbl_a/a", "split": "time"}
    for inverse, num_edges in (("True", 120), ("False", 60)):
        torch.save(fields | {"add_inverse_edge": inverse}, tmp_path / "meta_dict.pt")
        data = load(path)
        assert (data.links.metric, data.graph.num_edges) == ("hits@50", num_edges)
    # beside the folder, but of another dataset
    torch.save(fields | {"dir_path": "submission_ogbl_b/b"}, tmp_path / "meta_dict.pt")
    assert load(path).links.metric == "auc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told.pop("edge_neg"), "has no edge_neg"),
        (lambda told: told.pop("edge"), "has no edges"),
        (lambda told: (told.pop("edge"), told.update(head=1)), "but triples"),
        (lambda told: told.update(edge=told["edge"][:, :1]), "shape"),
        (lambda told: told.update(edge=told["edge"] + 0.5), "float64"),
        (lambda told: told.update(edge=torch.empty(0, 2).long()), "no test edges"),
        (lambda told: told.update(edge=told["edge"] + 40), "nodes are 0 to 39"),
        (lambda told: told.update(edge_neg=told["edge_neg"] - 40), "nodes are 0 to 39"),
    ],
)
def test_invalid_splits_are_rejected(tmp_path, change, message):
    path = written(tmp_path / "a", parts())
    file = path / "split/time/test.pt"
    told = torch.load(file, weights_only=False)
    change(told)
    torch.save(told, file)
    with pytest.raises(ValueError, match=rf"{message}(.|\n)*\n\nhint: "):
        load(path)


def test_the_metric_must_match_the_negatives(tmp_path):
    path = written(tmp_path / "a", parts())
    text = (path / "task.json").read_text()
    (path / "task.json").write_text(text.replace("hits@50", "mrr"))
    with pytest.raises(ValueError, match="the metric is mrr, but the negatives are not"):
        load(path)
    (path / "task.json").write_text("{")
    with pytest.raises(ValueError, match=r"task\.json is not valid JSON"):
        load(path)


@pytest.mark.parametrize(
    ("file", "kind", "found"),
    [
        ("raw/edge_reltype.csv.gz", "a knowledge graph", "raw/edge_reltype.csv.gz"),
        ("raw/triplet-type-list.csv.gz", "a heterogeneous link", "no node labels"),
        ("raw/num-node-dict.csv.gz", "a heterogeneous link", "no node labels"),
    ],
)
def test_graphs_of_several_types_are_rejected(tmp_path, file, kind, found):
    path = written(tmp_path / "a", parts())
    (path / file).write_text("")
    with pytest.raises(ValueError, match=rf"is {kind}.*: it has {found}\n\nhint: "):
        load(path)
