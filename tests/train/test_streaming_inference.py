"""Inference with rows on disk equals inference in memory bit for bit, and resumes after a kill."""

import copy
import errno
import itertools
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from by_hand import MODELS, STACKS, made, random_graph
from killed import count_calls
from processes import FORKS, results

from gcnzc.exchange import init_group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models import GIN, SAGE
from gcnzc.system.files import locked_folder
from gcnzc.train import inference as inference_module
from gcnzc.train.inference import inference
from gcnzc.train.label_inputs import LabelInputs, append_labels
from gcnzc.train.layerwise import ranges


@pytest.fixture
def small(monkeypatch):
    """Ranges of few edges, so that there are many, and any memory."""
    monkeypatch.setattr(ranges, "BATCH_EDGES", 60)
    monkeypatch.setattr(inference_module, "MIN_MEMORY", 1)
    torch.manual_seed(0)
    return {"batch_nodes": 7, "memory": 1500}


def models(in_features):
    for name in MODELS:
        yield made(name, in_features, 8, 4).float()
    for options in STACKS:
        yield made("gcn", in_features, 8, 4, **options).float()
        yield made("gatv2", in_features, 8, 4, **options).float()
    yield SAGE(in_features, 8, 4, self_loops=True)
    yield GIN(in_features, 8, 4)


# the layer that is computed, and the memory: no row fits, a few fit, all fit
CASES = [(None, 1500), (2, 1 << 20), (1, 1)]


