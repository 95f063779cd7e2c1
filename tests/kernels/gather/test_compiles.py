"""The gather's loads have the expected width in code that is compiled for named GPUs.

A process of its own compiles, since Triton chooses between compiler and interpreter when it is
imported; and the code is looked at here.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import triton

from gcnzc.tune.choose import SHAPES

# of some versions of Triton, the newest assembler takes what is compiled for newer GPUs
ASSEMBLERS = sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"))

PROGRAM = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gcnzc.kernels.gather.gpu import EXPONENT_BITS, WARPS, KernelConfig, _gather_rows, constants
from gcnzc.kernels.gather.lanes import assign_lanes

def program(case, arch):
    place = [case[name] for name in ("layout", "row_bytes", "stride_bytes", "base", "item_bytes")]
    lanes = assign_lanes(*place)
    word = getattr(torch, case["word"])
    config = KernelConfig(warps=case["warps"] or None, vectors=case["vectors"] or None)
    stride_bytes, out_stride = case["stride_bytes"], case["out_stride"]
    options = constants(lanes, stride_bytes, case["base"], word, out_stride, config)
    options |= {"HAS_ORDER": case["ordered"], "CHECK_IDS": case["checked"]}
    options |= {"SLOT_VECTORS": case["slot_vectors"], "NUM_PEERS": case["num_peers"]}
    options |= {"HAS_SCALES": case["scaled"], "SCALE_COLUMNS": case["scale_columns"]}
    options["EXPONENT_BITS"] = EXPONENT_BITS.get(getattr(torch, case["codes"]), 0)
    letters = {"int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "float16": "fp16",
               "float32": "fp32", "bfloat16": "bf16", "float8_e5m2": "fp8e5"}
    table, out = (f"*{letters[case[name]]}" for name in ("word", "out_word"))
    ids = "*" + case["ids"]
    types = dict(table=table, ids=ids, order=ids, out=out, invalid_position="*i64")
    cached = table if case["num_peers"] == 1 else "*i64"
    types |= dict(slots="*i32", cached=cached, scales="*fp32" if case["scaled"] else ids)
    types |= dict(num_ids="i32", num_rows="i64", zero="i32", table_line_offset="i32")
    names = list(_gather_rows.arg_names)
    # what a launch knows of pointers that torch allocated
    aligned = ("table", "out", "cached")
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    numbers = {(names.index(name),): value for name, value in options.items()}
    signature = types | {name: "constexpr" for name in options}
    source = ASTSource(_gather_rows, signature, numbers, attributes)
    target = GPUTarget("cuda", arch, 32)
    compiled = compile(source, target, options={"num_warps": config.warps or WARPS})
    return {"ptx": compiled.asm["ptx"], "lanes": lanes.lanes, "vector_bytes": lanes.vector_bytes}

cases, arch = json.loads(sys.argv[2]), int(sys.argv[1])
print(json.dumps([program(case, arch) for case in cases]))
"""


@dataclass(frozen=True)
class Case:
    layout: str
    row_bytes: int
    stride_bytes: int
    base: int
    item_bytes: int
    word: str
    out_word: str = ""
    out_stride: int = 0
    ids: str = "i64"
    ordered: bool = False
    checked: bool = False
    slot_vectors: int = 0
    num_peers: int = 1
    scaled: bool = False
    scale_columns: int = 0
    codes: str = "int8"
    warps: int = 0  # as usual
    vectors: int = 0

    def words(self) -> dict:
        sizes = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4}
        out_stride = self.row_bytes // sizes.get(self.word, 1)
        return asdict(self) | {"out_word": self.out_word or self.word, "out_stride": out_stride}


