"""Measure mean and attention aggregation on the CPU, compared with DGL and torch.sparse.

    python -m bench.training.aggregate [--threads 2] [--edge-cost]

The blocks are those of one minibatch of 1024 seeds with fan-outs 15, 10, 5, on a power-law graph of
1 M nodes and 20 M edges. A call computes the forward and backward pass of all three blocks, with
the gradient with respect to the input rows. The measurements of all methods are interleaved. Blocks
are reused, so the time to convert them (DGL's other sparse formats, gcnzc's transposed block) is
not counted. "gcnzc, new blocks" includes the transposition, as in training, where every block
is new.

`--edge-cost` instead measures the constant `gcnzc.models.layers.EDGE_COST`: the cost of aggregating
one column of one edge, forward and backward, in multiplications of a linear layer.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import record, side_by_side
from gcnzc.graph.graph import Graph
from gcnzc.interop.dgl import import_dgl
from gcnzc.kernels.aggregate import aggregate
from gcnzc.kernels.aggregate.gat import gat_aggregate
from gcnzc.sampling.batch import Block
from gcnzc.sampling.neighbor import Sampler

NUM_NODES, NUM_EDGES = 1_000_000, 20_000_000
FANOUTS, BATCH_SIZE = [15, 10, 5], 1024
WIDTHS = [100, 128, 256]
HEADS = 4
ROUNDS = 15


def power_law(num_nodes: int, num_edges: int) -> Graph:
    """Return a random graph whose degrees follow a power law."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_nodes, generator=generator)
    src, dst = (
        order[(num_nodes * torch.rand(num_edges, generator=generator) ** 2.2).long()]
        for _ in range(2)
    )
    return Graph.from_edges(src, dst, num_nodes)


Step = Callable[[Tensor], Tensor]


def forward_and_backward(steps: list[Step], rows: list[Tensor], grads: list[Tensor]) -> None:
    """Call each step on its rows, and propagate a gradient back to them."""
    for step, x, grad in zip(steps, rows, grads, strict=True):
        x.grad = None
        step(x).backward(grad)


def random_grads(steps: list[Step], rows: list[Tensor]) -> list[Tensor]:
    """Return a gradient for the output of each step."""
    return [torch.randn_like(step(x.detach())) for step, x in zip(steps, rows, strict=True)]


def mean_methods(blocks: list[Block]) -> dict[str, list[Step]]:
    """Return, for each method, the functions that compute the mean over each block."""
    dgl = import_dgl()
    scales = [1 / block.indptr.diff().clamp(min=1).float() for block in blocks]

    def ours(block: Block, scale: Tensor, x: Tensor) -> Tensor:
        return aggregate(block.indptr, block.indices, x, None, scale)

    def ours_new_blocks(block: Block, scale: Tensor, x: Tensor) -> Tensor:
        return ours(replace(block, indices=block.indices.detach()), scale, x)

    matrices = [
        torch.sparse_csr_tensor(
            block.indptr,
            block.indices.long(),
            scale.repeat_interleave(block.indptr.diff()),
            (block.num_dst, block.num_src),
            check_invariants=False,  # the ids of a row are not sorted
        )
        for block, scale in zip(blocks, scales, strict=True)
    ]
    return {
        "gcnzc": [partial(ours, *pair) for pair in zip(blocks, scales, strict=True)],
        "gcnzc, new blocks": [
            partial(ours_new_blocks, *pair) for pair in zip(blocks, scales, strict=True)
        ],
        "dgl": [partial(dgl.ops.copy_u_mean, dgl_block(dgl, block)) for block in blocks],
        "torch.sparse": [partial(torch.matmul, matrix) for matrix in matrices],
    }


