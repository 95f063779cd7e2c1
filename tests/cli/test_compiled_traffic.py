"""`gcnzc pcie --compile-for` executes compiled kernels, in a process in which Triton compiles."""

import json
import os
import subprocess
import sys

import pytest
import triton
from tiny_graph import tiny

from gcnzc.cli import main
from gcnzc.graph import prepare

IS_SUPPORTED = tuple(int(part) for part in triton.__version__.split(".")[:2]) == (3, 7)


@pytest.fixture
def codes(tmp_path):
    """A prepared folder of quantized features."""
    raw = tiny(num_columns=50).write(tmp_path / "raw")
    prepare.prepare(raw, tmp_path / "codes", feature_dtype="int8", pitch_bytes=0)
    return tmp_path / "codes"


@pytest.mark.compiled
@pytest.mark.skipif(not IS_SUPPORTED, reason="PTX of other versions is not executed")
def test_the_requests_of_a_folder_s_rows_are_counted(codes, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-W", "error", "-m", "gcnzc", "pcie", codes]
    command += ["--compile-for", "80", "--split-bytes", "64"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-1].endswith("on the bus, as predicted")
    table = json.loads(run.stdout)["table"]
    found = table["compiled"]["sm_80"]
    assert found["equals_model"]
    for name in ("requests_per_row", "read_bytes_per_row", "wire_bytes_per_row"):
        assert found[name] == pytest.approx(table[name])


@pytest.mark.skipif(
    isinstance(triton.language.cdiv, triton.JITFunction), reason="Triton compiles in this process"
)
def test_interpreted_kernels_are_rejected(codes, capsys):
    assert main(["pcie", str(codes), "--compile-for", "80"]) == 1
    error = capsys.readouterr().err
    if IS_SUPPORTED:
        assert "error: Triton was imported with TRITON_INTERPRET=1" in error
        assert "hint: unset TRITON_INTERPRET" in error
    else:
        assert "PTX is not executed with Triton" in error
