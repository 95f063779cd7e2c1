"""Evaluation of all nodes, of needed nodes and of sampled neighbourhoods."""

import json

import pytest
import torch
from by_hand import MODELS, made, random_graph
from processes import results

from gcnzc.cli import main
from gcnzc.exchange import Group, init_group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models import SAGE
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train import evaluator as evaluator_module
from gcnzc.train.evaluator import Evaluator, peak_bytes
from gcnzc.train.inference import inference
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.run_folder import read_config

SIZES = ["--nodes", "600", "--edges", "3000", "--num-features", "8", "--classes", "3"]
OPTIONS = ["--fanouts", "4,4", "--hidden", "8", "--epochs", "1", "--device", "cpu"]
CPU = torch.device("cpu")
METHODS = ("needed", "exact", "sampled", "auto")


@pytest.mark.parametrize("name", MODELS)
def test_all_sampled_neighbours_are_exact(name):
    graph, model = random_graph(), made(name, 5, 8, 4)
    table = FeatureTable(torch.randn(60, 5).double())
    nodes = torch.tensor([3, 50, 3, 0])
    expected = inference(model, graph, table, nodes=nodes)
    for method, fanouts in (("sampled", [-1, -1, -1]), ("exact", []), ("needed", [])):
        evaluator = Evaluator(method, fanouts)
        found = evaluator.outputs(Evaluated(model, table, CPU), graph, nodes)
        torch.testing.assert_close(found, expected)


def sampled(group=None, threads=1):
    """Outputs of sampled neighbourhoods, of many minibatches."""
    torch.manual_seed(0)
    evaluator_module.SAMPLED_NODES = 16
    torch.set_num_threads(threads)
    graph = random_graph(200, 2000)
    table = FeatureTable(torch.randn(200, 5))
    of = Evaluated(SAGE(5, 8, 3), table, CPU, group=group or Group())
    return Evaluator("sampled", [3, 3, 3], 1).outputs(of, graph, torch.randperm(200)).clone()


@pytest.fixture
def restored():
    usual, nodes = torch.get_num_threads(), evaluator_module.SAMPLED_NODES
    yield
    torch.set_num_threads(usual)
    evaluator_module.SAMPLED_NODES = nodes


@pytest.mark.usefixtures("restored")
def test_sampled_outputs_are_those_of_the_sampler_for_any_number_of_threads():
    found = sampled()
    assert torch.equal(sampled(threads=2), found)
    torch.manual_seed(0)
    graph = random_graph(200, 2000)
    x, model, nodes = torch.randn(200, 5), SAGE(5, 8, 3).eval(), torch.randperm(200)
    batch = Sampler(graph, [3, 3, 3], seed=1).sample(nodes, epoch=0)
    torch.testing.assert_close(found, model(batch.blocks, x[batch.nodes]))


def sampled_of_worker():
    with init_group() as group:
        return sampled(group)


@pytest.mark.processes
@pytest.mark.usefixtures("restored")
def test_sampled_outputs_do_not_depend_on_the_number_of_workers(tmp_path):
    expected = sampled()
    for found in results(2, tmp_path, sampled_of_worker):
        assert torch.equal(found, expected)


def test_neighbours_are_sampled_if_layer_outputs_take_over_half_the_memory(monkeypatch):
    # a chain: two nodes depend on few
    chain = Graph.from_edges(torch.arange(999), torch.arange(1, 1000), 1000)
    model, few, most = SAGE(16, 8, 4), torch.tensor([500, 501]), torch.arange(990)
    # the projected inputs of the first layer, of 5 nodes, and its outputs, of 4
    assert peak_bytes(model, chain, 16, few) == 4 * 8 * (5 + 4)
    assert peak_bytes(model, chain, 16, None) == 4 * 8 * 2000
    said, of = [], Evaluated(model, FeatureTable(torch.randn(1000, 16)), CPU)

    def chosen(memory, nodes, method="auto", fanouts=(2, 2, 2)):
        monkeypatch.setattr(evaluator_module, "total_bytes", lambda: memory)
        evaluator = Evaluator(method, fanouts)
        evaluator.choose(of, chain, nodes, said.append)
        assert evaluator.outputs(of, chain, nodes).shape == (len(nodes), 4)
        return evaluator.method

    limit = 2 * peak_bytes(model, chain, 16, most)
    for memory, nodes, method in (
        (1 << 40, most, "needed"),
        (limit, most, "needed"),
        (limit - 2, most, "sampled"),
        (limit - 2, few, "needed"),
    ):
        assert chosen(memory, nodes) == method
        assert said[-1].startswith(f"evaluation: {method}, because without sampling")
    assert chosen(1000, most, fanouts=()) == chosen(1000, most, fanouts=(-1,) * 3) == "needed"
    said.clear()
    for method, nodes, warned in (("needed", few, 0), ("needed", most, 1), ("exact", few, 2)):
        assert chosen(1000, nodes, method) == method
        assert len(said) == warned
    assert said[0].startswith("warning: an evaluation takes ")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    assert main(["make", str(folder / "g"), *SIZES]) == 0
    assert main(["prepare", str(folder / "g"), str(folder / "links"), "--task", "link"]) == 0
    return folder


def line_of(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("task", ["node", "link"])
def test_every_method_is_recorded_and_scores_alike(task, graph, tmp_path, capsys):
    source = graph / ("g" if task == "node" else "links")
    lines = {}
    for method in METHODS:
        run = tmp_path / method
        words = ["--task", task, *OPTIONS, "--evaluate", method, "--out", run]
        if method == "sampled":
            words[words.index(method)] += ":fanouts=-1,-1"
        lines[method], err = line_of(capsys, "train", source, *words)
        record = json.loads((run / "record.jsonl").read_text().splitlines()[-1])
        chosen = lines[method]["evaluation"]
        assert record["evaluation"] == chosen
        assert (chosen == method) == (method != "auto")
        assert ("evaluation: " in err) == (method == "auto")
        assert read_config(run).training.evaluate.name == method
        key = f"test_{lines[method]['metric']}"
        assert lines[method][key] == pytest.approx(lines["needed"][key], abs=0.02)
    # the scores of `gcnzc evaluate`
    expected, _ = line_of(capsys, "evaluate", run)
    assert expected["evaluation"] == "exact"
    for method in METHODS:
        own = ":fanouts=-1,-1" if method in ("auto", "sampled") else ""
        found, err = line_of(capsys, "evaluate", run, "--evaluate", method + own)
        assert found.keys() == expected.keys()
        assert ("evaluation: " in err) == (method == "auto")
        assert found[key] == pytest.approx(expected[key], abs=0.02)
