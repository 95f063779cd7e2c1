"""The GPU benchmarks reject wrong rows, and record failures and each finished round."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import run_python

from bench import harness
from bench.gpu import claims, epochs, suite
from bench.gpu.base import Bench
from gcnzc.tune import pcie_bench

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_reports_that_there_is_no_gpu():
    run = run_python("-m", "bench.gpu.suite", "link")
    assert run.returncode == 1
    assert "error: torch finds no CUDA device\n\nhint: " in run.stderr


def test_wrong_rows_are_rejected():
    rows, ids = torch.randn(20, 5), torch.randint(20, (9,))
    suite.check_equal(rows[ids], rows, ids, "a copy")
    wrong = rows[ids].clone()
    wrong[8, 4] += 1
    with pytest.raises(RuntimeError, match="a wrong copy returned wrong rows"):
        suite.check_equal(wrong, rows, ids, "a wrong copy")


@pytest.fixture
def bench(monkeypatch):
    """A benchmark on the host, whose lines are collected."""
    lines = []
    monkeypatch.setattr(
        harness,
        "record",
        lambda name, case, **derived: lines.append({"name": name} | case | derived),
    )
    host = pcie_bench.Gpu(torch.device("cpu"), lambda work: 1.0, lambda busy: {})
    found = Bench(host, "small", recorded=True)
    found.lines = lines
    return found


def test_a_gather_that_fails_is_recorded_and_others_are_measured(bench):
    def fail():
        raise RuntimeError("no support")

    memory = torch.zeros(1 << 16, dtype=torch.int8)
    works = suite.zero_copy(suite.rows_of(memory, 400, 400, torch.int32), 4, bench.device)
    gathers = {"fails": replace(works, run=fail), "works": works}
    suite.measure(bench, "gather", {"row_bytes": 400}, memory, gathers)
    lines = {line["method"]: line for line in bench.lines}
    assert lines["fails"]["outcome"] == "RuntimeError: no support"
    assert lines["works"]["row_bytes"] == 400
    assert lines["works"]["share_of_copy_engine"] > 0


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, bench):
    def no_link(bench):
        raise OSError("no mapping")

    parts = {"link": no_link, "tlb": lambda bench: bench.record("tlb", {"method": "a"})}
    monkeypatch.setattr(suite, "PARTS", parts)
    monkeypatch.setattr(pcie_bench, "current_gpu", lambda: bench.where)
    monkeypatch.setattr(sys, "argv", ["suite", "link", "tlb"])
    with pytest.raises(SystemExit, match="these methods failed: link"):
        suite.main()
    assert bench.lines == [
        {"name": "gpu_link", "outcome": "OSError: no mapping"},
        {"name": "gpu_tlb", "method": "a"},
    ]


class Steps:
    """A method of which each call takes another time, or fails."""

    def __init__(self, *outcomes):
        self.outcomes = iter([1.0, *outcomes])  # the first is the warm-up

    def seconds(self, number):
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_epochs_are_recorded_after_each_round_also_if_a_method_fails(monkeypatch, bench):
    def no_kernel():
        raise RuntimeError("no kernel\nat all")

    methods = {
        "zero-copy": lambda: Steps(2.0, 4.0, 2.0),
        "CPU index, pageable copy": lambda: Steps(6.0, RuntimeError("lost"), 8.0),
        "sampling": no_kernel,
    }
    monkeypatch.setattr(epochs, "methods_of", lambda *_, **__: methods)
    monkeypatch.setattr(epochs, "table_of", lambda *_: None)
    overlap = lambda bench, *_: bench.record("overlap", {})  # noqa: E731
    monkeypatch.setattr(epochs, "record_overlap", overlap)
    shape = replace(epochs.SMALL, rounds=3, num_seeds=21)
    work = SimpleNamespace(shape=shape, case=lambda: {"shape": "small"})
    epochs.measure_model(bench, work, None, further=False)
    assert bench.lines[0]["method"] == "sampling"
    assert bench.lines[0]["outcome"] == "RuntimeError: no kernel at all"
    found = [
        (line.get("method"), line.get("rounds"), line.get("batch_s")) for line in bench.lines[1:]
    ]
    assert found == [
        *(("zero-copy", 1, 2.0), ("CPU index, pageable copy", 1, 6.0), (None, None, None)),
        ("CPU index, pageable copy", None, None),
        *(("zero-copy", 2, 3.0), ("CPU index, pageable copy", 1, 6.0)),
        *(("zero-copy", 3, 2.0), ("CPU index, pageable copy", 2, 7.0)),
    ]
    assert bench.lines[-2]["epoch_s"] == 4.0
    assert bench.lines[-2]["faster_than_cpu_index"] == 3.5
    assert bench.lines[-2]["share_of_all_on_gpu"] is None


def test_claims_that_were_not_measured_are_in_the_table(tmp_path):
    lines = claims.tabulate(tmp_path)
    assert {line["verdict"] for line in lines} == {"not measured"}
    # two shapes, gathers of two widths, three dtypes of five widths at two starts, and pages
    assert len(lines) == 2 * 5 + 2 * 3 + 3 * 5 * 2 + 1
    assert len(claims.format_claims(lines)) == len(lines) + 1
