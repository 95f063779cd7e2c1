"""PCIe reports: predicted traffic of tables, and measurements on a real or simulated GPU."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from fake_driver import FakeDriver, FakeGpu
from tiny_graph import tiny

from bench.docs.table import read
from bench.loading import pcie as bench_pcie
from gcnzc.cli.commands.pcie import format_report
from gcnzc.features import registrations
from gcnzc.features.pcie_traffic import traffic
from gcnzc.graph import prepare
from gcnzc.system import nvml
from gcnzc.system.host_memory import PAGE_BYTES as PAGE
from gcnzc.system.page_lock import PageLocks
from gcnzc.tune import pcie_bench
from gcnzc.tune.pcie_bench import Shape

ALL = "generation lanes bytes_per_s received_bytes_per_s sent_bytes_per_s replays"
UNTOLD = {f"pcie_{name}": None for name in ALL.split()}
REDDIT = Shape("reddit", 232_965, 602, "float32", 2408)


class Machine:
    """A GPU that takes as long as it is told to; what it does is done on the host."""

    def __init__(self, pcie=UNTOLD):
        self.took_s = 0.0
        self.told = dict(pcie)
        self.busy = 0
        self.places = []
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

    def gather_rows(self, table, ids, out):
        assert out.is_contiguous()
        out.copy_(table[ids])
        self.places.append((table.stride(0) * table.element_size(), table.data_ptr() % 128))
        self.took_s = out.nbytes * 1.25e-9

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


def test_the_gather_of_a_table_is_measured(machine):
    shape = Shape("x", 10, 25, "float32", 104, 20)
    with pcie_bench._page_locked(1 << 18) as memory:
        memory.view(torch.int32).copy_(torch.arange(1 << 16))
        rate = pcie_bench.measure_gather(machine.gpu, memory, shape)
    assert rate == pytest.approx(0.8e9)
    # checked once, then in rounds
    assert machine.places == [(104, 20)] * (pcie_bench.ROUNDS + 2)
    found = pcie_bench.report(shape, machine.gpu, num_bytes=1 << 18)
    assert found["table"]["payload_bytes_per_s"] == pytest.approx(0.8e9)
    assert found["table"]["share_of_dense"] == pytest.approx(0.8)
    assert found["table"]["share_of_link"] == pytest.approx(0.4 / found["table"]["efficiency"])


@pytest.mark.parametrize(
    ("num_bytes", "error", "message"),
    [
        (1 << 16, RuntimeError, "(?s)a gather of rows of 2408.*hint: "),
        (1024, ValueError, "(?s)1024 bytes of memory.*hint: increase --megabytes"),
    ],
)
def test_wrong_rows_and_too_little_memory_are_reported(
    num_bytes, error, message, machine, monkeypatch
):
    def wrong(table, ids, out):
        out.copy_(table[ids])
        out[3, 7] += 1

    monkeypatch.setattr(pcie_bench, "gather_rows", wrong)
    with pcie_bench._page_locked(num_bytes) as memory, pytest.raises(error, match=message):
        pcie_bench.measure_gather(machine.gpu, memory, REDDIT)


def test_without_a_table_only_the_bus_is_measured(machine):
    found = pcie_bench.report(None, machine.gpu, num_bytes=1 << 17)
    assert found["table"] is None
    assert len(format_report(found)) == 1
    assert machine.places == []


@pytest.mark.triton
def test_a_report_runs_the_real_kernels(device, monkeypatch):
    """On a GPU, or under Triton's interpreter."""
    where = pcie_bench.Gpu(device, a_millisecond, lambda busy: UNTOLD)
    shape = Shape("x", 100, 101, "float32", 404, 4)
    # an interpreter takes milliseconds for what a GPU does in nothing
    monkeypatch.setattr(pcie_bench, "PROGRAMS", (1,))
    once = functools.partial(pcie_bench.measure_rates, rounds=1)
    monkeypatch.setattr(pcie_bench, "measure_rates", once)
    found = pcie_bench.report(shape, where, num_bytes=1 << 14)
    assert found["link"]["dense_bytes_per_s"] > 0
    assert found["table"]["share_of_dense"] > 0


def a_millisecond(work):
    work()
    return 1e-3


