"""The pinned versions are those that a user's pip resolves."""

import os
import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# what the wheels of torch on the public index require; a CPU build requires no Triton
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def pinned(name):
    found = re.search(rf"^{name}==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"constraints.txt does not pin {name}"
    return found[1]


def test_triton_is_pinned_to_the_version_that_the_pinned_torch_requires():
    assert pinned("triton") == TRITON_OF_TORCH[pinned("torch")]


def test_the_table_agrees_with_an_installed_cuda_build():
    found = [one for one in requires("torch") or [] if re.match(r"triton\s*==", one)]
    installed = version("torch").split("+")[0]
    if not found or installed not in TRITON_OF_TORCH:
        pytest.skip(f"torch {version('torch')} here requires no Triton, or is not in the table")
    assert f"=={TRITON_OF_TORCH[installed]}" in found[0].replace(" ", "")


@pytest.mark.skipif(not os.environ.get("CI"), reason="a developer may test other versions")
@pytest.mark.parametrize("name", ["torch", "triton", "numpy", "numba"])
def test_ci_tests_the_pinned_versions(name):
    assert version(name).split("+")[0] == pinned(name)
