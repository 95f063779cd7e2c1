"""PCIe reports: predicted traffic of tables, and measurements on a real or simulated GPU."""

import json
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, FakeGpu
from PIL import Image
from tiny_graph import tiny

from bench.loading import pcie as bench_pcie
from gcnzc.cli.plots import Efficiencies, efficiencies
from gcnzc.cli.reports import pcie as reports_pcie
from gcnzc.datasets import catalog
from gcnzc.features import registrations
from gcnzc.features.pcie_traffic import table_traffic, traffic
from gcnzc.features.table import FeatureTable
from gcnzc.graph import load, prepare
from gcnzc.kernels.gather.lanes import LAYOUTS
from gcnzc.kernels.gather.quantize import SCALE_COLUMNS
from gcnzc.system import nvml
from gcnzc.system.host_memory import PAGE_BYTES as PAGE
from gcnzc.system.page_lock import PageLocks
from gcnzc.tune import pcie_bench, table_shapes

UNTOLD = {
    "pcie_generation": None,
    "pcie_lanes": None,
    "pcie_bytes_per_s": None,
    "pcie_received_bytes_per_s": None,
    "pcie_sent_bytes_per_s": None,
    "pcie_replays": None,
}
REDDIT = table_shapes.Shape("reddit", 232_965, 602, "float32", 2408)


def quiet(done, total, figures=""):
    pass


class Machine:
    """A GPU that takes as long as it is told to; what it does is done on the host."""

    def __init__(self, pcie=UNTOLD):
        self.took_s = 0.0
        self.told = dict(pcie)
        self.busy = 0
        self.layouts = []
        self.chased = []

    @property
    def gpu(self):
        return pcie_bench.Gpu(torch.device("cpu"), self.seconds, self.pcie)

    def seconds(self, work):
        self.took_s = 0.001
        work()
        return self.took_s

    def pcie(self, busy):
        self.took_s = 0.0
        busy()
        return self.told

    def read_dense(self, source, out, programs):
        out.copy_(source)
        self.busy += 1
        # the more the better, up to 64; 64 take a microsecond for each kilobyte
        self.took_s = len(source) * 1e-9 * (1 + abs(programs - 64) / 64)

    def gather_rows(self, table, ids, out, *, layout):
        assert out.is_contiguous()
        out.copy_(table[ids])
        self.layouts.append(
            (layout, table.stride(0) * table.element_size(), table.data_ptr() % 128)
        )
        slower = {"scalar": 4, "vector": 3, "wrapped": 2, "shifted": 1.25, "pitched": 1}
        self.took_s = out.nbytes * 1e-9 * slower[layout]

    def chase_pointers(self, table, begin, steps, out):
        places, place, seen = table.tolist(), begin, []
        for _ in range(steps):
            seen.append(place)
            place = places[place]
        self.chased.append(seen)
        self.took_s = steps * 2e-6


@pytest.fixture
def machine(monkeypatch):
    made = Machine(UNTOLD | {"pcie_generation": 5, "pcie_lanes": 16, "pcie_bytes_per_s": 2e9})
    monkeypatch.setattr(pcie_bench, "BUSY_S", 0.01)
    for name in ("read_dense", "gather_rows", "chase_pointers"):
        monkeypatch.setattr(pcie_bench, name, getattr(made, name))
    return made


def test_rates_are_medians_of_interleaved_rounds():
    clock = iter([9, 9, 4, 1, 2, 3, 100, 2])
    called = []
    ways = {name: (8, lambda name=name: called.append(name)) for name in "ab"}

    def seconds(work):
        work()
        return next(clock)

    # a: 4, 2, 100 after the first; b: 1, 3, 2
    assert pcie_bench.measure_rates(ways, seconds, 3) == {"a": 2, "b": 4}
    assert called == ["a", "b"] * 4