@pytest.mark.gpu
def test_a_report_on_a_gpu(device):
    found = pcie_bench.report(REDDIT, pcie_bench.current_gpu(), num_bytes=1 << 28)
    dense = found["link"]["dense_bytes_per_s"]
    assert 1e9 < dense < 1e12
    assert 1e-7 < found["link"]["latency_s"] < 1e-4
    assert 0 < found["table"]["share_of_dense"] < 1.1
    assert pcie_bench.peak_read_rate(device) == pytest.approx(dense, rel=0.3)


def test_the_peak_read_rate_is_measured(machine, monkeypatch):
    monkeypatch.setattr(pcie_bench, "ROOF_BYTES", 1 << 16)
    assert pcie_bench.peak_read_rate(torch.device("cpu")) is None
    monkeypatch.setattr(pcie_bench, "_cuda", lambda device: machine.gpu)
    assert pcie_bench.peak_read_rate(torch.device("cuda")) == pytest.approx(1e9)


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
    found = pcie_bench.report(REDDIT, None, num_bytes=1 << 40)
    assert found["link"] is None
    lines = format_report(found)
    assert lines[0].startswith("no CUDA device")
    assert not any("GB/s" in line for line in lines)


def test_requests_of_compiled_kernels_are_listed_beside_the_model():
    found = pcie_bench.report(REDDIT, None, num_bytes=1 << 17)
    names = ("requests_per_row", "read_bytes_per_row", "wire_bytes_per_row")
    model = {name: found["table"][name] for name in names}
    found["table"]["compiled"] = {
        "sampled_rows": 32,
        "model": model,
        "sm_80": model | {"equals_model": True},
        "sm_90": {name: value + 1 for name, value in model.items()} | {"equals_model": False},
    }
    title, same, other = format_report(found)[-3:]
    assert "for 32 rows; predicted for these rows: 19.75 requests per row" in title
    assert same == "sm_80: 19.75 requests per row, 2827.0 B on the bus, as predicted"
    assert other.endswith("20.75 requests per row, 2828.0 B on the bus, warning: not as predicted")


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
        ("nvmlInit", ALL),
        ("nvmlDeviceGetHandleByUUID", ALL),
        ("nvmlDeviceGetCurrPcieLinkGeneration", "generation bytes_per_s"),
        ("nvmlDeviceGetCurrPcieLinkWidth", "lanes bytes_per_s"),
        ("nvmlDeviceGetPcieThroughput", "received_bytes_per_s sent_bytes_per_s"),
        ("nvmlDeviceGetPcieReplayCounter", "replays"),
        ("nvmlShutdown", ""),
    ],
)
def test_missing_values_of_nvml_are_none(broken, lost, uuid, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**{broken: True}))
    found = nvml.pcie(torch.device("cuda"), lambda: None)
    missing = {name for name, value in found.items() if value is None}
    assert missing == {f"pcie_{name}" for name in lost.split()}


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


def test_rows_of_a_raw_folder_are_contiguous(tmp_path):
    raw = tiny(num_columns=30).write(tmp_path / "raw")
    assert pcie_bench.shape_of(raw) == Shape("raw", 40, 30, "float32", 120)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_features_are_rejected(shared_data, tmp_path):
    source = next(path for path in sorted(shared_data.glob("*/cora.npz")))
    prepare.prepare(source, tmp_path / "sparse", sparse_features=True)
    with pytest.raises(ValueError, match=r"(?s)has sparse features.*hint: "):
        pcie_bench.shape_of(tmp_path / "sparse")


def test_the_traffic_of_a_table_is_predicted():
    found = pcie_bench.predict_traffic(REDDIT, 64)
    assert json.loads(json.dumps(found)) == found
    wanted = traffic(2408, layout="shifted", split_bytes=64)
    assert found["requests_per_row"] == float(wanted.requests_per_row)
    assert found["efficiency"] == float(wanted.efficiency)
    assert sum(found["requests"].values()) == pytest.approx(found["requests_per_row"])
    assert found["layout"] == "shifted"
    assert found["why"].endswith("too few")
    # on lines as it lies, though it would be stored otherwise
    apart = pcie_bench.predict_traffic(Shape("x", 1, 100, "float32", 512))
    assert (apart["layout"], apart["pitch_bytes"]) == ("pitched", 400)


def test_the_recorded_figures_are_those_of_the_model():
    found = [*bench_pcie.requests(), *bench_pcie.limits()]
    recorded = read("wire")
    assert len(found) == len(recorded)
    for mine, line in zip(found, recorded, strict=True):
        assert {name: line[name] for name in mine} == pytest.approx(mine)
