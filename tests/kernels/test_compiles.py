"""Every Triton kernel compiles for named GPUs on a machine without a GPU.

The interpreter accepts programs that the compiler does not, and Triton chooses between them when
it is imported; so this runs in a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

# module, kernel, types of its arguments, its constants, and what its PTX must have
CASES = [
    (
        "aggregate.dropout",
        "_dropout_triton",
        {"x": f"*{dtype}", "out": f"*{dtype}", "count": "i64", "seed": "i64"}
        | {"threshold": "i32", "scale": "fp64"},
        {
            "COUNTERS": 128,
            "BITS": bits,
            "RELU": relu,
            "WIDE": "fp64" if dtype == "fp64" else "fp32",
        },
        ["ld.global", "st.global", "mul.hi.u32"],
    )
    for dtype in ("fp32", "fp64", "fp16", "bf16")
    for relu in (False, True)
    for bits in (4, 16)
]

PROGRAM = """
import importlib, json, sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

DTYPES = {"fp32": tl.float32, "fp64": tl.float64}
arch, cases = int(sys.argv[1]), json.loads(sys.argv[2])
for module, name, types, constants, wanted in cases:
    kernel = getattr(importlib.import_module(f"gcnzc.kernels.{module}"), name)
    constants = {k: DTYPES.get(v, v) for k, v in constants.items()}
    signature = types | {constant: "constexpr" for constant in constants}
    source = ASTSource(kernel, signature, constants)
    ptx = compile(source, GPUTarget("cuda", arch, 32)).asm["ptx"]
    for words in wanted:
        assert words in ptx, (name, types, words)
    print(name)
"""


@pytest.mark.compiled
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles(arch, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # compiled here and now, whatever was compiled before
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arch), json.dumps(CASES)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [case[1] for case in CASES]