def test_the_rates_of_the_bus_are_measured(machine):
    with pcie_bench._page_locked(1 << 17) as memory:
        assert memory.data_ptr() % 128 == 0
        found = pcie_bench.measure_bus(machine.gpu, memory)
    # a copy of whatever size takes a millisecond here
    assert found["copies"] == {str(1 << 17): pytest.approx((1 << 17) / 0.001)}
    assert found["copy_bytes_per_s"] == found["copies"][str(1 << 17)]
    assert found["dense_programs"] == 64
    assert found["dense_bytes_per_s"] == pytest.approx(1e9)
    assert found["dense"].keys() == {"2", "16", "64", "128", "256"}
    assert found["latency_s"] == pytest.approx(2e-6)
    assert found["requests_in_flight"] == pytest.approx(2e-6 * 1e9 / 128)
    assert found["pcie_lanes"] == 16
    # the counters were read during enough work
    assert machine.busy >= 5 * (pcie_bench.ROUNDS + 1) + int(pcie_bench.BUSY_S * 1e9 / (1 << 17))


def test_the_bus_is_measured_with_a_driver_that_locks_little_at_a_time(machine, monkeypatch):
    driver = FakeDriver(largest=8 * PAGE)
    ledger = PageLocks(driver, min_bytes=PAGE)
    monkeypatch.setattr(registrations, "process_page_locks", lambda: ledger)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(pcie_bench, "default_programs", lambda device: 2)
    monkeypatch.setattr(
        pcie_bench, "read_dense", lambda source, out, programs: setattr(machine, "took_s", 1e-3)
    )
    with FakeGpu(driver) as gpu, pcie_bench._page_locked(1 << 17) as memory:
        assert len(driver.ranges) > 3
        where = pcie_bench.Gpu(torch.device("cuda"), machine.seconds, machine.pcie)
        found = pcie_bench.measure_bus(where, memory)
    assert found["copies"].keys() == {str(1 << 17)}
    assert sum(num_bytes for _, num_bytes in gpu.copied) == (pcie_bench.ROUNDS + 1) * (1 << 17)


