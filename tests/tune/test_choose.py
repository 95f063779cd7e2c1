"""The chosen settings are nearly the fastest for any bottleneck, and noise does not decide."""

import json
import os
import random
import time
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slow_cases import seeds
from tiny_graph import tiny

from gcnzc import load, prepare
from gcnzc.cli.commands.check import format_profile
from gcnzc.features import cache
from gcnzc.features.cache import cache_bytes
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.gather import gpu
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.loader import loader as loader_loader
from gcnzc.loader.presampling import presample
from gcnzc.tune import choose, machine, pcie_bench, profiles, search
from gcnzc.tune.choose import CacheMemory
from gcnzc.tune.machine import Case, LoaderSettings

CPU = torch.device("cpu")
CORES = 8


def quiet(what, done, total):
    pass


def case(row_bytes=512, num_rows=2000, is_real=True, **changes):
    chooser = torch.Generator().manual_seed(1)
    # some nodes are asked for much more often than others
    src = (torch.rand(8 * num_rows, generator=chooser) ** 3 * num_rows).long()
    dst = torch.randint(num_rows, (8 * num_rows,), generator=chooser)
    graph = Graph.from_edges(src, dst, num_rows)
    memory = torch.randn(num_rows * row_bytes // 4 + 64, generator=chooser)
    begin = -memory.data_ptr() % 128 // 4
    rows = memory[begin : begin + num_rows * row_bytes // 4].view(num_rows, row_bytes // 4)
    seeds = torch.randperm(num_rows, generator=chooser)[:400]
    made = Case("some", graph, FeatureTable(rows), seeds, None, (3, 3), 64, is_real=is_real)
    return replace(made, **changes)


@dataclass
class Device:
    """The model of a machine with a GPU: seconds follow from rates, and are noisy."""

    read_bytes_per_s: float = 25e9  # that the link gives to the GPU's own reads
    latency_s: float = 1e-6  # of a read, hence bytes on their way bound too
    copy_bytes_per_s: float = 25e9
    both_bytes_per_s: float = 25e9  # of both engines together
    host_bytes_per_s: float = 5e9  # that a thread gathers
    sample_s: float = 0.001  # of a thread
    noise: float = 0.01
    seed: int = 0
    batch_bytes: int = 1 << 26
    has_gpu: bool = True

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.asked = []

    def noisy(self, seconds):
        # now and then stop other programs
        burst = 3 if self.random.random() < 0.05 else 1
        return seconds * burst * float(np.exp(self.random.normal() * self.noise))

    def true_gather_s(self, way):
        in_flight = way.programs * way.warps * 32 * way.vectors * 16
        return self.batch_bytes / min(self.read_bytes_per_s, in_flight / self.latency_s)

    def true_batch_s(self, loading):
        share = loading.copied_share
        host_s = share * self.batch_bytes / self.host_bytes_per_s
        made_s = (self.sample_s + host_s) / min(loading.threads, CORES)
        read_s = (1 - share) * self.true_gather_s(loading.kernel_config)
        copy_s = share * self.batch_bytes / self.copy_bytes_per_s
        return max(made_s, read_s, copy_s, self.batch_bytes / self.both_bytes_per_s)

    def gather_s(self, way):
        return self.noisy(self.true_gather_s(way))

    def copy_s(self):
        return self.noisy(self.batch_bytes / self.copy_bytes_per_s)

    def host_s(self, threads):
        return self.noisy(self.batch_bytes / self.host_bytes_per_s / min(threads, CORES))

    def batch_s(self, loading):
        self.asked.append(loading)
        return self.noisy(self.true_batch_s(loading))


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)


def rates(**gb_per_s):
    return {f"{name}_bytes_per_s": 1e9 * value for name, value in gb_per_s.items()}


DEVICES = {
    "bandwidth bound": {},
    "latency bound": {"latency_s": 2e-5, **rates(read=50)},
    "hopelessly latency bound": {"latency_s": 1e-3, **rates(read=50)},
    "copies faster than reads": rates(read=35, copy=55, both=55, host=15),
    "two engines add up": rates(read=20, copy=20, both=40, host=20),
    "a slow CPU": rates(read=20, copy=50, both=50, host=0.4),
    "bound by sampling": {"sample_s": 0.1, **rates(copy=50, both=50)},
    "noisy": {"noise": 0.05, **rates(both=50)},
}


@pytest.mark.parametrize("seed", seeds(5, 2))
@pytest.mark.parametrize("name", DEVICES)
def test_the_chosen_settings_are_nearly_the_fastest(name, seed):
    device = Device(**({"seed": seed} | DEVICES[name]))
    near = 1.04 + 2 * device.noise
    choices = choose.choose_kernel_config(device, CPU, quiet)
    way = KernelConfig(**{part: choice.value for part, choice in choices.items()})
    ways = [
        KernelConfig(programs, *shape) for shape in choose.SHAPES for programs in choose.PROGRAMS
    ]
    best_s = min(map(device.true_gather_s, ways))
    assert device.true_gather_s(way) <= near * best_s
    # and no more warps than what is surely as good needs
    as_good = [one for one in ways if device.true_gather_s(one) <= best_s * 1.001]
    if device.noise < search.WITHIN:
        assert way.programs * way.warps <= min(one.programs * one.warps for one in as_good)

    choices = choose.choose_loader_settings(device, way, quiet)
    loading = LoaderSettings(choices["threads"].value, choices["ahead"].value, 0.0, way)
    counts = [count for count in choose.THREADS if count <= CORES]
    by_threads = {count: device.true_batch_s(replace(loading, threads=count)) for count in counts}
    assert by_threads[loading.threads] <= near * min(by_threads.values())
    if device.noise < search.WITHIN:
        fewest = min(c for c in counts if by_threads[c] <= 1.001 * min(by_threads.values()))
        assert loading.threads <= fewest
        assert loading.ahead == loading.threads + 1

    chosen, share = choose.choose_copied_share(device, loading, CPU, quiet)
    assert chosen.copied_share == share.value
    assert chosen.ahead - chosen.threads == loading.ahead - loading.threads
    true_s = {
        (count, part / 100): device.true_batch_s(LoaderSettings(count, count + 1, part / 100, way))
        for count in counts
        for part in range(96)
    }
    assert device.true_batch_s(chosen) <= near * min(true_s.values())
    if device.noise < search.WITHIN and true_s[loading.threads, 0.0] <= min(true_s.values()):
        assert chosen == loading


def test_earlier_settings_are_fixed_for_later_ones():
    device = Device(**DEVICES["two engines add up"])
    found = choose.tune_on(device, case(), CPU, CacheMemory(None, "no"), quiet)
    values = {name: choice.value for name, choice in found.choices.items()}
    way = KernelConfig(*(values[name] for name in ("programs", "warps", "vectors")))
    assert {loading.kernel_config for loading in device.asked} == {way}
    shares = [loading for loading in device.asked if loading.copied_share]
    assert (values["threads"], values["ahead"], values["copied_share"]) in {
        (one.threads, one.ahead, one.copied_share) for one in shares
    }
    assert json.loads(json.dumps(asdict(found))) == asdict(found)
    told = format_profile(found)
    assert {line.split()[0] for line in told} >= values.keys()
    assert any("best gather: 4 x 4: " in line for line in told)
    assert profiles.save(found).exists()
    assert profiles.find(CPU, case().table) == found


def test_the_cheapest_of_the_fastest_settings_is_chosen():
    rounds = {
        1: [1.2, 1.2, 1.2, 1.2],  # always slower
        2: [1.02, 1.02, 1.02, 1.02],  # no difference
        3: [1.0, 1.0, 1.0, 1.0],
        4: [1.0, 1.0, 1.0, 1.0],
    }
    assert search.cheapest(rounds, int) == 2
    assert search.cheapest(rounds, lambda count: -count) == 4
    # slower by the median, but not in most of the rounds
    assert search.cheapest({1: [1.0, 0.9, 1.2, 1.3], 2: [1.0, 1.0, 1.0, 1.0]}, int) == 1
    assert search.cheapest({1: [1.0, 1.2, 1.2, 1.3], 2: [1.0, 1.0, 1.0, 1.0]}, int) == 2
    # slower in all rounds of a machine that itself becomes slower
    assert search.cheapest({1: [1.1, 2.2, 4.4, 8.8], 2: [1.0, 2.0, 4.0, 8.0]}, int) == 2


def test_noisy_measurements_keep_the_defaults():
    calm, wild = [1.0, 1.01, 0.99, 1.0, 1.0], [1.0, 2.0, 0.7, 1.5, 1.0]
    assert search.spread({1: calm, 2: calm}) < 0.02
    assert search.spread({1: wild, 2: wild, 3: calm}) == 0.5
    # one burst is none of the middle half
    assert search.spread({1: [1.0, 1.0, 1.0, 1.0, 9.0]}) == 0
    device = Device(noise=0.4, **DEVICES["two engines add up"])
    found = choose.tune_on(device, case(), CPU, CacheMemory(None, "no"), quiet)
    for name, usual in (("threads", 4), ("ahead", 5), ("copied_share", 0)):
        assert found.choices[name].value == usual
        assert found.choices[name].basis == "default"
        assert "stop other programs" in found.choices[name].why
        assert found.choices[name].figures["batch_s"]
        assert found.value(name) is None


def test_settings_are_measured_in_turns_and_the_warm_up_is_not_counted():
    order = []

    def seconds(setting):
        order.append(setting)
        return float(len(order))

    done = []
    taken = search.interleave("ab", seconds, 2, advance=lambda *counts: done.append(counts))
    assert order == list("ababab")
    assert taken == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert done == [(count, 6) for count in range(1, 7)]
    order.clear()
    assert len(search.interleave("a", seconds, 9, least=3, limit_s=0)["a"]) == 3
    order.clear()
    taken = search.interleave("abc", seconds, 20, shuffler=random.Random(0))
    assert [sorted(order[i : i + 3]) for i in range(0, 63, 3)] == [list("abc")] * 21
    assert len({tuple(order[i : i + 3]) for i in range(0, 63, 3)}) > 1
    assert {len(values) for values in taken.values()} == {20}


def test_without_a_gpu_its_settings_are_default():
    bench = machine.Machine(case(), CPU, None)
    choices = choose.choose_kernel_config(bench, CPU, quiet)
    same, share = choose.choose_copied_share(bench, LoaderSettings(1, 2), CPU, quiet)
    assert same == LoaderSettings(1, 2)
    for choice in (*choices.values(), share):
        assert choice.basis == "default"
        assert choice.why.startswith("not measured: no GPU")


def test_memory_limits_the_number_of_cached_rows():
    mine = case()
    counted = presample(mine.graph, mine.seeds, mine.fanouts, mine.batch_size)
    for num_cached in (1, 700, 2000):
        for more in (0, 511):
            room = CacheMemory(cache_bytes(mine.table, num_cached) + more, "so much")
            choice = choose.choose_cache_size(mine, room, quiet)
            assert round(choice.value * 2000) == num_cached
            assert choice.basis == "predicted"
            assert cache.num_rows_to_cache(mine.table, choice.value) == num_cached
            assert choice.figures["chosen_hit_rate"] == counted.hit_rates([num_cached])[0]
            assert choice.figures["chosen_memory_bytes"] <= room.memory_bytes
    assert "all rows fit" in choice.why
    little = CacheMemory(cache_bytes(mine.table, 1) - 1, "too little")
    short = choose.choose_cache_size(mine, little, quiet)
    assert short.basis == "default"
    assert "no row fits" in short.why


@pytest.fixture
def loaders(monkeypatch):
    """The settings of all loaders that are made."""
    given = []

    def loader(*values, **options):
        made = original(*values, **options)
        given.append(options | {"made": made})
        return made

    original = loader_loader.Loader
    monkeypatch.setattr(machine, "Loader", loader)
    monkeypatch.setattr(machine, "MIN_MEASURED_S", 0.001)
    # these times are too short to mean anything
    monkeypatch.setattr(choose, "NOISY", float("inf"))
    return given


def test_a_profile_of_this_machine_is_measured(loaders):
    told = []
    found = choose.tune(case(), 10**6, lambda *what: told.append(what))
    assert {found.choices[name].basis for name in ("threads", "ahead")} == {"measured"}
    assert (found.rows, found.data) == (2000, "some")
    assert {what for what, _, _ in told} >= {"threads", "ahead", "cache"}
    assert all(0 < done <= total for _, done, total in told)
    batch_s = found.choices["threads"].figures["batch_s"]
    assert batch_s.keys() == {str(count) for count in choose.THREADS if count <= CORES}


def interpreted(mine):
    def seconds(work):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return machine.Machine(mine, CPU, pcie_bench.Gpu(CPU, seconds, lambda busy: {}))


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's case")
@pytest.mark.parametrize("quantized", [False, True])
def test_gpu_measurements_run_in_tritons_interpreter(quantized, loaders, monkeypatch):
    monkeypatch.setattr(choose, "SHAPES", ((2, 2), (8, 4)))
    monkeypatch.setattr(choose, "PROGRAMS", (1, 3))
    monkeypatch.setattr(search, "ROUNDS", (2, 2))
    monkeypatch.setattr(machine, "KERNEL_BATCHES", 1)
    mine = case(100, 300)
    if quantized:
        mine = replace(mine, table=FeatureTable.quantized(mine.table.rows))
    bench = interpreted(mine)
    found = choose.tune_on(bench, mine, CPU, CacheMemory(10**6, "so much"), quiet)
    assert {choice.basis for choice in found.choices.values()} == {"measured", "predicted"}
    ids = bench.host_ids[0]
    for way in bench._checked:
        bench.out.fill_(7)
        bench.gather_s(way)
        assert torch.equal(bench.out[: len(ids)], mine.table.gather(ids)), way
    assert len(bench._checked) == 4
    bench.staging.zero_()
    bench.host_s(2)
    bench.copy_s()
    assert torch.equal(bench.copied[: len(ids)], mine.table.rows[ids])


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's case")
def test_wrong_rows_are_not_timed(monkeypatch):
    bench = interpreted(case(100, 300))
    gather_rows = gpu.gather_rows

    def wrong(*given, **options):
        rows = gather_rows(*given, **options)
        rows[3, 7] += options["config"].programs == 2
        return rows

    monkeypatch.setattr(machine, "gather_rows", wrong)
    bench.gather_s(KernelConfig(programs=1))
    with pytest.raises(RuntimeError, match=r"(?s)programs=2.* returned wrong rows on cpu.*hint: "):
        bench.gather_s(KernelConfig(programs=2))


@pytest.mark.gpu
def test_a_profile_of_a_gpu_is_measured(monkeypatch):
    monkeypatch.setattr(choose, "NOISY", float("inf"))
    mine = case(400, 20_000)
    found = choose.tune(mine, 10**7, quiet)
    assert {choice.basis for choice in found.choices.values()} == {"measured", "predicted"}
    assert found.kernel_config is not None


def test_a_workload_is_made_from_a_dataset(tmp_path):
    prepare(tiny().write(tmp_path / "raw"), tmp_path / "graph")
    loaded = load(tmp_path / "graph")
    made = machine.case_of(loaded, (2, 3), 7)
    assert (made.name, made.fanouts, made.batch_size, made.is_real) == ("raw", (2, 3), 7, True)
    assert torch.equal(made.seeds, loaded.split["train"])
    # a graph whose edges are what is learned has no training nodes
    made = machine.case_of(loaded.with_nodes(split={}), (2, 3), 7)
    assert torch.equal(made.seeds, torch.arange(40))
    with pytest.raises(ValueError, match=r"(?s)raw has no features to gather.*hint: "):
        machine.case_of(loaded.with_nodes(features=None), (2,), 7)


def test_a_sparse_table_is_rejected_for_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    mine = case()
    sparse = SimpleNamespace(is_sparse=True)
    with pytest.raises(ValueError, match=r"(?s)some has sparse features.*hint: "):
        choose.tune(replace(mine, table=sparse), 0.5, quiet)
