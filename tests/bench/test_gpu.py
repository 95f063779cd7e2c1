"""The GPU benchmarks run at a small scale without a GPU, and reject wrong rows."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
    "HOME": str(Path.home()),
    # idle OpenMP threads sleep at once, as in conftest.py
    "OMP_WAIT_POLICY": "passive",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for the real one")
def test_all_parts_run_tiny():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.gpu.suite", "all", "--small"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    parts = {line.split()[0] for line in lines}
    assert parts == {
        "link",
        "gather",
        "gather_beside",
        "gather_dtypes",
        "gather_programs",
        "tlb",
        "cache",
        "codes",
        "bulk",
        "overlap",
        "epoch",
    }
    ways = {line.split("'way': ")[1].split("'")[1] for line in lines if line.startswith("epoch")}
    parts = {"sampling", "transfer", "compute"}
    assert parts < ways
    assert len(ways - parts) == 11  # rivals, ours, and all on the GPU
    assert sum(line.startswith("bulk") and "no CUDA device" in line for line in lines) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_reports_that_there_is_no_gpu():
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu.suite", "link"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "error: no CUDA device here\n\nhint: --small" in run.stderr


def test_wrong_rows_are_rejected(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--small"])
    from bench.gpu import suite as gpu

    rows, ids = torch.randn(20, 5), torch.randint(20, (9,))
    gpu.check_equal(rows[ids], rows, ids, "a copy")
    wrong = rows[ids].clone()
    wrong[8, 4] += 1
    with pytest.raises(RuntimeError, match="a wrong copy returned wrong rows"):
        gpu.check_equal(wrong, rows, ids, "a wrong copy")