# ogbn-products, Reddit and Cora; odd bytes; rows of many and of few vectors; bases off a line
SHIFTED = [
    Case("shifted", 400, 400, 0, 4, "int64"),
    Case("shifted", 200, 200, 0, 2, "int64"),
    Case("shifted", 404, 404, 0, 4, "int32"),
    Case("shifted", 1204, 1204, 0, 2, "int32", ids="i32"),
    Case("shifted", 2408, 2408, 64, 4, "int64", checked=True),
    Case("shifted", 5732, 5732, 0, 4, "int32", ordered=True),
    Case("shifted", 202, 202, 6, 2, "int16"),
    Case("shifted", 133, 133, 3, 1, "int8"),
    Case("shifted", 4, 4, 0, 4, "int32"),
    Case("pitched", 1204, 1280, 0, 2, "int32"),
    Case("pitched", 404, 512, 0, 4, "int32"),
    Case("pitched", 133, 256, 0, 1, "int8"),
    Case("vector", 400, 400, 0, 4, "int64"),
]
CONVERTED = [
    Case("shifted", 1204, 1204, 0, 2, "float16", "float32"),
    Case("shifted", 2408, 2408, 0, 4, "float32", "bfloat16"),
    Case("shifted", 100, 100, 0, 1, "int8", "float16"),
    Case("shifted", 100, 100, 0, 1, "float8_e5m2", "float16"),
]
NARROW = [
    (Case("vector", 2408, 2408, 0, 4, "int64"), 8),
    (Case("wrapped", 2408, 2408, 0, 4, "int64"), 8),
    (Case("wrapped", 1204, 1204, 0, 2, "int32"), 4),
    (Case("vector", 202, 202, 0, 2, "int16"), 2),
    (Case("scalar", 400, 400, 0, 4, "int32"), 4),
    (Case("scalar", 512, 512, 0, 2, "int16"), 2),
]


# every shape of programs that `gcnzc check --tune` tries
SHAPED = [
    Case("shifted", 400, 400, 0, 4, "int64", warps=warps, vectors=vectors)
    for warps, vectors in SHAPES
]