def test_a_pointer_chase_reads_no_line_twice(machine):
    with pcie_bench._page_locked(1 << 18) as memory:
        pcie_bench.measure_bus(machine.gpu, memory)
    assert len(machine.chased) == pcie_bench.ROUNDS
    places = [place for seen in machine.chased for place in seen]
    assert len(places) > 1000
    assert len({place // 16 for place in places}) == len(places)
    # a jump is no step to the next line, which something may fetch ahead
    jumps = np.diff(machine.chased[0])
    assert np.mean(np.abs(jumps) > 16) > 0.9


def test_the_layouts_of_a_table_are_measured(machine):
    shape = table_shapes.Shape("x", 10, 25, "float32", 104, 20)
    with pcie_bench._page_locked(1 << 18) as memory:
        memory.view(torch.int32).copy_(torch.arange(1 << 16))
        rates = pcie_bench.measure_layouts(machine.gpu, memory, shape)
    assert rates == {
        layout: pytest.approx(1e9 / slower)
        for layout, slower in zip(LAYOUTS, (4, 3, 2, 1.25, 1), strict=True)
    }
    places = {layout: (stride, base) for layout, stride, base in machine.layouts}
    assert places == dict.fromkeys(LAYOUTS, (104, 20)) | {"pitched": (128, 0)}


def test_wrong_rows_are_reported(machine, monkeypatch):
    def wrong(table, ids, out, *, layout):
        out.copy_(table[ids])
        if layout == "wrapped":
            out[3, 7] += 1

    monkeypatch.setattr(pcie_bench, "gather_rows", wrong)
    with (
        pcie_bench._page_locked(1 << 16) as memory,
        pytest.raises(RuntimeError, match=r"(?s)wrapped gather of rows of 2408.*hint: "),
    ):
        pcie_bench.measure_layouts(machine.gpu, memory, REDDIT)


def test_memory_too_small_for_a_row_is_rejected(machine):
    with (
        pcie_bench._page_locked(1024) as memory,
        pytest.raises(ValueError, match=r"(?s)1024 bytes of memory.*hint: increase --megabytes"),
    ):
        pcie_bench.measure_layouts(machine.gpu, memory, REDDIT)


def test_a_report_has_predictions_and_measurements(machine):
    found = pcie_bench.report([REDDIT], machine.gpu, num_bytes=1 << 17, advance=quiet)
    assert json.loads(json.dumps(found)) == found
    (table,) = found["tables"]
    figures = table["layouts"]["shifted"]
    assert figures["payload_bytes_per_s"] == pytest.approx(0.8e9)
    assert figures["share_of_dense"] == pytest.approx(0.8)
    assert figures["share_of_copy"] == pytest.approx(0.8e9 / found["link"]["copy_bytes_per_s"])
    # headers count
    assert figures["share_of_link"] == pytest.approx(0.8e9 / 2e9 / figures["efficiency"])
    told = reports_pcie.format_report(found)
    assert "PCIe 5 with 16 lanes carries 2.0 GB/s" in told[0]
    assert "a load takes 2.00 us, so 16 requests" in told[0]
    shown = next(line for line in told if line.startswith("shifted"))
    assert "19.75" in shown
    assert "80.0%" in shown
    assert len({len(line) for line in told[2:8]}) == 1  # columns


def sweep_to_2_kib(*arguments):
    """The predictions for some of the row sizes."""
    return table_shapes.sweep(*arguments, max_row_bytes=2048)


def test_a_single_table_of_any_dtype_is_measured(machine, monkeypatch):
    monkeypatch.setattr(reports_pcie, "sweep", sweep_to_2_kib)
    half = table_shapes.Shape("half", 5, 602, "float16", 1204)
    found = pcie_bench.report([half], machine.gpu, num_bytes=1 << 17, advance=quiet)
    assert found["tables"][0]["layouts"]["shifted"]["share_of_dense"] == pytest.approx(0.8)
    shares = reports_pcie.efficiency_points(found)
    assert shares.dtype == "float16"
    assert len(shares.curves["vector"]) == (2048 - 4) // 2 + 1


def test_a_report_without_values_of_nvml(machine):
    machine.told = dict(UNTOLD)
    found = pcie_bench.report([REDDIT], machine.gpu, num_bytes=1 << 17, advance=quiet)
    assert found["tables"][0]["layouts"]["shifted"]["share_of_link"] is None
    assert "PCIe" not in reports_pcie.format_report(found)[0]


def test_of_several_tables_only_distinct_float32_shapes_are_measured(machine):
    tables = [
        REDDIT,
        table_shapes.Shape("half", 5, 602, "float16", 1204),
        table_shapes.Shape("again", 7, 602, "float32", 2408),
        table_shapes.Shape("apart", 7, 602, "float32", 2432),
    ]
    steps = []
    found = pcie_bench.report(
        tables,
        machine.gpu,
        num_bytes=1 << 17,
        widths=[4, 400],
        advance=lambda done, total, figures="": steps.append((done, total)),
    )
    measured = ["share_of_dense" in table["layouts"]["vector"] for table in found["tables"]]
    assert measured == [True, False, True, True]
    # two shapes, checked once, then in rounds
    assert len(machine.layouts) == 2 * 5 * (pcie_bench.ROUNDS + 2)
    assert steps == [(n, 4) for n in range(5)]
    assert [row["row_bytes"] for row in found["widths"]] == [4, 400]
    told = reports_pcie.format_report(found)
    assert len(told) == 2 + len(tables)
    assert told[2].endswith("0.80 GB/s, 80.0% of dense")
    shares = reports_pcie.efficiency_points(found)
    assert shares.dtype == "float32"
    assert shares.curves.keys() == shares.measured.keys() == set(LAYOUTS)
    assert len(shares.curves["vector"]) == (8192 - 4) // 4 + 1
    assert shares.measured["shifted"] == [(2408, pytest.approx(0.8 * 128 / 148))] * 3


@pytest.mark.triton
def test_a_report_runs_the_real_kernels(device):
    """On a GPU, or under Triton's interpreter."""
    where = pcie_bench.Gpu(device, a_millisecond, lambda busy: UNTOLD)
    shape = table_shapes.Shape("x", 100, 101, "float32", 404, 4)
    with pytest.MonkeyPatch.context() as patch:
        # an interpreter takes milliseconds for what a GPU does in nothing
        patch.setattr(pcie_bench, "PROGRAMS", (1,))
        patch.setattr(pcie_bench, "measure_rates", lambda ways, seconds: once(ways, seconds))
        found = pcie_bench.report([shape], where, num_bytes=1 << 14, advance=quiet)
    assert found["link"]["dense_bytes_per_s"] > 0
    assert all(figures["share_of_dense"] > 0 for figures in found["tables"][0]["layouts"].values())


def a_millisecond(work):
    work()
    return 1e-3


def once(ways, seconds):
    return {name: num_bytes / seconds(work) for name, (num_bytes, work) in ways.items()}


@pytest.mark.gpu
def test_a_report_on_a_gpu(device):
    found = pcie_bench.report([REDDIT], pcie_bench.current_gpu(), num_bytes=1 << 28, advance=quiet)
    dense = found["link"]["dense_bytes_per_s"]
    assert 1e9 < dense < 1e12
    assert 1e-7 < found["link"]["latency_s"] < 1e-4
    for figures in found["tables"][0]["layouts"].values():
        assert 0 < figures["share_of_dense"] < 1.1
    assert pcie_bench.peak_read_rate(device) == pytest.approx(dense, rel=0.3)


def test_the_peak_read_rate_is_measured(machine, monkeypatch):
    monkeypatch.setattr(pcie_bench, "ROOF_BYTES", 1 << 16)
    assert pcie_bench.peak_read_rate(torch.device("cpu")) is None
    assert pcie_bench._dense_peak(machine.gpu) == pytest.approx(1e9)

    def refuse(num_bytes):
        raise RuntimeError(f"CUDA failed to lock {num_bytes} bytes")

    monkeypatch.setattr(pcie_bench, "_page_locked", refuse)
    assert pcie_bench.peak_read_rate(torch.device("cuda")) is None


def test_there_is_no_peak_read_rate_if_the_gpu_cannot_read_host_memory(machine, monkeypatch):
    page_locks = PageLocks(FakeDriver(maps=False))
    monkeypatch.setattr(registrations, "process_page_locks", lambda: page_locks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(pcie_bench, "ROOF_BYTES", 1 << 16)
    monkeypatch.setattr(pcie_bench, "_cuda", lambda device: machine.gpu)

    def reject(memory, out, programs):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(pcie_bench, "read_dense", reject)
    assert pcie_bench.peak_read_rate(torch.device("cuda")) is None


def test_a_report_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pcie_bench.current_gpu() is None
    found = pcie_bench.report([REDDIT], None, num_bytes=1 << 40, advance=quiet)
    assert found["link"] is None
    told = reports_pcie.format_report(found)
    assert told[0].startswith("no CUDA device")
    assert any("1.43 times as many" in line for line in told)
    # columns, and no figure that was not measured
    assert len({len(line) for line in told[2:8]}) == 1
    assert not any("GB/s" in line for line in told)
    assert not any(reports_pcie.efficiency_points(found).measured.values())


def with_compiled(found, **differs):
    """Add what compiled kernels request: as predicted, or one request more where `differs`."""
    for table in found["tables"]:
        for layout, figures in table["layouts"].items():
            names = ("requests_per_row", "read_bytes_per_row", "wire_bytes_per_row")
            model = {name: figures[name] for name in names}
            figures["compiled"] = compiled = {"sampled_rows": 32, "model": model}
            for arch in ("sm_80", "sm_90"):
                more = int(differs.get(layout) == arch)
                compiled[arch] = {name: value + more for name, value in model.items()}
                compiled[arch]["equals_model"] = not more
    return found


def test_requests_of_compiled_kernels_are_listed_beside_the_model():
    report = pcie_bench.report([REDDIT], None, num_bytes=1 << 17, advance=quiet)
    without = reports_pcie.format_report(report)
    lines = reports_pcie.format_report(with_compiled(report))
    assert lines[: len(without)] == without
    title, _, *rows, summary = lines[len(without) :]
    assert "for 32 rows" in title
    assert [row.split()[-4] for row in rows] == ["model", "sm_80", "sm_90"] * len(LAYOUTS)
    assert rows[9].split() == ["shifted", "model", "19.75", "2432.0", "2827.0"]
    assert rows[10].split() == ["sm_80", "19.75", "2432.0", "2827.0"]
    assert summary.endswith("predicts, with every layout, for sm_80 and sm_90")


def test_other_requests_of_a_compiled_kernel_are_a_warning():
    report = pcie_bench.report([REDDIT], None, num_bytes=1 << 17, advance=quiet)
    lines = reports_pcie.format_report(with_compiled(report, shifted="sm_90"))
    assert [line.split()[0] for line in lines if line.endswith("differs")] == ["sm_90"]
    assert lines[-1] == (
        "warning: reddit float32, shifted: compiled for sm_90, the gather makes 20.75 requests and "
        "2828.0 B on the bus per row; the model predicts 19.75 requests and 2827.0 B on the bus "
        "per row"
    )
    # of several tables, one line each
    report = pcie_bench.report([REDDIT, REDDIT], None, num_bytes=1 << 17, advance=quiet)
    lines = reports_pcie.format_report(with_compiled(report, scalar="sm_80"))
    assert [line.endswith("differs: scalar sm_80") for line in lines[2:4]] == [True, True]
    assert [line.startswith("warning: reddit") for line in lines[4:]] == [True, True]
    report = pcie_bench.report([REDDIT, REDDIT], None, num_bytes=1 << 17, advance=quiet)
    lines = reports_pcie.format_report(with_compiled(report))
    assert all(line.endswith("compiled: equal") for line in lines[2:4])
    assert len(lines) == 5


class NVMLError(Exception):
    pass


def library(**broken):
    """Stands for pynvml; what is broken fails."""

    def answer(name, value):
        def call(*arguments):
            if name in broken:
                raise NVMLError
            return value(*arguments) if callable(value) else value

        return call

    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-abc": "handle"}[uuid],
        "nvmlDeviceGetCurrPcieLinkGeneration": 4,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlSystemGetDriverVersion": "570.1",
        "nvmlDeviceGetPcieThroughput": lambda _, counter: {7: 13_000_000, 6: 500_000}[counter],
        "nvmlDeviceGetPcieReplayCounter": 0,
    }
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_PCIE_UTIL_RX_BYTES=7,
        NVML_PCIE_UTIL_TX_BYTES=6,
        **{name: answer(name, value) for name, value in answers.items()},
    )


@pytest.fixture
def uuid(monkeypatch):
    found = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_values_of_nvml_are_read(uuid, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library())
    done = []
    found = nvml.pcie(torch.device("cuda"), lambda: done.append(1))
    assert done == [1]
    assert found == {
        "pcie_generation": 4,
        "pcie_lanes": 8,
        "pcie_bytes_per_s": pytest.approx(8 * 1.969e9, rel=1e-3),
        "pcie_received_bytes_per_s": 13e9,
        "pcie_sent_bytes_per_s": 0.5e9,
        "pcie_replays": 0,
    }


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        ("nvmlInit", set(UNTOLD)),
        ("nvmlDeviceGetHandleByUUID", set(UNTOLD)),
        ("nvmlDeviceGetCurrPcieLinkGeneration", {"pcie_generation", "pcie_bytes_per_s"}),
        ("nvmlDeviceGetCurrPcieLinkWidth", {"pcie_lanes", "pcie_bytes_per_s"}),
        (
            "nvmlDeviceGetPcieThroughput",
            {"pcie_received_bytes_per_s", "pcie_sent_bytes_per_s"},
        ),
        ("nvmlDeviceGetPcieReplayCounter", {"pcie_replays"}),
        ("nvmlShutdown", set()),
    ],
)
def test_missing_values_of_nvml_are_none(broken, lost, uuid, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**{broken: True}))
    found = nvml.pcie(torch.device("cuda"), lambda: None)
    assert {name for name, value in found.items() if value is None} == lost


