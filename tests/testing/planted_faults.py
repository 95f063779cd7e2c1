"""Program of test_planted_faults.py: edit the PTX of kernels, and write which edits are found."""

import json
import re
import sys

import torch

from gcnzc.kernels.aggregate import sum_numba, sum_triton
from gcnzc.kernels.aggregate.dropout import dropout_reference, dropout_triton
from gcnzc.kernels.aggregate.weighted import sddmm_numba, sddmm_triton
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.testing.executor import Executor
from gcnzc.testing.faults import Fault
from gcnzc.testing.triton_driver import execute_on_cpu


def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


def gather():
    table, ids = torch.randn(60, 301), torch.randperm(60)
    wide = torch.zeros(62, 301)
    gather_rows(table, ids, wide[1:-1])
    return same(wide[1:-1], table[ids]) and not wide[0].any() and not wide[-1].any()


def edges(columns, dtype=torch.float32):
    """Small integers, whose sums are exact in any order."""
    indptr, indices = torch.tensor([0, 0, 3, 40, 41, 60]), torch.randint(20, (60,))
    return indptr, indices, *(torch.randint(-9, 9, (n, *columns)).to(dtype) for n in (20, 5))


def products():
    arguments = edges((2, 300))
    return same(sddmm_triton(*arguments), sddmm_numba(*arguments))


def narrow_products():
    """One column, whose products all warps of a block store to the same shared memory."""
    arguments = edges((2, 1))
    return same(sddmm_triton(*arguments), sddmm_numba(*arguments))


def sums():
    indptr, indices, x, _ = edges((301,), torch.bfloat16)
    # of which bfloat16 cannot represent all, but rounds each once
    x = x * 37
    exact = sum_numba(indptr, indices, x.float(), None, None).to(torch.bfloat16)
    return same(sum_triton(indptr, indices, x, None, None).to(torch.bfloat16), exact)


def dropout():
    # the last fields of both chunks have elements, and one of them only some
    x = torch.randn(2 * 4096 - 50)
    return same(dropout_triton(x, 0.5, 2**40 + 17), dropout_reference(x, 0.5, 2**40 + 17))


def every(pattern, replacement):
    return lambda ptx: re.subn(pattern, replacement, ptx)


def one(pattern, replacement, which=0):
    """Replace one match of many, counted from the end if `which` is negative."""

    def edit(ptx):
        found = list(re.finditer(pattern, ptx))
        match = found[which] if found else None
        if match is None:
            return ptx, 0
        return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :], 1

    return edit


