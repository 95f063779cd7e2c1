"""Kernels as users write them are executed, or rejected with a message that says why."""

import json
from pathlib import Path

import pytest
from programs import output_of_compiled

from gcnzc.cli import options
from gcnzc.testing import triton_driver

PROGRAM = Path(__file__).with_name("user_kernels.py")


@pytest.mark.compiled
def test_kernels_of_users_are_executed_or_rejected_clearly():
    found = json.loads(output_of_compiled(PROGRAM))
    assert all(found["results"].values()), found["results"]
    errors = found["errors"]
    assert errors["endless"][0] == "Fault"
    assert "does not end within 2000 instructions" in errors["endless"][1]
    assert errors["sine"][0] == "UnsupportedInstruction"
    assert errors["sine"][1].startswith("sines: ")
    assert "local memory" in errors["sine"][1]
    assert errors["clusters"][0] == "NotImplementedError"
    assert "hint: launch it with num_ctas=1" in errors["clusters"][1]
    for name in ("arch", "arch as text"):
        assert errors[name][0] == "ValueError"
        assert "hint: use one of 75, 80" in errors[name][1]


def test_the_command_and_the_executor_know_the_same_architectures():
    assert options.ARCHITECTURES == triton_driver.ARCHITECTURES
