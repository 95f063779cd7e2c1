"""Every optimizer, in the loop that its example shows."""

import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from limits import HANG_S
from processes import talk, workers

import gcnzc.optim

FOLDER = Path(__file__).parents[1] / "examples" / "optimizers"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))


def run_example(name):
    with redirect_stdout(sys.stderr):
        runpy.run_path(str(FOLDER / name), run_name="__main__")


# one of each kind
OFTEN = ("onebit_adam.py", "streaming_diloco.py", "with_ddp.py")


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES],
)
def test_an_example_learns_on_two_workers(name, tmp_path):
    assert len((FOLDER / name).read_text().splitlines()) < 30
    with workers(2, tmp_path, run_example, name) as processes:
        for rank, process in enumerate(processes):
            process.join(HANG_S)
            assert process.exitcode == 0, talk(tmp_path, rank)
    for rank in range(2):
        told = re.search(rf"worker {rank}: (0\.\d+) right", talk(tmp_path, rank))
        assert told is not None
        assert float(told[1]) > 0.9


def test_there_is_one_for_each_optimizer():
    texts = "".join((FOLDER / name).read_text() for name in EXAMPLES)
    kinds = {"Averaged", "CO2", "DiLoCo", "DropCompute", "LocalSGD", "OneBitAdam", "OneBitLamb"}
    kinds |= {"MuLoCo", "SparseLoCo", "StreamingDiLoCo", "ZeroOneAdam"}
    assert kinds <= set(gcnzc.optim.__all__)
    assert all(f"import {kind}" in texts for kind in kinds)
