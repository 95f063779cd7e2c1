"""Faults that are edited into the PTX of kernels are found: as a fault, or by a wrong result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

# what the message of a fault says; other edits change the result
MESSAGES = {
    "gather: a vector 4 B further": "not a multiple of 16",
    "gather: a vector 2 MiB further": "out of bounds of table",
    "gather: a store 4 B before": "out of bounds of out",
    "gather: an id without its mask": "out of bounds of ids",
    "gather: every block is the first": "race in out",
    "gather: a loop without an end": "does not end",
    "gather: a store of an undefined register": "undefined value as a stored value",
    "products: no barriers": "race in shared memory",
    "products: without the first barrier": "race in shared memory",
    "products: without the last barrier": "race in shared memory",
    "products: a shuffle of half a warp": "the member mask",
    "products: a shared store far away": "out of bounds of shared memory",
    "products: an edge without its mask": "out of bounds of indices",
    "narrow_products: warps that store different values": "write of this instruction",
    "narrow_products: a warp that stores another value": "write of this instruction",
    "narrow_products: no barriers": "race in shared memory",
    "dropout: a store without its mask": "out of bounds of out",
}


@pytest.mark.compiled
def test_planted_faults_are_found():
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) != (3, 7):
        pytest.skip(f"PTX of Triton {triton.__version__} is not executed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment.pop("GCNZC_CHECK_IDS", None)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("planted_faults.py"), "90"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = json.loads(run.stdout)
    for name, answer in answers.items():
        if name.endswith(": nothing"):
            assert answer == "same", name
            continue
        assert answer == "differs" or answer.startswith("fault: "), (name, answer)
        assert MESSAGES.get(name, "") in answer, (name, answer)
    assert set(MESSAGES) <= set(answers)
    assert len(answers) - 5 >= 30