def attention_methods(blocks: list[Block], scores: list[Tensor]) -> dict[str, list[Step]]:
    """Return, for each method, the functions that compute GAT attention as DGL's GATConv does."""
    dgl = import_dgl()

    def ours(block: Block, score: Tensor, x: Tensor) -> Tensor:
        x = x.view(block.num_src, HEADS, -1)
        target = score[: block.num_dst]
        return gat_aggregate(block.indptr, block.indices, x, score, target, self_loops=False)

    def ours_new_blocks(block: Block, score: Tensor, x: Tensor) -> Tensor:
        return ours(replace(block, indices=block.indices.detach()), score, x)

    def theirs(block: Any, score: Tensor, x: Tensor) -> Tensor:
        x = x.view(block.num_src_nodes(), HEADS, -1)
        wide = score[:, :, None]
        edges = dgl.ops.u_add_v(block, wide, wide[: block.num_dst_nodes()])
        weight = dgl.ops.edge_softmax(block, torch.nn.functional.leaky_relu(edges, 0.2))
        return dgl.ops.u_mul_e_sum(block, x, weight)

    made = [dgl_block(dgl, block) for block in blocks]
    return {
        "gcnzc": [partial(ours, *pair) for pair in zip(blocks, scores, strict=True)],
        "gcnzc, new blocks": [
            partial(ours_new_blocks, *pair) for pair in zip(blocks, scores, strict=True)
        ],
        "dgl": [partial(theirs, *pair) for pair in zip(made, scores, strict=True)],
    }


def dgl_block(dgl: Any, block: Block) -> Any:
    """Return a block as a DGL block with int64 ids, since DGL's int32 blocks are corrupt."""
    edges = torch.arange(block.num_edges)
    return dgl.create_block(
        ("csc", (block.indptr, block.indices.long(), edges)),
        num_src_nodes=block.num_src,
        num_dst_nodes=block.num_dst,
    )


def check(methods: dict[str, list[Step]], rows: list[Tensor], grads: list[Tensor]) -> None:
    """Raise AssertionError unless all methods compute the same outputs and gradients."""
    results = {}
    for method, steps in methods.items():
        forward_and_backward(steps, rows, grads)
        outs = [step(x.detach()).detach() for step, x in zip(steps, rows, strict=True)]
        results[method] = outs + [x.grad for x in rows]
    for method, parts in results.items():
        for ours, theirs in zip(results["gcnzc"], parts, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=method)


def compare(what: str, methods: dict[str, Any], rows: list[Tensor], case: dict[str, Any]) -> None:
    """Time all methods, interleaved, and record each with its time relative to gcnzc's."""
    grads = random_grads(methods["gcnzc"], rows)
    check(methods, rows, grads)
    calls = {
        method: partial(forward_and_backward, steps, rows, grads)
        for method, steps in methods.items()
    }
    timings = side_by_side(calls, ROUNDS)
    ours = timings["gcnzc, new blocks"].median_s
    for method, timing in timings.items():
        times = timing.median_s / ours
        record(
            "aggregate_cpu", {"what": what, "way": method} | case, timing, times_new_blocks=times
        )


def edge_cost(blocks: list[Block]) -> None:
    """Time a mean and a linear layer on the outermost block, forward and backward."""
    block = blocks[0]
    for width in WIDTHS:
        x = torch.randn(block.num_src, width, requires_grad=True)
        linear = torch.nn.Linear(width, width, bias=False)
        scale = 1 / block.indptr.diff().clamp(min=1).float()
        sums = [lambda x: aggregate(block.indptr, block.indices.detach(), x, None, scale)]  # noqa: B023
        methods = {
            "sum": partial(forward_and_backward, sums, [x], random_grads(sums, [x])),
            "map": partial(forward_and_backward, [linear], [x], random_grads([linear], [x])),
        }
        timings = side_by_side(methods, ROUNDS)
        sum_s = timings["sum"].median_s / (block.num_edges * width)
        map_s = timings["map"].median_s / (block.num_src * width * width)
        case = {"what": "edge cost", "columns": width, "edges": block.num_edges}
        record("aggregate_cpu", case, multiplications=sum_s / map_s)


def main() -> None:
    """Measure every method on every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edge-cost", action="store_true", help="measure EDGE_COST instead")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    graph = power_law(NUM_NODES, NUM_EDGES)
    seeds = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(1))[:BATCH_SIZE]
    blocks = list(Sampler(graph, FANOUTS).sample(seeds, epoch=0).blocks)
    if options.edge_cost:
        return edge_cost(blocks)
    for width in WIDTHS:
        rows = [torch.randn(block.num_src, width, requires_grad=True) for block in blocks]
        case = {"columns": width, "edges": sum(block.num_edges for block in blocks)}
        compare("mean", mean_methods(blocks), rows, case)
        scores = [torch.randn(block.num_src, HEADS, requires_grad=True) for block in blocks]
        compare("attention", attention_methods(blocks, scores), rows, case | {"heads": HEADS})


if __name__ == "__main__":
    main()