def compiled(cases, arch, folder):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    words = json.dumps([case.words() for case in cases])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(arch), words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def global_bytes(ptx, verb):
    """Bytes that each instruction moves for a lane."""
    found = re.findall(rf"\b{verb}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_each_lane_has_the_configured_number_of_loads_in_flight(arch, tmp_path):
    for case, made in zip(SHAPED, compiled(SHAPED, arch, tmp_path), strict=True):
        loads = global_bytes(made["ptx"], "ld")
        assert loads.count(16) == case.vectors, case
        # an id for each row
        assert len(loads) == 2 * case.vectors


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_loads_whole_vectors(arch, tmp_path):
    for case, made in zip(
        SHIFTED + CONVERTED, compiled(SHIFTED + CONVERTED, arch, tmp_path), strict=True
    ):
        loads = global_bytes(made["ptx"], "ld")
        # ids, and with `ordered` their positions, are loaded one by one
        wide = [size for size in loads if size == 16]
        narrow = [size for size in loads if size < 16]
        id_bytes = 4 if case.ids == "i32" else 8
        assert len(wide) == 4, (case, loads)
        assert len(narrow) == 4 * (1 + case.ordered), (case, loads)
        assert set(narrow) == {id_bytes}, (case, loads)
        assert ".local" not in made["ptx"], case


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_baselines_load_the_documented_widths(arch, tmp_path):
    cases = [case for case, _ in NARROW]
    for (case, size), made in zip(NARROW, compiled(cases, arch, tmp_path), strict=True):
        loads = global_bytes(made["ptx"], "ld")
        assert made["vector_bytes"] == size
        # the first four are ids; passes may be unrolled
        assert loads[:4] == [8] * 4, (case, loads)
        assert set(loads[4:]) == {size}, (case, loads)


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_cached_rows_of_several_memories_are_loaded_as_wide_vectors(arch, tmp_path):
    """Each row costs one load more, of the address where its memory begins."""
    cases = [
        Case("shifted", 400, 400, 0, 4, "int64", slot_vectors=32, num_peers=2),
        Case("shifted", 1204, 1204, 0, 2, "int32", slot_vectors=88, num_peers=3),
        Case("pitched", 404, 512, 0, 4, "int32", slot_vectors=32, num_peers=8),
    ]
    for case, made in zip(cases, compiled(cases, arch, tmp_path), strict=True):
        loads = global_bytes(made["ptx"], "ld")
        assert sorted(loads) == [4] * 4 + [8] * 8 + [16] * 8, (case, loads)
        assert ".local" not in made["ptx"], case


def test_cached_rows_are_loaded_as_wide_vectors(tmp_path):
    cases = [
        Case("shifted", 400, 400, 0, 4, "int64", slot_vectors=32),
        Case("shifted", 1204, 1204, 0, 2, "int32", slot_vectors=88),
    ]
    for made in compiled(cases, 90, tmp_path):
        loads = global_bytes(made["ptx"], "ld")
        # ids, slots, and each vector from either place
        assert sorted(loads) == [4] * 4 + [8] * 4 + [16] * 8, loads
        assert ".local" not in made["ptx"]


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_codes_are_loaded_as_wide_vectors(arch, tmp_path):
    """Of every type on every GPU: a scale of a row is one load more, one of columns at most 16."""
    cases = [
        Case(
            "shifted", 100, 100, 0, 1, "int8", "float32", scaled=True, scale_columns=c, codes=codes
        )
        for c in (0, 16)
        for codes in ("int8", "float8_e4m3fn", "float8_e5m2")
    ]
    cases.append(Case("pitched", 100, 128, 0, 1, "int8", "bfloat16", scaled=True, slot_vectors=8))
    for case, made in zip(cases, compiled(cases, arch, tmp_path), strict=True):
        loads = global_bytes(made["ptx"], "ld")
        wide = 8 if case.slot_vectors else 4
        narrow = 4 if case.scale_columns == 0 else 4 * 16
        slots = 4 if case.slot_vectors else 0
        assert sorted(loads) == [4] * (narrow + slots) + [8] * 4 + [16] * wide, (case, loads)
        assert ".local" not in made["ptx"], case


def test_stores_whole_vectors_where_rows_are_whole(tmp_path):
    for made in compiled([SHIFTED[0], SHIFTED[-1]], 90, tmp_path):
        assert set(global_bytes(made["ptx"], "st")) == {16}


def test_rows_that_begin_on_vectors_are_stored_from_the_lanes_that_load_them(tmp_path):
    """A row of 404 B is not whole vectors, but with a stride of 416 B every row begins on one."""
    case = Case("shifted", 404, 416, 0, 4, "int32")
    (made,) = compiled([case], 90, tmp_path)
    assert "ld.shared" not in made["ptx"]
    assert global_bytes(made["ptx"], "ld").count(16) == 4


def registers(ptx, arch, folder):
    """Registers of a lane, from the assembler that Triton ships."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    target = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
    for assembler in ASSEMBLERS:
        command = [assembler, "-v", target, source, "-o", folder / "kernel.cubin"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode == 0:
            break
    said = run.stderr
    assert run.returncode == 0, said
    assert "0 bytes spill stores" in said
    return int(re.search(r"Used (\d+) registers", said)[1])


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_gathers_of_unaligned_rows_leave_registers_for_a_second_program(arch, tmp_path):
    """602 and 1433 float32 columns; 65,536 registers hold two programs of 256 lanes up to 128."""
    cases = [
        Case("shifted", 2408, 2408, 0, 4, "int64"),
        Case("shifted", 5732, 5732, 0, 4, "int32"),
    ]
    made = compiled(cases, arch, tmp_path)
    used = [registers(one["ptx"], arch, tmp_path) for one in made]
    assert used[0] <= 105, used
    assert used[1] <= (125 if arch >= 90 else 128), used
    # what lanes need to store other words than they load goes through shared memory
    barriers = [len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync", one["ptx"])) for one in made]
    assert barriers[0] <= 10, barriers
    assert barriers[1] <= 14, barriers
