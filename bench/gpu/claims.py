"""Tabulate the headline claims, each with what was measured, from the results of a GPU session.

    python -m bench.gpu.claims RESULTS --out claims.txt

reads the newest lines of `python -m bench.gpu.suite claims epoch epoch-large` in the folder
RESULTS, of which any may be missing, and prints the table.

A ratio is one of speeds, such as 1.8 if zero-copy is 1.8 times as fast as the other method. A claim
holds if the ratio reaches the lower end of the claimed range; otherwise the verdict is how much of
it is missing. The claims are:

- Zero-copy is 65 to 92 % faster than methods in which the CPU gathers rows, and as fast as training
  with all features in the GPU's memory, which is a ratio of at least 0.95 here. Min et al. claim
  this for epochs (VLDB 2021, https://arxiv.org/abs/2103.03330); the first is also compared with
  gathers.
- A gather transfers only the bytes that the model of PCIe traffic predicts, at the rate of a dense
  read: at least 0.9 of the rate that follows from both.

Nothing is claimed about the other lines. For pages, the column has published ratios of a table of
0.5 GiB to larger ones, which are attributed to the TLB.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcnzc.cli.output import align_columns
from gcnzc.features.pcie_traffic import traffic
from gcnzc.kernels.gather.lanes import LINE_BYTES

GIGA = 1e9
CPU_METHODS = ("CPU gather, page-locked copy", "CPU index, pageable copy")
ON_GPU = "all features on the GPU"
STAGES = ("sampling", "transfer", "compute")
# cases that are in the table even if they were not measured
SHAPES = ("ogbn-products", "ogbn-papers100M")
METHOD_COLUMNS = (100, 128)
DTYPES = ("float32", "float16", "int8")
COLUMNS = (100, 128, 602, 1024, 1433)
# of dense reads on an A100, from a table of 0.5 GiB to larger ones:
# https://github.com/NVIDIA/nvbandwidth/issues/42
PUBLISHED_FALL = "0.72 for 10 GiB, 0.66 for 20"
MOST_OF = 0.9  # of the model's rate, or of a table in huge pages

Line = dict[str, Any]


def main() -> None:
    """Tabulate the claims of the folder on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path, help="folder with the lines of bench/gpu/suite.py")
    parser.add_argument("--out", type=Path, help="file to which the table is written, too")
    options = parser.parse_args()
    text = "".join(f"{line}\n" for line in format_claims(tabulate(options.results)))
    if options.out is not None:
        options.out.write_text(text)
    print(text, end="")


