"""`make --kind typed`, and `prepare` and `info` of heterogeneous graphs."""

import json

from gcnzc.cli import main
from gcnzc.graph.hetero import HeteroGraph

MAKE = ["--kind", "typed", "--nodes", "1000", "--edges", "9000", "--classes", "4"]


def printed(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_make_prepare_and_info(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["make", "raw", *MAKE, "--num-features", "3", "--seed", "5"]) == 0
    made = printed(capsys)
    assert made["kind"] == "ogb-hetero"
    assert {own["type"]: own["num_nodes"] for own in made["nodes"]} == {
        **{"brand": 50, "item": 300, "query": 150, "user": 500}
    }
    assert sum(own["num_edges"] for own in made["edges"]) == made["num_edges"] == 9000
    assert 0.25 < made["best_accuracy"] < 1
    assert main(["prepare", "raw", "ready", "--feature-dtype", "float16"]) == 0
    ready = printed(capsys)
    assert ready["kind"] == "hetero"
    assert ready["origin"]["best_accuracy"] == made["best_accuracy"]
    assert {own["features"]["dtype"] for own in ready["nodes"]} == {"float16"}
    assert main(["info", "ready", "--verify"]) == 0
    assert printed(capsys) == ready
    assert main(["info", "raw", "--verify"]) == 0
    assert printed(capsys) == made
    graph = HeteroGraph.load("ready")
    assert len(graph.edge_types) == 6
    assert main(["prepare", "raw", "both", "--bidirected", "yes"]) == 0
    assert len(printed(capsys)["edges"]) == 12
