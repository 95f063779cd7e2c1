"""Triton kernels that are compiled for several GPUs are executed on the CPU.

`make test-ptx` compares all kernels with their references. Triton chooses between its compiler and
its interpreter when it is imported, so this runs in a process of its own.
"""

import json

import pytest
import triton
from programs import output_of_compiled

PROGRAM = """
import json
import torch
from gcnzc.kernels.aggregate.dropout import dropout_triton
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.testing.faults import Fault
from gcnzc.testing.triton_driver import execute_on_cpu

def outcome(arch):
    results, faults, texts = {}, {}, []
    torch.manual_seed(0)
    table, ids = torch.randn(90, 301), torch.randint(90, (100,))
    with execute_on_cpu(arch, edit=lambda ptx: texts.append(ptx) or ptx) as executor:
        results["is same"] = torch.equal(gather_rows(table, ids), table[ids])
    results["launches"] = executor.launches
    results["has run"] = executor.thread_instructions > 10_000 and executor.seconds > 0
    results["targets"] = [line.split()[1] for text in texts for line in text.split("\\n")
                          if line.startswith(".target")]

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
def test_a_process_executes_kernels_for_several_architectures(outcomes, arch):
    assert outcomes[arch][0] == {
        "is same": True,
        "launches": ["_gather_rows"],
        "has run": True,
        "targets": [{"80": "sm_80", "90": "sm_90a"}[arch]],
        "assembled": ["_dropout_triton"],
    }


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
