"""`gcnzc.tune.compiled_traffic` counts the requests of compiled gathers for tables of any kind."""

import pytest
import torch

from gcnzc.features.pcie_traffic import table_traffic, traffic
from gcnzc.kernels.gather import gpu
from gcnzc.kernels.gather.lanes import LAYOUTS
from gcnzc.tune import compiled_traffic
from gcnzc.tune.compiled_traffic import compare, count_requests, sample_rows
from gcnzc.tune.pcie_bench import Shape

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def recorded_launches(ptx, monkeypatch):
    """Launches are executed, and so recorded, by the executor of the session."""

    def without_counts(**options):
        ptx.counters.clear()
        return ptx

    monkeypatch.setattr(compiled_traffic, "Executor", without_counts)


@pytest.mark.parametrize(
    "shape",
    [
        Shape("packed", 1000, 25, "float32", 100, 4),
        Shape("halves", 1000, 33, "float16", 128, 64),
        Shape("codes", 1000, 50, "int8", 50, 7, has_scales=True),
        Shape("blocks", 1000, 50, "float8_e4m3fn", 128, has_scales=True, scale_columns=16),
        Shape("doubles", 1000, 5, "float64", 40),
    ],
    ids=lambda shape: shape.name,
)
def test_compiled_gathers_make_the_predicted_requests(shape):
    for split_bytes in (64, 128):
        for layout in LAYOUTS:
            if layout == "pitched" and (shape.stride_bytes % 128 or shape.base):
                continue
            found = compare(shape, [90], split_bytes, layout=layout)
            assert found["sm_90"].pop("equals_model"), layout
            assert found["sm_90"] == found["model"]
            # the sample has the mean traffic of the whole table
            mean = traffic(
                shape.row_bytes,
                layout=layout,
                item_bytes=shape.item_bytes,
                stride_bytes=shape.stride_bytes,
                base=shape.base,
                split_bytes=split_bytes,
            )
            for name in ("requests_per_row", "wire_bytes"):
                wanted = float(getattr(mean, name))
                found_name = name if name == "requests_per_row" else "wire_bytes_per_row"
                assert found["model"][found_name] == pytest.approx(wanted)


def test_wide_rows_are_sampled_less(monkeypatch):
    monkeypatch.setattr(compiled_traffic, "SAMPLE_BYTES", 30_000)
    found = compare(Shape("wide", 10, 1999, "float32", 7996, 4), [90])
    assert found["sampled_rows"] == 3
    assert found["sm_90"]["equals_model"]


def test_other_requests_than_predicted_are_reported(monkeypatch):
    shape = Shape("x", 1000, 100, "float32", 400)
    table, ids = sample_rows(shape)
    # each row is read twice
    monkeypatch.setattr(
        compiled_traffic,
        "gather_rows",
        lambda rows, ids, **options: (
            gpu.gather_rows(rows, ids, **options),
            gpu.gather_rows(rows, ids, **options),
        )[0],
    )
    model = table_traffic(table, ids)
    counted = count_requests(table, ids, 90)
    assert counted.requests_per_row == 2 * model.requests_per_row
    assert not compare(shape, [90])["sm_90"]["equals_model"]


def test_wrong_rows_are_rejected(monkeypatch):
    monkeypatch.setattr(
        compiled_traffic,
        "gather_rows",
        lambda rows, ids, **options: torch.zeros_like(gpu.gather_rows(rows, ids, **options)),
    )
    table, ids = sample_rows(Shape("x", 1000, 100, "float32", 400))
    with pytest.raises(RuntimeError, match=r"(?s)compiled for sm_80 returned wrong rows.*hint: "):
        count_requests(table, ids, 80)
