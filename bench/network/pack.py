"""Measure the time of sign encoding and decoding, relative to a copy of the same floats.

    python -m bench.network.pack [--rounds N] [--millions N ...] [--device DEVICE]

A step of sign compression encodes n float32 elements, updates the error feedback ("settle" in the
results), averages the encoded rows that all workers sent of one part, and decodes the means of all
parts. Times are relative to torch's `copy_` of n float32 elements, measured in the same rounds. On
a CPU, a copy moves 12 B per element: it reads the source, writes the destination, and first fetches
the destination's cache lines. From memory traffic alone, the expected time in copies is:

    encode               4 + 1/8 B       0.34
    encode with error    8 + 1/8 B       0.68
    settle               12 B            1.0
    decode               8 + 1/8 B       0.68
    mean of W workers    1/8 + 8/W B     0.18 of four
    encode and decode                    1.0, and 2 is the limit

The arithmetic takes longer. For 4 to 64 million elements in blocks of 4096, measured by the CPU
time of one thread on a shared Emerald Rapids Xeon, the times were 0.8, 1.1, 1.0, 0.75 and 0.25
copies, and 1.5 to 1.7 copies for encoding and decoding. Encoding in blocks of 32 takes three times
as long, since each block has its own sums.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

# Set before torch is imported: otherwise its OpenMP threads busy-wait for milliseconds after their
# work, on the cores of the next measurement.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bench.harness import record, side_by_side
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.signs import decode_signs, encode_signs, mean_of_signs, update_error_signs

WORKERS = 4
BLOCKS = (4096, 128, None)
THREADS = 2
LIMIT = 2.0  # greatest time of encoding and decoding together, in copies


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every length with every block size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="at least 2")
    parser.add_argument("--millions", type=int, nargs="+", default=[4, 16, 64], help="of 2**20")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    for millions in asked.millions:
        for block in BLOCKS:
            measure(millions << 20, block, torch.device(asked.device), asked.rounds)


def measure(n: int, block: int | None, device: torch.device, rounds: int) -> None:
    """Time the operations on vectors of n elements, interleaved, and record them."""
    timings = side_by_side(operations(n, block, device), rounds)
    copy = timings["copy"].median_s
    case = {"n": n, "block": block, "workers": WORKERS, "device": device.type}
    for operation, timing in timings.items():
        shares = {"copies": timing.median_s / copy, "elements_per_s": n / timing.median_s}
        record("pack", {"way": operation} | case, timing, **shares)
    both = timings["encode"].median_s + timings["decode"].median_s
    record(
        "pack",
        {"way": "encode and decode"} | case,
        copies=both / copy,
        median_s=both,
        within=both <= LIMIT * copy,
    )


def operations(n: int, block: int | None, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the operations of a worker's step, by their names in the results."""
    layout = BlockLayout(n, WORKERS, 1, block)
    own = layout.part_layout(0)
    values, error, out = (torch.randn(n, device=device) for _ in range(3))
    rows = torch.empty(WORKERS, layout.row_bytes, dtype=torch.uint8, device=device)
    encode_signs(values, error, None, layout, rows)
    mean = torch.empty(own.num_elements, device=device)
    return {
        "copy": lambda: out.copy_(values),
        "encode": lambda: encode_signs(values, None, None, layout, rows),
        "encode with error": lambda: encode_signs(values, error, None, layout, rows),
        "settle": lambda: update_error_signs(values, error, None, layout, rows),
        "mean": lambda: mean_of_signs(rows, own, mean),
        "decode": lambda: decode_signs(rows, layout, None, out),
    }


if __name__ == "__main__":
    sys.exit(main())