def test_a_missing_nvml_gives_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.pcie(torch.device("cuda"), lambda: None) == UNTOLD
    assert set(nvml.slot(torch.device("cuda")).values()) == {None}


def test_the_pcie_slot_of_a_device_is_read(uuid, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library())
    found = nvml.slot(torch.device("cuda"))
    assert found == {"pcie_generation": 5, "pcie_lanes": 8, "driver": "570.1"}
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlInit=True))
    assert set(nvml.slot(torch.device("cuda")).values()) == {None}


def test_a_prepared_table_has_its_pitch(tmp_path):
    raw = tiny(num_nodes=64, num_columns=25).write(tmp_path / "raw")
    prepare.prepare(raw, tmp_path / "packed")
    prepare.prepare(raw, tmp_path / "apart", pitch_bytes=136, feature_dtype="float16")
    packed, apart = (table_shapes.shape_of(tmp_path / name) for name in ("packed", "apart"))
    assert (packed.num_rows, packed.num_columns, packed.dtype) == (64, 25, "float32")
    assert (packed.row_bytes, packed.stride_bytes) == (100, 100)
    assert (apart.row_bytes, apart.stride_bytes, apart.dtype) == (50, 136, "float16")
    for shape, name in ((packed, "packed"), (apart, "apart")):
        rows = load.load(tmp_path / name).features
        assert rows is not None
        assert shape.base == rows.data_ptr() % 128
        # as many rows are whole periods of these strides
        told = table_shapes.predict_traffic(shape)["layouts"]["shifted"]
        there = table_traffic(rows, layout="shifted")
        assert told["requests_per_row"] == float(there.requests_per_row)
        assert told["wire_bytes_per_row"] == float(there.wire_bytes)


