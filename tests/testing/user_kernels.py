"""Kernels as users write them; the test executes this file in a process that compiles kernels."""

import json

import torch
import triton
import triton.language as tl

from gcnzc.testing import Executor, Fault, UnsupportedInstruction, execute_on_cpu


@triton.jit
def signed(out, is_positive, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.where(is_positive, i, -i))


@triton.jit
def shifted(pair, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(pair[0] + i) + pair[1])


@triton.autotune(configs=[triton.Config({"B": 128}), triton.Config({"B": 256})], key=["count"])
@triton.jit
def tuned(x, out, count, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < count), mask=i < count)


@triton.jit
def convert(x, out, B: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i).to(DTYPE))


@triton.jit
def chained_scan(x, out, flag, carry, B: tl.constexpr):
    block = tl.program_id(0)
    i = block * B + tl.arange(0, B)
    values = tl.load(x + i)
    before = 0
    if block > 0:
        while tl.atomic_add(flag + block - 1, 0) == 0:
            pass
        before = tl.load(carry + block - 1, volatile=True)
    tl.store(carry + block, before + tl.sum(values, 0))
    tl.debug_barrier()
    tl.atomic_xchg(flag + block, 1)
    tl.store(out + i, tl.cumsum(values, 0) + before)


@triton.jit
def endless(flag):
    while tl.atomic_add(flag, 0) == 0:
        pass


@triton.jit
def sines(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.sin(tl.load(x + i)))


def error_of(launch, **options):
    """The type and the message of what a launch raises."""
    try:
        with execute_on_cpu(**options):
            launch()
    except (Fault, UnsupportedInstruction, NotImplementedError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def main():
    results = {}
    torch.manual_seed(0)
    x = torch.randn(1000)
    for value in (True, False):
        out = torch.zeros(32, dtype=torch.int32)
        with execute_on_cpu():
            signed[(1,)](out, value, B=32)
        results[f"bool {value}"] = out.tolist() == [i if value else -i for i in range(32)]
    out = torch.zeros(128)
    with execute_on_cpu():
        shifted[(1,)]((x, 3.0), out, B=128)
    results["tuple"] = torch.equal(out, x[:128] + 3)
    out = torch.zeros(1000)
    with execute_on_cpu():
        tuned[lambda meta: (triton.cdiv(1000, meta["B"]),)](x, out, 1000)
    results["autotune"] = torch.equal(out, x)
    for arch in (80, 90, 100):
        for count in (128, 256):
            codes = x[:count].to(torch.float8_e5m2)
            out = torch.zeros(count, dtype=torch.bfloat16)
            with execute_on_cpu(arch):
                convert[(1,)](codes, out, B=count, DTYPE=tl.bfloat16)
            is_same = torch.equal(out, codes.to(torch.bfloat16))
            results[f"float8, {count} elements, sm_{arch}"] = is_same
    numbers = torch.randint(-9, 9, (512,), dtype=torch.int32)
    out, flag = torch.zeros_like(numbers), torch.zeros(4, dtype=torch.int32)
    with execute_on_cpu(executor=Executor(allowed_races=["carry"])):
        chained_scan[(4,)](numbers, out, flag, torch.zeros_like(flag), B=128)
    results["blocks wait"] = torch.equal(out, numbers.cumsum(0).int())
    errors = {
        "endless": error_of(
            lambda: endless[(1,)](torch.zeros(1, dtype=torch.int32)),
            executor=Executor(max_instructions=2000),
        ),
        "sine": error_of(lambda: sines[(1,)](x, torch.zeros(128), B=128)),
        "clusters": error_of(lambda: shifted[(1,)]((x, 3.0), torch.zeros(128), B=128, num_ctas=2)),
        "arch": error_of(lambda: None, arch=91),
        "arch as text": error_of(lambda: None, arch="90"),
    }
    print(json.dumps({"results": results, "errors": errors}))  # noqa: T201


if __name__ == "__main__":
    main()
