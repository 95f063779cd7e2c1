"""Kernels of a training step are compiled in the first step only.

A process of its own launches them with a driver that takes no kernel to a device, and counts how
often Triton asks its compiler. Triton chooses between compiler and interpreter when it is imported.
"""

import json

import pytest
import torch
import triton
from programs import output_of

PROGRAM = """
import collections, json, threading, time
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

class Compiled:
    packed_metadata = function = None
    def launch_metadata(self, *args):
        return None
    def run(self, *args):
        launched.append(self)

launched, compiled = [], collections.Counter()

def do_compile(self, key, signature, device, constexprs, options, attrs, warmup):
    compiled[self.fn.__name__] += 1
    # while a thread compiles, others find nothing compiled
    time.sleep(0.05)
    kernel = self.device_caches[device][0][key] = Compiled()
    return kernel

driver.set_active(Driver())
JITFunction._do_compile = do_compile

from gcnzc.kernels.aggregate import sum_triton
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax_backward_triton, edge_softmax_triton
from gcnzc.kernels.aggregate.dropout import dropout_triton
from gcnzc.kernels.aggregate.gatv2 import leaky_scores_triton, sum_leaky_slopes_triton
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.aggregate.weighted import sddmm_triton, weighted_spmm_triton

table = torch.zeros(5000, 101)
memory = torch.zeros(8192, dtype=torch.int64)

def ids_of(size, offset):
    return memory[offset : offset + size]

def step(size, offset, seed):
    ids = ids_of(size, offset)
    gather_rows(table, ids)
    gather_rows(table, ids, order=ids, checked=False)
    x = torch.zeros(size, 100)
    dropout_triton(x, 0.5, seed)
    dropout_triton(x, 0.5, seed, relu=True)
    indptr = torch.zeros(size + 1 + offset, dtype=torch.int64)[offset:]
    sum_triton(indptr, ids, x, None, x[:, 0].contiguous())
    score = torch.zeros(size, 4)
    weight = torch.zeros(size, 4)
    edge_softmax_triton(indptr, ids, score, score, 0.2, weight)
    out = torch.zeros(size, 4), torch.zeros(size, 4)
    edge_softmax_backward_triton(indptr, ids, score, score, 0.2, weight, weight, *out)
    rows = torch.zeros(size, 4, 25)
    weighted_spmm_triton(indptr, ids, None, weight, rows, 4)
    weighted_spmm_triton(indptr, ids, ids, weight, rows, 4)
    sddmm_triton(indptr, ids, rows, rows)
    leaky_scores_triton(indptr, ids, rows, rows, rows[0], 0.2)
    sum_leaky_slopes_triton(indptr, ids, None, weight, rows, rows, 0.2)
    sum_leaky_slopes_triton(indptr, ids, ids, weight, rows, rows, 0.2)

threads = [threading.Thread(target=gather_rows, args=(table, ids_of(100, 0))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
together = compiled["_gather_rows"]
step(1000, 0, 12345678901234567890)
first = dict(compiled)
# other sizes: one, divisible by 16 and not, more and less; views that begin anywhere; other seeds
for size, offset, seed in [(1, 0, 1), (16, 1, 2**63), (17, 2, 16), (4096, 3, 2**31), (999, 5, 7)]:
    step(size, offset, seed)
counts = {"together": together, "first": first, "all": dict(compiled), "runs": len(launched)}
# tables wherever an allocator may put them; the second is so wide that its lanes begin on lines
for columns in (101, 602):
    before = compiled["_gather_rows"]
    memory_of_rows = torch.zeros(50 * columns + 64)
    to_line = -memory_of_rows.data_ptr() % 128 // 4
    for behind in (0, 64, 16, 112):
        begin = to_line + behind // 4
        gather_rows(memory_of_rows[begin : begin + 50 * columns].view(50, columns), ids_of(9, 0))
    counts[f"columns {columns}"] = compiled["_gather_rows"] - before
print(json.dumps(counts))
"""


pytestmark = pytest.mark.compiled


def test_no_kernel_is_compiled_after_the_first_step():
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if torch.cuda.is_available() or version < (3, 3):
        pytest.skip("this counts with parts of Triton 3.3 and later, on a machine without a GPU")
    # ids are looked at by a kernel, which does not run here
    without = {"TRITON_INTERPRET": None, "GCNZC_CHECK_IDS": None}
    counts = json.loads(output_of("-W", "ignore", "-c", PROGRAM, **without))
    assert len(counts["first"]) == 9, "every kernel of a step was compiled"
    assert counts["all"] == counts["first"]
    assert counts["runs"] > 6 * len(counts["first"])
    # of threads that compile at once
    assert counts["together"] == 1
    # for any address of the table
    assert (counts["columns 101"], counts["columns 602"]) == (0, 1)
