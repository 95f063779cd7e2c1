"""The plugin counts launches, and fails runs and tests that launch nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from programs import run_python
from ptx_launches import KERNELS, evenly_spaced, kernels_in

ROOT = Path(__file__).parents[2]


def test_kernels_are_found_by_parsing(tmp_path):
    names = kernels_in(KERNELS)
    assert {"_gather_rows", "_dropout_triton", "_encode", "encode_gpu", "_add_sums"} <= names
    assert len(names) == 22
    # those that only kernels call are compiled into their callers
    assert not names & {"_chunk", "_load", "_signed", "_load_sums", "_assign_vectors"}
    (tmp_path / "more.py").write_text(
        "@triton.jit\ndef part(x): pass\n"
        "@triton.jit(do_not_specialize=['x'])\ndef whole(x):\n    if x:\n        part(x)\n"
        "@numba.njit\ndef other(x): part(x)\n"
        "def launch(x): whole[(1,)](x)\n"
    )
    (tmp_path / "other.py").write_text("@triton.jit\ndef part(x, y): pass\n")
    assert kernels_in(tmp_path) == {"whole", "part"}
    (tmp_path / "third.py").write_text("@triton.jit\ndef third(x): part(x, 1)\n")
    assert kernels_in(tmp_path) == {"whole", "third"}


def test_few_cases_of_a_test_are_the_first_the_last_and_between():
    items = [SimpleNamespace(nodeid=f"a[{number}]") for number in range(10)]
    items += [SimpleNamespace(nodeid="b"), SimpleNamespace(nodeid="c[1]")]
    names = lambda most: [item.nodeid for item in evenly_spaced(items, most)]  # noqa: E731
    assert names(1) == ["a[0]", "b", "c[1]"]
    assert names(3) == ["a[0]", "a[4]", "a[9]", "b", "c[1]"]
    assert names(100) == [item.nodeid for item in items]


INNER = """
import pytest, torch
from gcnzc.kernels.aggregate.dropout import dropout_triton

@pytest.mark.triton
def test_launches():
    dropout_triton(torch.randn(64), 0.5, 1)

@pytest.mark.triton
def test_launches_nothing():
    pass

def test_without_kernels():
    pass
"""


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "options", "failure"),
    [
        ("test_launches", ["--ptx-all-kernels"], "FAILED _gather_rows was not launched"),
        ("test_launches", ["-n", "1"], ""),
        ("test_launches_nothing", [], "test_launches_nothing launched no Triton kernel"),
        ("test_without_kernels", [], "FAILED no Triton kernel was launched"),
    ],
)
def test_a_run_without_the_launches_that_it_should_have_fails(name, options, failure, tmp_path):
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) != (3, 7):
        pytest.skip(f"PTX of Triton {triton.__version__} is not executed")
    (tmp_path / "test_inner.py").write_text(INNER)
    words = ["-m", "pytest", "-p", "tests.ptx_plugin", "-p", "no:cacheprovider"]
    words += ["-c", "pyproject.toml", f"--rootdir={tmp_path}", *options]
    run = run_python(*words, f"{tmp_path / 'test_inner.py'}::{name}", PYTHONPATH=str(ROOT))
    assert (run.returncode != 0) == bool(failure), run.stdout + run.stderr
    assert failure in run.stdout
    assert "1 passed" in run.stdout
    if name == "test_launches":
        (line,) = (line for line in run.stdout.splitlines() if line.startswith("_dropout_triton"))
        tests, launches, requests = map(int, line.split()[1:])
        assert (tests, launches) == (1, 1)
        # two warps read and write 128 B each, which may begin within a line
        assert 4 <= requests <= 8
