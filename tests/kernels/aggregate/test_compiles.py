"""The Triton kernels of aggregation compile for named GPUs on a machine without a GPU.

The interpreter accepts programs that the compiler does not, and Triton chooses between them when
it is imported; so this runs in a process of its own. No kernel adds by atomics: that is what makes
sums the same from run to run.
"""

import pytest
from programs import output_of

PROGRAM = """
import re, sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gcnzc.kernels import aggregate
from gcnzc.kernels.aggregate import edge_softmax, gatv2, weighted

SIZES = {"num_cols": "i32", "num_heads": "i32", "out_heads": "i32", "x_stride": "i64",
         "out_stride": "i32", "row_stride": "i64", "head_stride": "i32", "slope": "fp64"}

def ptx(kernel, rows, ids, total, **constants):
    constants = {"EDGES": 8, "BLOCK": 128, "HEADS": 4, "SUM": total, "HAS_A": True, "HAS_B": True,
                 "HAS_EDGES": True, "VECTOR": 1} | constants
    wide = "*fp64" if total is tl.float64 else "*fp32"
    kinds = SIZES | dict.fromkeys(["indptr", "indices", "edges"], f"*{ids}")
    kinds |= dict.fromkeys(["a_S", "b_T", "weight_EH", "grad_EH", "out_EH", "out_TH"], wide)
    kinds |= dict.fromkeys(["score_SH", "score_TH", "score_EH", "a"], wide)
    kinds |= dict.fromkeys(["x", "y", "out"], rows)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    given = {name: constants[name] for name in names if name in constants}
    # torch's allocations are aligned
    known = {(names.index(name),): [["tt.divisibility", 16]] for name in ("x", "y", "out")
             if name in names}
    source = ASTSource(kernel, signature, given, known)
    return compile(source, GPUTarget("cuda", ARCH, 32)).asm["ptx"]

made = []
for rows, total in [("*fp32", tl.float32), ("*bf16", tl.float32), ("*fp64", tl.float64)]:
    for ids in ["i32", "i64"]:
        made += [ptx(aggregate._sum_triton, rows, ids, total),
                 ptx(aggregate._sum_triton, rows, ids, total, HAS_A=False, HAS_B=False)]
for rows, total in [("*fp32", tl.float32), ("*fp64", tl.float64)]:
    made += [ptx(edge_softmax._edge_softmax_triton, rows, "i64", total, EDGES=32),
             ptx(edge_softmax._edge_softmax_grad_triton, rows, "i64", total, EDGES=32),
             ptx(weighted._weighted_spmm_triton, rows, "i64", total),
             ptx(weighted._weighted_spmm_triton, rows, "i64", total, HAS_EDGES=False),
             ptx(weighted._sddmm_triton, rows, "i64", total),
             ptx(gatv2._leaky_scores_triton, rows, "i64", total),
             ptx(gatv2._sum_leaky_slopes_triton, rows, "i64", total),
             ptx(gatv2._sum_leaky_slopes_triton, rows, "i64", total, HAS_EDGES=False)]
for text in made:
    assert "ld.global" in text and "st.global" in text
    assert "atom." not in text and "red.global" not in text
print(len(made), "kernels")

# rows of 100 columns are not a multiple of 16 elements apart, but of whole vectors of 16 B
def check_vectors(text, *context):
    loads = re.findall(r"ld\\.global\\S*\\.v(\\d)\\.b(\\d+)", text)
    assert loads and {int(n) * int(bits) // 8 for n, bits in loads} == {16}, (*context, loads)
    return len(loads)

for rows, vector in [("*fp32", 4), ("*bf16", 8), ("*fp64", 2)]:
    total = tl.float64 if rows == "*fp64" else tl.float32
    text = ptx(aggregate._sum_triton, rows, "i64", total, HAS_A=False, HAS_B=False, VECTOR=vector)
    check_vectors(text, rows)
    if rows == "*bf16":
        # rows with weights are widened before
        continue
    # vectors of a lane: 8 edges and 128 columns among 128 lanes
    lanes = 8 * 128 // 128 // vector
    for has_edges in (False, True):
        text = ptx(weighted._weighted_spmm_triton, rows, "i64", total, HAS_EDGES=has_edges,
                   VECTOR=vector)
        assert check_vectors(text, rows, has_edges) == lanes
    text = ptx(weighted._sddmm_triton, rows, "i64", total, VECTOR=vector)
    # of the sources' rows; lanes side by side share a target's
    assert check_vectors(text, rows) == lanes
    for has_edges in (False, True):
        text = ptx(gatv2._sum_leaky_slopes_triton, rows, "i64", total, HAS_EDGES=has_edges,
                   VECTOR=vector)
        # of the other ends' rows; the target's row is not one of vectors
        assert check_vectors(text, rows, has_edges) == lanes
"""


@pytest.mark.compiled
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles(arch, tmp_path):
    program = PROGRAM.replace("ARCH", str(arch))
    # compiled here and now, whatever was compiled before
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert output_of("-c", program, TRITON_INTERPRET=None, **cache) == "28 kernels\n"
