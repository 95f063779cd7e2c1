"""`gcnzc export` writes a program, which the example serves with torch alone."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from command_runs import ran, started
from limits import HANG_S

import gcnzc
from gcnzc.cli import main
from gcnzc.train import predict

SCRIPT = Path(__file__).parents[2] / "examples" / "serve_exported.py"
OPTIONS = ["--fanouts", "4,4", "--hidden", "8", "--epochs", "1", "--device", "cpu"]


RANDOM = np.random.default_rng(0)
ARRAYS = {
    "edges": RANDOM.integers(200, size=(2, 1500)),
    "labels": RANDOM.integers(3, size=200),
    "splits": {part: np.arange(i, 200, 3) for i, part in enumerate(("train", "valid", "test"))},
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    features = RANDOM.standard_normal((200, 5), dtype=np.float32)
    gcnzc.prepare(folder / "g", features=features, **ARRAYS)
    return folder


def trained(graph, *words):
    run = graph / "run-{}".format("-".join(map(str, words)))
    assert main(["train", str(graph / "g"), *OPTIONS, *words, "--out", str(run)]) == 0
    return run


def serve(graph, *words, data="g"):
    # the script must not find gcnzc
    program = (sys.executable, "-I", str(SCRIPT))
    return started(graph / "m.pt2", graph / data, *words, program=program)


@pytest.mark.parametrize("model", ["gcn", pytest.param("gat", marks=pytest.mark.slow)])
def test_a_run_is_exported_and_described(model, graph, tmp_path, capsys):
    run = trained(graph, "--model", model)
    out = tmp_path / "m.pt2"
    line, _ = ran(capsys, "export", run, "--out", out)
    extra = {"gcnzc.json": ""}
    torch.export.load(out, extra_files=extra)
    about = json.loads(extra["gcnzc.json"])
    assert about.items() <= line.items()
    assert (about["in_features"], about["outputs"], about["fanouts"]) == (5, 3, [4, 4])
    assert about["needs_degrees"] == (model == "gcn")
    assert about["largest_difference"] < 1e-4
    # a graph for which the model was not trained leaves the file
    before = out.read_bytes()
    ran(capsys, "export", run, tmp_path, "--out", out, status=1)
    assert out.read_bytes() == before


@pytest.mark.processes
def test_the_example_serves_what_gcnzc_predicts(graph):
    run = trained(graph, "--model", "sage")
    assert main(["export", str(run), "--out", str(graph / "m.pt2")]) == 0
    expected = predict(run, nodes=[3, 150, 3])
    with serve(graph, "--nodes", "3,150,3", "--exact") as process:
        found = json.loads(process.communicate()[0])
    assert process.returncode == 0
    assert [line["node"] for line in found] == [3, 150, 3]
    assert [line["class"] for line in found] == expected.classes.tolist()
    best = expected.probabilities.max(1)
    assert [line["probability"] for line in found] == pytest.approx(best.tolist(), abs=1e-5)
    with serve(graph, "--port", "0") as process:
        try:
            address = process.stdout.readline().split("?")[0]
            with urllib.request.urlopen(f"{address}?nodes=7") as answer:
                assert json.load(answer)[0]["node"] == 7
            for wrong in ("200", "-1", "x", ""):
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    urllib.request.urlopen(f"{address}?nodes={wrong}")
        finally:
            process.kill()


@pytest.mark.processes
def test_the_example_reads_quantized_features_and_labels_of_training_nodes(graph):
    # one and a quarter of the blocks of columns that have one scale
    features = RANDOM.standard_normal((200, 20), dtype=np.float32)
    run, layouts = graph / "run-wide", (("bfloat16", "row"), ("int8", "row"), ("int8", "columns"))
    for number, (dtype, scales) in enumerate(layouts):
        folder = graph / f"{dtype}-{scales}"
        gcnzc.prepare(folder, features=features, feature_dtype=dtype, scales=scales, **ARRAYS)
        if number == 0:
            words = [*OPTIONS, "--task", "node:label_inputs=0.5", "--out", str(run)]
            assert main(["train", str(folder), *words]) == 0
            assert main(["export", str(run), "--out", str(graph / "m.pt2")]) == 0
        with serve(graph, "--nodes", "0,1,2,3", "--exact", data=folder.name) as process:
            found = json.loads(process.communicate()[0])
        best = predict(run, folder, nodes=[0, 1, 2, 3]).probabilities.max(1)
        assert [line["probability"] for line in found] == pytest.approx(best.tolist(), abs=1e-5)


@pytest.mark.processes
def test_the_example_explains_errors(graph, tmp_path):
    (tmp_path / "m.pt2").write_bytes(b"no archive")
    (tmp_path / "g").symlink_to(graph / "g")
    for words, data, message in (
        ([], "none", "there is no prepared folder with a"),
        (["--nodes", "1"], "g", "m.pt2"),
    ):
        with serve(tmp_path, *words, data=data) as process:
            _, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 2
        assert message in err.splitlines()[-1]
        assert "Traceback" not in err