def test_the_base_is_the_offset_of_the_first_row_in_its_line(tmp_path, monkeypatch):
    prepare.prepare(tiny(num_columns=25).write(tmp_path / "raw"), tmp_path / "packed")
    memory = torch.zeros(2000)
    before = (96 - memory.data_ptr()) % 128 // 4
    rows = memory[before : before + 1000].view(40, 25)
    found = SimpleNamespace(table=FeatureTable(rows))
    monkeypatch.setattr(load, "load", lambda path, **options: found)
    assert table_shapes.shape_of(tmp_path / "packed").base == 96


def test_quantized_rows_have_one_byte_per_element(tmp_path):
    raw = tiny(num_columns=30).write(tmp_path / "raw")
    prepare.prepare(raw, tmp_path / "a", feature_dtype="float8_e5m2", pitch_bytes=0)
    assert table_shapes.shape_of(tmp_path / "a") == table_shapes.Shape(
        "raw", 40, 30, "float8_e5m2", 30, has_scales=True
    )
    prepare.prepare(raw, tmp_path / "b", feature_dtype="int8", scales="columns", pitch_bytes=0)
    found = table_shapes.shape_of(tmp_path / "b")
    assert (found.has_scales, found.scale_columns) == (True, SCALE_COLUMNS)


def test_rows_of_a_raw_folder_are_contiguous(tmp_path):
    raw = tiny(num_columns=30).write(tmp_path / "raw")
    assert table_shapes.shape_of(raw) == table_shapes.Shape("raw", 40, 30, "float32", 120)