@pytest.mark.parametrize(("in_features", "some"), [(3, True), (30, False)])
def test_it_equals_inference_in_memory_bit_for_bit(in_features, some, small, tmp_path):
    graph = random_graph()
    nodes = torch.tensor([3, 50, 59, 3]) if some else None
    for number, model in enumerate(models(in_features)):
        x = torch.randn(60, in_features)
        table = FeatureTable(x.half() if number % 2 and in_features == 3 else x)
        layer, memory = CASES[(number + 2 * some + in_features // 30) % 3]
        expected = inference(model, graph, table, nodes=nodes, layer=layer, batch_nodes=7)
        words = {**small, "memory": memory, "layer": layer, "nodes": nodes}
        words["scratch"] = tmp_path / str(number)
        found = inference(model, graph, table, **words)
        assert torch.equal(found, expected), (type(model), layer, memory)
        # it is finished: nothing is computed, and a progress bar still ends
        steps = []
        again = inference(model, graph, table, progress=recorder(steps), **words)
        assert torch.equal(again, expected)
        assert steps[-1][0] == steps[-1][1]


def recorder(steps):
    return lambda *step: steps.append(step)


class Killed(BaseException):
    """The process ends here, and the machine loses what is not synchronized."""


class Computer:
    """Counts the accesses to the disk, and ends at one of them as if the power failed.

    Rows and marks that were written since they were last synchronized are lost.
    """

    def __init__(self, monkeypatch, end):
        self.count, self.end, self.lost = 0, end, {}
        self.pwrite, fdatasync = os.pwrite, os.fdatasync

        def pwrite(file, data, at):
            # a part, as a disk that becomes full
            written = self.pwrite(file, data[: max(1, len(data) // 2)], at)
            self.lost.setdefault(file, []).append((at, written))
            self.step()
            return written

        def sync(file):
            self.step()
            fdatasync(file)
            self.lost.pop(file, None)
            self.step()

        def stepping(function):
            def call(*arguments, **words):
                self.step()
                return function(*arguments, **words)

            return call

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fdatasync", sync)
        for owner, name in ((os, "ftruncate"), (Path, "unlink"), (Path, "replace")):
            monkeypatch.setattr(owner, name, stepping(getattr(owner, name)))

    def step(self):
        self.count += 1
        if self.count == self.end:
            for file, parts in self.lost.items():
                for at, size in parts:
                    self.pwrite(file, b"\xff" * size, at)
            raise Killed


@pytest.mark.parametrize("name", ["gat", pytest.param("deep", marks=pytest.mark.slow)])
def test_it_resumes_wherever_it_ended(name, small, tmp_path, monkeypatch):
    graph = random_graph(30, 150)
    options = {} if name == "gat" else STACKS[1]
    model = made("gat" if name == "gat" else "gcn", 30, 8, 4, **options).float()
    table = FeatureTable(torch.randn(30, 30))
    expected = inference(model, graph, table, batch_nodes=7)
    ends, seen = 0, set()
    for end in itertools.count(1, 27):
        folder = tmp_path / str(end)
        with monkeypatch.context() as patches:
            computer = Computer(patches, end)
            try:
                inference(model, graph, table, scratch=folder, **small)
            except Killed:
                ends += 1
            else:
                break
        assert computer.count == end
        # another kill while it resumes
        with monkeypatch.context() as patches:
            Computer(patches, 1 + end % 11)
            try:
                found = inference(model, graph, table, scratch=folder, **small)
            except Killed:
                found = None
        if found is None:
            steps = []
            words = {**small, "scratch": folder, "progress": recorder(steps)}
            found = inference(model, graph, table, **words)
            seen.add(len(steps))
        assert torch.equal(found, expected), end
        assert not [path for path in folder.glob("*.rows") if path.stem != "layer-3"]
    assert ends > 5
    assert len(seen) > 1


def test_rows_of_another_computation_are_refused(small, tmp_path):
    graph, model = random_graph(), made("gcn", 5, 8, 4)
    x = torch.randn(60, 5).double()

    def infer(model=model, graph=graph, x=x, **words):
        return inference(model, graph, FeatureTable(x), scratch=tmp_path, **{**small, **words})

    infer()
    other_x, other_model = x.clone(), copy.deepcopy(model)
    other_x[59, 4] += 1
    with torch.no_grad():
        other_model.layers[2].bias[0] += 1
    for words, differing in (
        ({"graph": random_graph()}, "graph"),
        ({"x": other_x}, "features"),
        ({"layer": 2}, "layer"),
        ({"nodes": [1]}, "nodes"),
        ({"batch_nodes": 6}, "ranges"),
        ({"model": other_model}, "model"),
    ):
        message = f"another computation: {differing} differ\n\nhint: give another folder"
        with pytest.raises(ValueError, match=message):
            infer(**words)
    (tmp_path / "scratch.json").write_bytes(b'{"format": 1, "mo')
    with pytest.raises(ValueError, match=r"json is damaged(.|\n)*hint: give another folder"):
        infer()


def test_wrong_folders_and_memory_are_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(inference_module, "MIN_MEMORY", 1 << 20)
    graph, model = random_graph(), made("gcn", 5, 8, 4)
    table = FeatureTable(torch.randn(60, 5).double())
    for words, message in (
        ({"scratch": tmp_path, "memory": 1000}, "memory"),
        ({"memory": 1 << 20}, "no folder for layer outputs"),
        ({"layer": 4}, "layer is 4, but must be at most 3"),
    ):
        with pytest.raises(ValueError, match=message):
            inference(model, graph, table, **words)
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ValueError, match="not a scratch folder: it has mine"):
        inference(model, graph, table, scratch=tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"
    # such as a file that a process of another machine is writing
    foreign = tmp_path / "below" / f".file.{2**22}.partial"
    foreign.parent.mkdir()
    foreign.touch()
    with pytest.raises(ValueError, match="not a scratch folder"):
        inference(model, graph, table, scratch=tmp_path)
    assert foreign.exists()
    folder = tmp_path / "used"
    folder.mkdir()
    with locked_folder(folder), pytest.raises(ValueError, match="uses the scratch folder"):
        inference(model, graph, table, scratch=folder)
    # rows that are cut short
    inference(model, graph, table, scratch=folder)
    os.truncate(folder / "layer-3.rows", 8)
    with pytest.raises(ValueError, match="has 8 bytes instead of"):
        inference(model, graph, table, scratch=folder)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_the_file_that_a_full_disk_cannot_hold_is_named(call, small, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    table = FeatureTable(torch.randn(60, 5).double())
    with pytest.raises(OSError, match=r"No space left on device: '.*\.unfinished'"):
        inference(made("gcn", 5, 8, 4), random_graph(), table, scratch=tmp_path, **small)


def problem(num_nodes=3000):
    torch.manual_seed(0)
    graph = random_graph(num_nodes, 10 * num_nodes)
    return made("gat", 24, 16, 5).float(), graph, FeatureTable(torch.randn(num_nodes, 24))


def infer_until(folder, last):
    model, graph, table = problem()
    calls = count_calls(
        lambda: inference(model, graph, table, scratch=folder, memory=1 << 20), last
    )
    folder.with_name("calls").write_text(str(calls))


@pytest.mark.processes
def test_it_survives_sigkill_at_random_moments(tmp_path):
    def infer(folder, last=None):
        process = FORKS.Process(target=infer_until, args=(tmp_path / folder, last))
        process.start()
        process.join()
        return process.exitcode

    assert infer("whole") == 0
    calls, draw = int((tmp_path / "calls").read_text()), random.Random(0)
    # a part of the rows is computed each time
    for _ in range(6):
        assert infer("scratch", draw.randrange(calls // 8)) == -signal.SIGKILL
    assert infer("scratch") == 0
    model, graph, table = problem()
    found = inference(model, graph, table, scratch=tmp_path / "scratch", memory=1 << 20)
    assert torch.equal(found, inference(model, graph, table))


def infer_of_worker(folder, per_machine):
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_machine)
    model, graph, table = problem(500)
    torch.set_num_threads(1)
    with init_group() as group:
        words = {"group": group, "scratch": folder, "memory": 1 << 20, "batch_nodes": 16}
        found = inference(model, graph, table, **words).clone()
        # one of several machines loses its rows
        if group.rank == 1 and per_machine == 1:
            (folder / "machine-1" / "layer-3.rows").unlink()
        assert torch.equal(inference(model, graph, table, **words), found)
        return found


@pytest.mark.processes
@pytest.mark.parametrize("per_machine", [1, 2])
def test_two_workers_compute_the_rows_of_one(per_machine, tmp_path):
    model, graph, table = problem(500)
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = inference(model, graph, table, batch_nodes=16)
    torch.set_num_threads(usual)
    for found in results(2, tmp_path, infer_of_worker, tmp_path / "scratch", per_machine):
        assert torch.equal(found, expected)


def peak_of(path, folder):
    """Write the growth of the resident memory of one inference to a file."""
    torch.set_num_threads(1)
    num_nodes = 120_000
    src = torch.randint(num_nodes, (4 * num_nodes,))
    graph = Graph.from_edges(src, torch.randint(num_nodes, (4 * num_nodes,)), num_nodes)
    table = FeatureTable(torch.randn(num_nodes, 8))
    model = SAGE(8, 128, 4, num_layers=3)
    # imports, and caches of kernels
    inference(model, graph, table, nodes=[0])
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    inference(model, graph, table, scratch=folder, memory=4 << 20)
    path.write_text(str(resident("VmHWM") - before))


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.processes
def test_memory_is_bounded(tmp_path):
    """A hidden layer has 61 MB; in memory, two would be 123 MB."""
    process = FORKS.Process(target=peak_of, args=(tmp_path / "peak", tmp_path / "scratch"))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert int((tmp_path / "peak").read_text()) < 32 << 20


def test_label_inputs_are_read_and_identified(small, tmp_path):
    graph, x = random_graph(), torch.randn(60, 5)
    labels = torch.arange(60) % 3
    split = {"train": torch.arange(30), "valid": torch.arange(30, 45), "test": torch.arange(45, 60)}
    tables = []
    for offset in (0, 1):
        data = SimpleNamespace(graph=graph, labels=(labels + offset) % 3, split=split)
        tables.append(append_labels(FeatureTable(x), LabelInputs(data, 3, False)))
    model = SAGE(8, 8, 3)
    found = inference(model, graph, tables[0], scratch=tmp_path, **small)
    assert torch.equal(found, inference(model, graph, tables[0], batch_nodes=7))
    with pytest.raises(ValueError, match="features differ"):
        inference(model, graph, tables[1], scratch=tmp_path, **small)
    data.labels = torch.arange(60) % 4
    with pytest.raises(
        ValueError, match=r"of 3 classes as features, but .* have labels of class 3"
    ):
        LabelInputs(data, 3, False)
