"""Triton kernels that are compiled for a GPU, and executed on the CPU, equal their references.

Triton chooses between its compiler and its interpreter when it is imported, so this runs in a
process of its own.
"""

import json

import pytest
import triton
from programs import output_of_compiled

PROGRAM = """
import json
import torch
from gcnzc.features.pcie_traffic import table_traffic
from gcnzc.kernels.aggregate.dropout import dropout_triton
from gcnzc.kernels.gather.cached_rows import make_cached_rows
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.testing.executor import Executor
from gcnzc.testing.faults import Fault
from gcnzc.testing.triton_driver import execute_on_cpu

def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))

def gather(table, count=100, **options):
    # around the result nothing may be written
    ids = torch.randint(len(table), (count,))
    wide = torch.full((count + 2, table.shape[1] + 2), 7, dtype=table.dtype)
    def run():
        found = gather_rows(table, ids, wide[1:-1, 1:-1], **options)
        is_clean = bool((wide[0] == 7).all() and (wide[:, -1] == 7).all())
        return same(found.contiguous(), table[ids]) and is_clean
    return run

def lines(rows, columns):
    # rows that begin on a line of 128 B
    memory = torch.randn(rows * columns + 64)
    begin = -memory.data_ptr() % 128 // 4
    return memory[begin : begin + rows * columns].view(rows, columns)

def outcome(arch):
    results, faults, texts = {}, {}, []

    def execute(name, run):
        executor = Executor()
        with execute_on_cpu(arch, executor=executor, edit=lambda ptx: texts.append(ptx) or ptx):
            is_same = bool(run())
        results[name] = is_same, executor.launches, executor.thread_instructions, executor.seconds
        return executor

    torch.manual_seed(0)
    execute("shifted rows", gather(torch.randn(90, 301)))
    execute("scalar rows", gather(torch.randn(90, 33), layout="scalar"))
    execute("pitched rows", gather(lines(90, 96)))
    execute("rows of bytes", gather(torch.randint(-9, 9, (90, 133), dtype=torch.int8)))
    table, ids = lines(90, 100), torch.randint(90, (100,))
    cached = make_cached_rows(table, torch.arange(0, 90, 3), torch.device("cpu"))
    execute("cached rows", lambda: same(gather_rows(table, ids, cached=cached), table[ids]))
    codes, scales = torch.randint(-9, 9, (90, 100), dtype=torch.int8), torch.rand(90)
    expected = (codes[ids].float() * scales[ids, None]).to(torch.bfloat16)
    run = lambda: gather_rows(codes, ids, scales=scales, dtype=torch.bfloat16)
    execute("codes to bfloat16", lambda: same(run(), expected))

    # requests equal the model of PCIe traffic, where no two rows share a sector
    far, every = torch.randn(60 * 3, 301)[::3], torch.randperm(60)
    executor = execute("requests", lambda: same(gather_rows(far, every), far[every]))
    model = table_traffic(far, every, layout="shifted").requests
    modelled = {size: int(count * 60) for size, count in model.items() if count}
    results["requests are modelled"] = executor.counters["load", "table"].requests == modelled

    results["targets"] = sorted({line.split()[1] for text in texts for line in text.split("\\n")
                                 if line.startswith(".target")})

    # an id that is out of range is out of bounds, and not if the kernel checks it
    ids[17] = 90
    for name, error, options in (
        ("unchecked", Fault, {}), ("checked", IndexError, {"checked": True})
    ):
        with execute_on_cpu(arch):
            try:
                gather_rows(table, ids, **options)
            except error as caught:
                faults[name] = str(caught)
    with execute_on_cpu(arch, assemble=True) as executor:
        dropout_triton(torch.randn(7), 0.5, 1)
    results["assembled"] = executor.launches
    return results, faults

print(json.dumps({arch: outcome(arch) for arch in (80, 90)}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    # compiled here and now
    cache = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    text = output_of_compiled("-W", "ignore", "-c", PROGRAM, GCNZC_CHECK_IDS=None, **cache)
    return json.loads(text)


@pytest.mark.compiled
@pytest.mark.parametrize("arch", ["80", "90"])
def test_kernels_equal_their_references(outcomes, arch):
    results, _ = outcomes[arch]
    # each target is compiled for, although a process asks for both
    assert results.pop("targets") == [{"80": "sm_80", "90": "sm_90a"}[arch]]
    assert results.pop("requests are modelled")
    assert results.pop("assembled") == ["_dropout_triton"]
    for name, (is_same, launches, instructions, seconds) in results.items():
        assert is_same, name
        assert launches == ["_gather_rows"], name
        assert instructions > 10_000
        assert seconds > 0
    assert len(results) == 7


@pytest.mark.compiled
@pytest.mark.parametrize("arch", ["80", "90"])
def test_an_id_that_is_out_of_range_is_found(outcomes, arch):
    _, faults = outcomes[arch]
    assert "out of bounds of table" in faults["unchecked"]
    assert "gpu.py:" in faults["unchecked"]
    assert "id 90 at 17 is not in a table of 90 rows" in faults["checked"]


def test_kernels_that_are_interpreted_are_rejected():
    from gcnzc.testing.triton_driver import SUPPORTED_VERSIONS, execute_on_cpu

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) not in SUPPORTED_VERSIONS:
        expected = "PTX is not executed with Triton"
    elif isinstance(triton.language.cdiv, triton.JITFunction):
        pytest.skip("Triton compiles in this process")
    else:
        expected = "Triton was imported with TRITON_INTERPRET=1.*\n\nhint: unset TRITON_INTERPRET"
    with pytest.raises(RuntimeError, match=expected), execute_on_cpu():
        pass
