"""The GPU benchmarks reject wrong rows, and record what a GPU does not support."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import bulk, suite
from gcnzc.tune import pcie_bench

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_reports_that_there_is_no_gpu():
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu.suite", "link"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "error: torch finds no CUDA device\n\nhint: " in run.stderr


def test_wrong_rows_are_rejected():
    rows, ids = torch.randn(20, 5), torch.randint(20, (9,))
    suite.check_equal(rows[ids], rows, ids, "a copy")
    wrong = rows[ids].clone()
    wrong[8, 4] += 1
    with pytest.raises(RuntimeError, match="a wrong copy returned wrong rows"):
        suite.check_equal(wrong, rows, ids, "a wrong copy")


def test_missing_support_for_bulk_copies_is_recorded(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert bulk.bulk_gather is suite.bulk_gather
    host = pcie_bench.Gpu(torch.device("cpu"), lambda work: 1.0, lambda busy: {})
    suite.measure_bulk(suite.Bench(host, suite.SMALL, recorded=False))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("bulk copies need a GPU of compute capability 9.0" in line for line in lines)
