"""A session's measurements are compared with the model, budgets and published figures."""

import json

import pytest

from bench.gpu import claims
from bench.gpu.comparison import compare, format_comparison
from bench.gpu.published import PUBLISHED, of_kind
from gcnzc.features.pcie_traffic import traffic

LINK = {"copy_bytes_per_s": 50e9, "dense_bytes_per_s": 40e9, "latency_s": 1.2e-6}


def gather(method, row_bytes, rate, dense=40e9):
    return {
        "method": method,
        "row_bytes": row_bytes,
        "num_ids": 1000,
        "payload_bytes_per_s": rate,
        "share_of_dense_read": rate / dense,
    }


@pytest.fixture
def results(tmp_path):
    def write(name, *lines):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    newest = LINK | {"gpu_state": {"pcie_generation": 5}}
    write("gpu_link.jsonl", {"dense_bytes_per_s": 1}, newest, {"outcome": "OSError: no mapping"})
    write(
        "gpu_gather.jsonl",
        gather("dense read", 2408, 40e9),
        gather("vector", 2408, 1e9),
        gather("vector", 2408, 20e9),
        gather("shifted", 1408, 30e9),
        {"method": "shifted", "row_bytes": 1408, "num_ids": 1000, "outcome": "wrong rows"},
    )
    return tmp_path


def named(lines, compared):
    return [line for line in lines if line["compared"] == compared]


def test_the_bus_is_compared_with_the_same_pcie_generation(results):
    lines = named(compare(results, [], []), "bus")
    assert {line["what"] for line in lines} == {"dense read"}
    (line,) = lines
    assert line["published_bytes_per_s"] == 35.2e9
    assert line["ratio"] == pytest.approx(40 / 35.2)
    assert line["source"].startswith("https://")


def test_gathers_are_compared_with_both_limits_of_the_model(results):
    vector, shifted = named(compare(results, [], []), "gather")
    # the newest of equal cases
    assert vector["measured_bytes_per_s"] == 20e9
    model = traffic(2408, layout="vector")
    assert vector["model_requests_per_row"] == float(model.requests_per_row)
    # a dense read has requests of 128 B, of which each takes 148 B on the bus
    assert vector["limit_by_requests"] == pytest.approx(
        40e9 / 128 / float(model.requests_per_row) * 2408
    )
    assert vector["limit_by_bytes"] == pytest.approx(40e9 * 148 / 128 * float(model.efficiency))
    assert vector["share_of_limit_by_bytes"] == 20e9 / vector["limit_by_bytes"]
    # PCIe 5 has no published gather; a row of 1408 B begins on a line and fills 11
    assert shifted["published"] == []
    assert shifted["limit_by_requests"] == pytest.approx(40e9)


def test_gathers_are_compared_with_published_gathers_of_about_the_same_width(results):
    (results / "gpu_link.jsonl").write_text(json.dumps(LINK | {"pcie_generation": 4}))
    vector, shifted = named(compare(results, [], []), "gather")
    assert vector["published"] == []
    assert [figure["row_bytes"] for figure in shifted["published"]] == [1412, 1412]
    assert shifted["published"][0]["bytes_per_s"] == pytest.approx(25.05e9, rel=1e-3)
    text = format_comparison([vector, shifted])
    assert any("25.1 GB/s of 100,000 rows of 1412 B on A100 GraphBolt" in line for line in text)


def test_kernels_are_compared_with_the_newest_budget(results):
    key = {"launch": "gather 602 float32, shifted", "kernel": "_gather_rows", "arch": 90}
    kernels = [
        key | {"registers": 70, "shared_bytes": 0, "stack_bytes": 0},
        key | {"launch": "other", "registers": 5, "shared_bytes": 1, "stack_bytes": 0},
    ]
    budgets = [key | {"registers": number, "shared_bytes": 0} for number in (60, 66)]
    budgets.append({"columns": 602, "arch": 90, "program_bytes": 12_000.0})
    lines = compare(results, kernels, budgets)
    first, second = named(lines, "kernel")
    assert (first["registers"], first["budget_registers"]) == (70, 66)
    assert second["budget_registers"] is None
    (flight,) = named(lines, "bytes in flight")
    assert flight["needed_bytes"] == pytest.approx(48_000)
    assert flight["ratio"] == pytest.approx(32 * 12 / 48)
    text = format_comparison(lines)
    titles = [line for before, line in zip(["", *text], text, strict=False) if before == ""]
    assert len([title for title in titles if title]) == 4


def test_published_figures_have_sources():
    assert all(figure.source.startswith("https://github.com/") for figure in PUBLISHED)
    assert len(of_kind("dense read", None)) > len(of_kind("dense read", 4)) > 0


CPU_GATHER, ON_GPU = "CPU gather, page-locked copy", "all features on the GPU"


def write(folder, part, *lines):
    (folder / f"gpu_{part}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def claim(lines, name):
    [found] = [line for line in lines if line["claim"] == name]
    return found["measured"], found["ratio"], found["verdict"]


def test_claims_that_were_not_measured_are_in_the_table(tmp_path):
    lines = claims.tabulate(tmp_path)
    assert {line["verdict"] for line in lines} == {"not measured"}
    # two shapes, gathers of two widths, three dtypes of five widths at two starts, and pages
    assert len(lines) == 2 * 5 + 2 * 3 + 3 * 5 * 2 + 1
    assert len(claims.format_claims(lines)) == len(lines) + 1
