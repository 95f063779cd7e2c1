"""Compute the table of the requests of compiled gathers."""

from bench.docs.result_tables import markdown, newest, read, table, with_source

# layouts that read unpadded rows, and the layout that they are compared with
COMPARED = ("scalar", "vector")
SHIFTED = "shifted"


@table
def compiled_bus_requests() -> str:
    """Return requests and bytes on the bus of compiled gathers, relative to the shifted layout."""
    lines = newest(read("compiled_wire"), "name", "dtype", "layout", "arch")
    archs = sorted({key[-1] for key in lines})
    rows = []
    for name, dtype in dict.fromkeys((name, dtype) for name, dtype, _, _ in lines):
        of_arch = {
            arch: {layout: lines[name, dtype, layout, arch] for layout in (*COMPARED, SHIFTED)}
            for arch in archs
        }
        counts = {
            tuple((line["requests_per_row"], line["wire_bytes_per_row"]) for line in found.values())
            for found in of_arch.values()
        }
        if len(counts) > 1:
            raise ValueError(f"the requests of {name}, {dtype} depend on the architecture")
        found = of_arch[archs[0]]
        shifted = found[SHIFTED]
        ratios = (
            f"{found[layout][key] / shifted[key]:.2f}"
            for key in ("requests_per_row", "wire_bytes_per_row")
            for layout in COMPARED
        )
        is_equal = all(line["equals_model"] for each in of_arch.values() for line in each.values())
        rows.append(
            [
                name,
                dtype,
                shifted["row_bytes"],
                f"{shifted['requests_per_row']:.2f}",
                *ratios,
                "yes" if is_equal else "no",
            ]
        )
    heads = [
        "dataset",
        "type",
        "bytes of a row",
        "requests, shifted",
        *(
            f"{what}, {layout}"
            for what in ("relative requests", "relative bus bytes")
            for layout in COMPARED
        ),
        "equal to the model",
    ]
    return with_source(
        markdown(heads, rows), lines.values(), "python -m bench.loading.compiled_pcie"
    )