VECTOR, WORD = r"(ld\.global\.v\d.*) \+ 0 \]", r"(st\.global.*) \+ 0 \]"
FAULTS = {
    gather: {
        "a vector 4 B further": one(VECTOR, r"\1 + 4 ]"),
        "a vector 16 B further": one(VECTOR, r"\1 + 16 ]"),
        "a vector 16 B before": one(VECTOR, r"\1 + -16 ]"),
        "a vector 2 MiB further": one(VECTOR, r"\1 + 2097152 ]"),
        "another stride": one(r", 1204([,;])", r", 1208\1"),
        "a store 4 B further": one(WORD, r"\1 + 4 ]", -1),
        "a store 4 B before": one(WORD, r"\1 + -4 ]"),
        "a store without its mask": one(r"@%p\d+ (st\.global)", r"\1"),
        "the last store without its mask": one(r"@%p\d+ (st\.global)", r"\1", -1),
        "an id without its mask": one(r"@%p\d+ (ld\.global\.b64)", r"\1", -1),
        "one id too many": every(r"setp\.lt\.s32", "setp.le.s32"),
        "lanes instead of threads": every("%tid.x", "%laneid"),
        "every block is the first": every("%ctaid.x", "0"),
        "blocks take the same rows": every("%nctaid.x", "1"),
        "ids of 4 B": one(r"(mad\.wide\.s32.*), 8,", r"\1, 4,"),
        "an inverted branch": one(r"@(%p\d+) bra", r"@!\1 bra"),
        "a loop without an end": one(r"@%p\d+ bra", "bra", -1),
        "a store of an undefined register": one(r"(st\.global.*\{ )%r\d+", r"\1%undefined"),
    },
    products: {
        "no barriers": every(r"bar\.sync", "membar.cta; //"),
        "without the first barrier": one(r"bar\.sync", "membar.cta; //"),
        "without the last barrier": one(r"bar\.sync", "membar.cta; //", -1),
        "a barrier of some threads": one(
            r"bar\.sync", "setp.lt.u32 %extra, %tidx, 32; @%extra bar.sync"
        ),
        "another lane": one(r"(shfl\.sync\.bfly\.b32.*), \d+, 31", r"\1, 3, 31"),
        "a shuffle in another direction": one(r"shfl\.sync\.bfly", "shfl.sync.up"),
        "a shuffle of half a warp": one(r"(shfl\.sync.*), -1;", r"\1, 65535;"),
        "a shared store 4 B further": one(r"(st\.shared.*)\[ (%r\d+) \+ 0 \]", r"\1[ \2 + 4 ]"),
        "a shared store far away": one(r"(st\.shared.*)\[ (%r\d+) \+ 0 \]", r"\1[ \2 + 4096 ]"),
        "no shared store": one(r"(@%p\d+ )?st\.shared", "membar.cta; //"),
        "a shared load 4 B further": one(r"(ld\.shared[^\[]*\[)\s*([%\w]+)[^\]]*\]", r"\1\2+4]"),
        "a difference": one(r"add\.f32", "sub.f32"),
        "one edge too many": every(r"setp\.lt\.s64", "setp.le.s64"),
        "an edge without its mask": one(r"@%p\d+ (ld\.global\.b64)", r"\1", -1),
        "a result of another row": one(WORD, r"\1 + 8 ]", -1),
    },
    narrow_products: {
        "warps that store different values": one(
            r"(st\.shared\.v4\.b32 \[[^]]*\], \{ )%r\d+", r"\1%tidx"
        ),
        "a warp that stores another value": one(
            r"(st\.shared\.v4\.b32 \[[^]]*\], \{ )(%r\d+)",
            r"setp.eq.u32 %extra, %tidx, 96; selp.b32 %undefined, 5, \2, %extra; \1%undefined",
        ),
        "no barriers": every(r"bar\.sync", "membar.cta; //"),
    },
    sums: {
        "rounding toward zero": every(r"cvt\.rn\.bf16\.f32", "cvt.rz.bf16.f32"),
        "float16 for bfloat16": every(r"cvt\.f32\.bf16", "cvt.f32.f16"),
        "a maximum for a sum": one(r"add\.f32", "max.f32"),
        "a row without its mask": one(r"@%p\d+ (ld\.global\.b16)", r"\1", -1),
    },
    dropout: {
        "the lower half of a product": one(r"mul\.hi\.u32", "mul.lo.s32", -1),
        "another function of bits": one(r"xor\.b32", "or.b32", -1),
        "another seed": one(r"(ld\.param\.b64\s+%rd\d+, \[_dropout_triton_param_)3", r"\g<1>2"),
        "a store without its mask": one(r"@%p\d+ (st\.global)", r"\1", -1),
    },
}


def declared(ptx):
    """Declare the registers that edits use."""
    registers = ".reg .b32 %undefined, %tidx; .reg .pred %extra; mov.u32 %tidx, %tid.x;"
    return re.sub(r"(\.reqntid[^{]*\{)", rf"\1 {registers}", ptx)


def main():
    """Write the answer for each edit: a fault, "differs", "same" or "no match"."""
    answers = {}
    for run, edits in FAULTS.items():
        for name, edit in {"nothing": lambda ptx: (ptx, 1), **edits}.items():
            counts = []

            def apply(ptx, edit=edit, counts=counts):
                edited, count = edit(ptx)
                counts.append(count)
                return declared(edited)

            torch.manual_seed(0)
            executor = Executor(max_instructions=10**5, count=False)
            try:
                with execute_on_cpu(int(sys.argv[1]), edit=apply, executor=executor):
                    answer = "same" if run() else "differs"
            except Fault as fault:
                answer = f"fault: {fault}"
            answers[f"{run.__name__}: {name}"] = answer if all(counts) else "no match"
    sys.stdout.write(json.dumps(answers))


main()