def test_a_folder_without_features_is_rejected(tmp_path):
    raw = tiny().but(features=None).write(tmp_path / "raw")
    with pytest.raises(ValueError, match=r"(?s)no features.*hint: `gcnzc embed"):
        table_shapes.shape_of(raw)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_features_are_rejected(shared_data, tmp_path):
    source = next(path for path in sorted(shared_data.glob("*/cora.npz")))
    prepare.prepare(source, tmp_path / "sparse", sparse_features=True)
    with pytest.raises(ValueError, match=r"(?s)has sparse features.*hint: "):
        table_shapes.shape_of(tmp_path / "sparse")


def test_public_tables_are_listed_in_two_dtypes():
    found = table_shapes.public_shapes()
    assert {shape.name for shape in found} == {
        entry.name for entry in catalog.ENTRIES if entry.num_features
    }
    products = [shape for shape in found if shape.name == "ogbn-products"]
    assert [shape.row_bytes for shape in products] == [400, 200]


def test_traffic_is_predicted_for_each_layout():
    told = table_shapes.predict_traffic(REDDIT, 64)
    assert json.loads(json.dumps(told)) == told
    for layout, figures in told["layouts"].items():
        wanted = traffic(2408, layout=layout, split_bytes=64)
        assert figures["requests_per_row"] == float(wanted.requests_per_row)
        assert figures["efficiency"] == float(wanted.efficiency)
        assert sum(figures["requests"].values()) == pytest.approx(figures["requests_per_row"])
    assert told["layout"] == told["prepared_layout"] == "shifted"
    assert told["layouts"]["pitched"]["memory"] == pytest.approx(2432 / 2408 - 1)
    assert told["layouts"]["shifted"]["memory"] == 0
    assert told["why"].endswith(
        "too few; with lanes from the row's start there would be 1.43 times as many"
    )
    # on lines as it lies, though it would be stored otherwise
    apart = table_shapes.predict_traffic(table_shapes.Shape("x", 1, 100, "float32", 512))
    assert (apart["layout"], apart["prepared_layout"], apart["pitch_bytes"]) == (
        "pitched",
        "shifted",
        400,
    )
    assert apart["why"].endswith("there would be as many")


