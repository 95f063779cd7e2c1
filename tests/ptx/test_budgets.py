"""No compiled kernel uses more registers, shared memory or barriers than recorded, or loads less.

The budgets are the newest lines of `bench/results/budgets.jsonl`. `python -m bench.gpu.budgets`
records new ones, if a kernel uses more on purpose.
"""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from bench.docs.table import newest, read
from bench.gpu import budgets
from gcnzc.testing import record_resources
from gcnzc.tune.choose import SHAPES
from tests.ptx_launches import KERNELS, kernels_in

pytestmark = pytest.mark.budget

BUDGETS = newest(read("budgets"), "launch", "kernel", "arch")


@pytest.fixture(scope="module")
def arch(request):
    """The compute capability for which this run compiles, if its budgets can be compared."""
    arch = request.config.getoption("--ptx-arch")
    version = triton.__version__.split(".")[:2]
    recorded = {line["triton"] for line in BUDGETS.values() if line["arch"] == arch}
    if {tuple(each.split(".")[:2]) for each in recorded} != {tuple(version)}:
        pytest.skip(
            f"registers, spills, shared memory, barriers and loads of kernels for sm_{arch} were "
            f"recorded with Triton {', '.join(sorted(recorded)) or 'none'}, and this is Triton "
            f"{triton.__version__}: not compared"
        )
    return arch


def test_no_kernel_exceeds_its_budget(arch):
    wrong, names = [], set()
    for launch, resources in budgets.compiled(arch):
        names.add(resources.name)
        budget = BUDGETS.get((launch, resources.name, arch))
        worse = budgets.excesses(resources, budget) if budget else ["no budget is recorded"]
        wrong += [f"{resources.name} of {launch}, sm_{arch}: {each}" for each in worse]
    wrong += [f"{name} is not launched" for name in sorted(kernels_in(KERNELS) - names)]
    assert not wrong, "\n".join(["run `python -m bench.gpu.budgets` if intended", *wrong])


def test_gathers_of_unaligned_float32_rows_leave_registers_to_other_kernels(arch):
    """Whatever is recorded: 602 and 1433 columns, at most 96 registers and no spills."""
    starts = tuple(f"gather {columns} float32" for columns in budgets.GATHER_COLUMNS)
    gathers = {
        launch: line
        for (launch, kernel, of), line in BUDGETS.items()
        if of == arch and kernel == "_gather_rows" and launch.startswith(starts)
    }
    assert len(gathers) >= 10
    for launch, line in gathers.items():
        assert line["registers"] <= budgets.GATHER_REGISTERS, launch
        assert line["spill_store_bytes"] == line["spill_load_bytes"] == 0, launch


def test_each_lane_has_the_configured_vectors_in_flight(arch):
    lines = {launch: line for (launch, _, of), line in BUDGETS.items() if of == arch}
    found = {launch: line for launch, line in lines.items() if " vectors" in launch}
    # that of the default configuration is recorded as that of its layout
    assert len(found) == len(SHAPES) - 1
    for launch, line in found.items():
        assert line["load_bytes_in_flight"] == 16 * int(launch.split()[-2]), launch


@triton.jit
def _copy(x, out, BLOCK: tl.constexpr, STRIDE: tl.constexpr, TOTAL: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i * STRIDE)
    if TOTAL:
        values += tl.sum(values)
    tl.store(out + i, values)


@triton.jit
def _copy_in_turns(x, out, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    # as the result may overlap x, each load waits for the store before
    for turn in tl.static_range(TURNS):
        i = turn * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i))


def resources_of(kernel, arch, **options):
    x = torch.zeros(1 << 14)
    with record_resources(arch) as recorded:
        kernel[(1,)](x, x, **options)
    (resources,) = recorded
    return resources


PLANTED = {
    "many live values": ({"BLOCK": 128 * 128}, ["registers"]),
    "few registers": ({"BLOCK": 128 * 128, "maxnreg": 32}, ["spill_store_bytes"]),
    "a sum over threads": ({"TOTAL": True}, ["shared_bytes", "barriers"]),
    "a narrower load": ({"STRIDE": 2}, ["widest_load_bytes"]),
    "fewer values": ({"BLOCK": 256}, ["load_bytes_in_flight"]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_kernel_that_uses_more_or_loads_less_is_found(planted, arch):
    options, expected = PLANTED[planted]
    plain = {"BLOCK": 128 * 16, "STRIDE": 1, "TOTAL": False}
    budget = budgets.figures_of(resources_of(_copy, arch, **plain))
    assert not budgets.excesses(resources_of(_copy, arch, **plain), budget)
    found = budgets.excesses(resources_of(_copy, arch, **plain | options), budget)
    for name in expected:
        assert any(each.startswith(f"{name} ") for each in found), found


def test_loads_that_wait_for_each_other_are_not_in_flight_together(arch):
    together = resources_of(_copy, arch, BLOCK=128 * 16, STRIDE=1, TOTAL=False)
    in_turns = resources_of(_copy_in_turns, arch, BLOCK=128 * 4, TURNS=4)
    assert together.widest_load_bytes == in_turns.widest_load_bytes == 16
    assert (together.load_bytes_in_flight, in_turns.load_bytes_in_flight) == (64, 16)
    # 16 blocks of 128 threads are the limit of threads, as both use few registers
    few = dataclasses.replace(in_turns, registers=32)
    assert few.load_bytes_in_flight_per_multiprocessor == 2048 * 16
