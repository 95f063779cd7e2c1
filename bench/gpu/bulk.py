"""Gather rows by bulk asynchronous copies (`cp.async.bulk`) of Hopper GPUs.

One thread of a block requests whole rows. The Tensor Memory Accelerator (TMA) copies each row from
host memory into shared memory, and from there to the result, so that no registers hold rows while
they are read over the bus. This is an experiment of bench/gpu/suite.py: it measures whether bulk
copies can read host memory, and how fast. The kernel is CUDA C++, compiled at run time.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

STAGES = 8  # rows that a block has in flight
SOURCE = r"""
extern "C" __global__ void bulk(
    const char* table, const long long* ids, char* out, int num_ids, int row_bytes, int pitch
) {
    extern __shared__ __align__(128) char rows[];
    __shared__ __align__(8) unsigned long long arrived[STAGES];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; s++) {
        unsigned bar = (unsigned)__cvta_generic_to_shared(&arrived[s]);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");
    long long step = gridDim.x, first = blockIdx.x;
    auto load = [&](long long round) {
        long long i = first + round * step;
        if (i >= num_ids) return;
        int s = round % STAGES;
        unsigned bar = (unsigned)__cvta_generic_to_shared(&arrived[s]);
        unsigned to = (unsigned)__cvta_generic_to_shared(rows + s * pitch);
        const char* from = table + ids[i] * (long long)row_bytes;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
            :: "r"(bar), "r"(row_bytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], %2, [%3];"
            :: "r"(to), "l"(from), "r"(row_bytes), "r"(bar) : "memory");
    };
    for (int round = 0; round < STAGES - 1; round++) load(round);
    for (long long round = 0; first + round * step < num_ids; round++) {
        // the next load overwrites the stage whose row was stored in the previous iteration
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        load(round + STAGES - 1);
        int s = round % STAGES;
        unsigned bar = (unsigned)__cvta_generic_to_shared(&arrived[s]);
        unsigned phase = (round / STAGES) & 1, done = 0;
        while (!done) {
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(phase) : "memory");
        }
        unsigned from = (unsigned)__cvta_generic_to_shared(rows + s * pitch);
        char* to = out + (first + round * step) * (long long)row_bytes;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
            :: "l"(to), "r"(from), "r"(row_bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


def bulk_gather(table: Tensor, ids: Tensor, out: Tensor, *, blocks: int = 0) -> None:
    """Gather `table[ids]` for packed rows of a multiple of 16 B, aligned to 16 B.

    Args:
        table: (N, D) page-locked on the host.
        ids: (B,) int64 on a GPU of compute capability 9.0 or above.
        out: (B, D) on the GPU of `ids`.
        blocks: number of thread blocks, each of one warp; eight per multiprocessor if 0.

    Raises:
        RuntimeError: the device does not support bulk copies, or rejects these.
    """
    if torch.cuda.get_device_capability(ids.device) < (9, 0):
        raise RuntimeError("bulk copies need a GPU of compute capability 9.0")
    row_bytes = table.shape[1] * table.element_size()
    pitch = -(-row_bytes // 128) * 128
    count = torch.cuda.get_device_properties(ids.device).multi_processor_count
    _compiled()(
        (blocks or 8 * count, 1, 1),
        (32, 1, 1),
        [table, ids, out, len(ids), row_bytes, pitch],
        shared_mem=STAGES * pitch,
    )


@cache
def _compiled() -> Callable[..., None]:
    return torch.cuda._compile_kernel(SOURCE.replace("STAGES", str(STAGES)), "bulk")