def test_roofs_are_the_efficiencies_of_uniform_requests():
    assert list(table_shapes.roofs().values()) == [
        float(Fraction(128, 148)),
        float(Fraction(32, 52)),
    ]
    assert list(table_shapes.roofs(64).values()) == [
        float(Fraction(128, 168)),
        float(Fraction(32, 52)),
    ]


def test_the_plot_is_written(tmp_path):
    curves = table_shapes.sweep("float32", max_row_bytes=2048)
    assert curves["vector"][3] == (16, float(traffic(16, layout="vector").efficiency))
    halves = table_shapes.sweep("float16", max_row_bytes=64)
    assert halves["scalar"][7] == (18, float(traffic(18, layout="scalar", item_bytes=2).efficiency))
    shades = {}
    for name, points in (("model", {}), ("measured", {"shifted": [(400, 0.3), (1200, 0.2)]})):
        shares = Efficiencies("float32", curves, points, table_shapes.roofs())
        efficiencies(shares, tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as picture:
            shades[name] = np.asarray(picture.convert("RGB")).astype(int)
    assert shades["model"].shape == shades["measured"].shape
    panels = {}
    for name, pixels in shades.items():
        for row, half in enumerate(np.array_split(pixels[40:], 2)):
            for column, panel in enumerate(np.array_split(half, 3, axis=1)):
                panels[name, 3 * row + column] = panel
    # dots of three colours in each of five panels, and the measured points in one
    for number in range(5):
        for red, green, blue in ((31, 119, 180), (44, 160, 44), (255, 127, 14)):
            dots = np.abs(panels["model", number] - [red, green, blue]).sum(axis=2) < 30
            assert dots.sum() > 20, number
    changed = [
        number
        for number in range(5)
        if (panels["model", number] != panels["measured", number]).any()
    ]
    assert changed == [list(curves).index("shifted")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured.png", "model.png"]


def test_the_documented_figures_are_those_of_the_model():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks" / "bus.md").read_text()
    for rows in (bench_pcie.set_table()[2:], bench_pcie.limit_table()[2:]):
        assert "\n".join(rows) in text