def read(path: Path) -> list[Line]:
    """Return the lines of a JSON lines file; [] if there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def tabulate(results: Path) -> list[Line]:
    """Return one line for each claim: `claim`, `measured`, `ratio`, `claimed` and `verdict`.

    `ratio` is None for what was not measured, and `measured` is then the reason, if it is known.

    Args:
        results: folder of the measurements.
    """
    epochs, overlaps, methods, widths, tlb = (
        read(results / f"gpu_{part}.jsonl")
        for part in ("epoch", "overlap", "methods", "widths", "tlb")
    )
    lines: list[Line] = []
    for shape in _values(SHAPES, epochs, "shape"):
        lines += _epoch_claims(shape, epochs)
        lines.append(_overlap_claim(shape, overlaps))
    for columns in _values(METHOD_COLUMNS, methods, "columns"):
        lines += _gather_claims(columns, methods)
    for dtype in DTYPES:
        for columns in _values(COLUMNS, widths, "columns"):
            lines += _width_claims(dtype, columns, widths)
    return lines + [_page_claim(gib, tlb) for gib in _values((), tlb, "table_gib") or [None]]


def format_claims(lines: Iterable[Line]) -> list[str]:
    """Return the lines of a table of claims."""
    rows = [["claim", "measured", "ratio", "claimed", "verdict"]]
    for line in lines:
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        rows.append([line["claim"], line["measured"], ratio, line["claimed"], line["verdict"]])
    return align_columns(rows, left=(0, 1, 3, 4))


def _values(expected: Iterable[Any], lines: Iterable[Line], name: str) -> list[Any]:
    """Return the expected values of a field, and then the others that were measured."""
    return list(dict.fromkeys([*expected, *(line[name] for line in lines if name in line)]))


def _newest(lines: Iterable[Line], **case: Any) -> Line:
    """Return the newest line of a case; {} if there is none."""
    found = [line for line in lines if case.items() <= line.items()]
    return found[-1] if found else {}


def _epoch_claims(shape: str, lines: Iterable[Line]) -> list[Line]:
    found = {
        name: _newest(lines, shape=shape, model="SAGE", method=name)
        for name in ("zero-copy", *CPU_METHODS, ON_GPU, *STAGES)
    }
    own, about = found["zero-copy"], f"epoch of SAGE, {shape}: zero-copy"
    note = ""
    if "batch_s" in own:
        note = f", {own['rounds']} x {own['batches']} minibatches"
        note += "" if own["scale"] == 1 else f", graph of scale {own['scale']:g}"
    stages = [name for name in STAGES if "batch_s" in found[name]]
    slowest = max(stages, key=lambda name: found[name]["batch_s"], default="the slowest stage")
    return [
        *(_faster(f"{about} to {name}", own, found[name], note) for name in CPU_METHODS),
        _compare(f"{about} to {ON_GPU}", own, found[ON_GPU], note, "1, at least 0.95", 0.95),
        _compare(f"{about} to {slowest}", own, found.get(slowest, {}), note),
    ]


def _overlap_claim(shape: str, lines: Iterable[Line]) -> Line:
    line = _newest(lines, shape=shape, model="SAGE")
    share, measured = line.get("gather_under_compute"), line.get("outcome", "")
    if share is not None:
        measured = f"gather {line['gather_s']:.3g} s, compute {line['compute_s']:.3g} s"
    return _line(f"epoch of SAGE, {shape}: share of gather under compute", measured, share)


def _gather_claims(columns: int, lines: Iterable[Line]) -> list[Line]:
    found = {
        name: _newest(lines, columns=columns, method=name)
        for name in ("zero-copy", *CPU_METHODS, ON_GPU)
    }
    own, about = found["zero-copy"], f"gather, {columns} columns: zero-copy"
    note = f", {own['num_ids']:,} rows" if own else ""
    return [
        *(_faster(f"{about} to {name}", own, found[name], note) for name in CPU_METHODS),
        _compare(f"{about} to {ON_GPU}", own, found[ON_GPU], note),
    ]


def _width_claims(dtype: str, columns: int, lines: Iterable[Line]) -> list[Line]:
    copy = _newest(lines, dtype=dtype, columns=columns, method="copy engine")
    claims = []
    for method in ("aligned", "one element off"):
        line, claimed, least = _newest(lines, dtype=dtype, columns=columns, method=method), "", None
        if "model_efficiency" in line:
            # of the rate of a dense read, whose requests are all of 128 B
            model = line["model_efficiency"] / float(
                traffic(LINE_BYTES, layout="pitched").efficiency
            )
            model *= line["share_of_copy_engine"] / line["share_of_dense_read"]
            claimed, least = f"{model:.2f} by the model", MOST_OF * model
        name = f"gather, {columns} columns, {dtype}, {method}: to the copy engine"
        claims.append(_compare(name, line, copy, "", claimed, least))
    return claims


def _page_claim(gib: float | None, lines: Iterable[Line]) -> Line:
    small, huge = (
        _newest(lines, table_gib=gib, table_pages=pages, method="ids in random order")
        for pages in ("4 KiB", "2 MiB")
    )
    share = huge.get("huge_pages_share", 1.0)
    note = "" if share > MOST_OF else f", of which only {share:.0%} is in huge pages"
    size = "" if gib is None else f" from {gib:g} GiB"
    name = f"gather, rows of 512 B{size}: pages of 4 KiB to 2 MiB"
    return _compare(name, small, huge, note, PUBLISHED_FALL)


def _faster(claim: str, own: Line, other: Line, note: str) -> Line:
    return _compare(claim, own, other, note, "1.65 to 1.92", 1.65)


def _compare(
    claim: str,
    own: Line,
    other: Line,
    note: str = "",
    claimed: str = "",
    least: float | None = None,
) -> Line:
    """Return the line of a claim about the speed of a measured case relative to that of another."""
    speeds = [_speed(own), _speed(other)]
    if speeds[0] is None or speeds[1] is None:
        return _line(claim, own.get("outcome") or other.get("outcome", ""), None, claimed, least)
    measured = f"{_quantity(own)} and {_quantity(other)}{note}"
    return _line(claim, measured, speeds[0] / speeds[1], claimed, least)


def _speed(line: Line) -> float | None:
    return 1 / line["batch_s"] if "batch_s" in line else line.get("payload_bytes_per_s")


def _quantity(line: Line) -> str:
    if "epoch_s" in line:
        return f"{line['epoch_s']:.3g} s"
    return f"{line['payload_bytes_per_s'] / GIGA:.3g} GB/s"


def _line(
    claim: str, measured: str, ratio: float | None, claimed: str = "", least: float | None = None
) -> Line:
    if ratio is None:
        verdict = "not measured"
    elif least is None:
        verdict = "no claim"
    else:
        verdict = "holds" if ratio >= least else f"short by {1 - ratio / least:.0%}"
    return {
        "claim": claim,
        "measured": measured,
        "ratio": ratio,
        "claimed": claimed,
        "verdict": verdict,
    }


if __name__ == "__main__":
    main()
