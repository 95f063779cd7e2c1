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
from gcnzc.train import node_outputs
from gcnzc.train.evaluation_cost import choose_evaluation, predict_cost
from gcnzc.train.evaluator import Evaluator
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
    node_outputs.SAMPLED_NODES = 16
    torch.set_num_threads(threads)
    graph = random_graph(200, 2000)
    table = FeatureTable(torch.randn(200, 5))
    of = Evaluated(SAGE(5, 8, 3), table, CPU, group=group or Group())
    nodes = torch.randperm(200)
    found = node_outputs.node_outputs(of, graph, nodes, "sampled", fanouts=[3, 3, 3], seed=1)
    return found.clone()


@pytest.fixture
def restored():
    usual, nodes = torch.get_num_threads(), node_outputs.SAMPLED_NODES
    yield
    torch.set_num_threads(usual)
    node_outputs.SAMPLED_NODES = nodes


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


def test_the_cheaper_evaluation_that_fits_is_chosen(monkeypatch):
    # a chain: two nodes depend on few
    chain = Graph.from_edges(torch.arange(999), torch.arange(1, 1000), 1000)
    model, few = SAGE(16, 8, 4), torch.tensor([500, 501])
    cost = predict_cost(model, chain, few, 16)
    assert cost.num_rows == 4 + 3 + 2
    everything = predict_cost(model, chain, None, 16)
    assert everything.num_rows == 3000
    assert cost.operations < everything.operations
    assert cost.num_bytes < everything.num_bytes
    choice = choose_evaluation(model, chain, few, 16, 1 << 40)
    assert choice.method == "needed"
    assert "9 layer outputs" in choice.reason
    assert "3,000" in choice.reason
    # nearly all nodes are needed, and the rest must be left out edge by edge
    most = torch.arange(990)
    assert choose_evaluation(model, chain, most, 16, 1 << 40).method == "exact"
    # all rows do not fit
    choice = choose_evaluation(model, chain, most, 16, 1000)
    assert choice.method == "needed"
    assert "of the memory" in choice.reason
    limit = 2 * min(predict_cost(model, chain, n, 16).num_bytes for n in (most, None))
    for memory, method in ((limit, "needed"), (limit - 2, "sampled")):
        choice = choose_evaluation(model, chain, most, 16, memory, can_sample=True)
        assert choice.method == method
    assert "gcnzc predict --scratch" in choice.reason
    said, of = [], Evaluated(model, FeatureTable(torch.randn(1000, 16)), CPU)
    evaluator = Evaluator("auto")
    evaluator.choose(of, chain, few, said.append)
    assert evaluator.method == "needed"
    assert said[0].startswith("evaluation: needed, predicted")
    evaluator.choose(of, chain, most, said.append)
    assert len(said) == 1
    monkeypatch.setattr(evaluator_module, "total_bytes", lambda: 1000)
    for fanouts, method in (((), "needed"), ((2, 2, 2), "sampled")):
        evaluator = Evaluator("auto", fanouts)
        evaluator.choose(of, chain, most, said.append)
        assert evaluator.method == method
    said.clear()
    for nodes, warned in ((few, False), (most, True)):
        Evaluator("needed").choose(of, chain, nodes, said.append)
        assert bool(said) == warned
    assert said[0].startswith("warning: the layer outputs of an evaluation take ")
    Evaluator("exact").choose(of, chain, few, said.append)
    assert len(said) == 2
    assert evaluator.outputs(of, chain, most).shape == (990, 4)


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
