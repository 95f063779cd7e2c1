"""Tuning profiles are stored atomically, and found by everything that they depend on."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.system import nvml
from gcnzc.tune import profiles
from gcnzc.tune.profiles import Setting, TuningProfile

CPU = torch.device("cpu")
VALUES = {
    "programs": 64,
    "warps": 8,
    "vectors": 4,
    "threads": 3,
    "ahead": 5,
    "copied_share": 0.25,
    "hot": 0.4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GCNZC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def aligned(num_rows=10, num_columns=32, begin=0, dtype=torch.float32, pitch=None):
    """Rows whose first begins `begin` elements after a line."""
    pitch = pitch or num_columns
    memory = torch.zeros(num_rows * pitch + 128, dtype=dtype)
    at = (-memory.data_ptr() % 128) // dtype.itemsize + begin
    return FeatureTable(memory[at:].as_strided((num_rows, num_columns), (pitch, 1)))


def made(table=None, basis="measured", device=CPU, **changes):
    table = table or aligned()
    choices = {name: Setting(value, "why", basis, {}) for name, value in VALUES.items()}
    key = profiles.make_key(device, table)
    return replace(
        TuningProfile(key, "g", table.num_rows, "2026-01-02T03:04:05", choices), **changes
    )


def on_gpu(monkeypatch, slot=None, **properties):
    """A machine with a CUDA device, as far as keys can tell."""
    about = {"name": "H", "total_memory": 10, "uuid": "u"} | properties
    found = {"pcie_generation": 5, "pcie_lanes": 16, "driver": "570"} | (slot or {})
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**about)
    )
    monkeypatch.setattr(nvml, "slot", lambda device: found)
    return torch.device("cuda", 0)


def test_a_profile_is_saved_and_found(cache):
    table = aligned()
    assert profiles.find(CPU, table) is None
    one = made(table)
    assert profiles.save(one) == cache / "plans.json"
    assert profiles.find(CPU, table) == one
    assert profiles.find_for_device(CPU) == [one]
    assert {path.name for path in cache.iterdir()} == {"plans.json", ".plans.json.lock"}


@pytest.mark.parametrize(
    "other",
    [
        aligned(num_columns=33),
        aligned(dtype=torch.float16, num_columns=64),
        aligned(pitch=64),
        aligned(begin=4),
        FeatureTable.quantized(torch.rand(10, 128)),
        "sparse",
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_rows_of_another_shape_have_another_profile(other):
    if other == "sparse":
        other = FeatureTable(torch.eye(10, 32).to_sparse_csr())
    profiles.save(made())
    assert profiles.find(CPU, other) is None
    assert profiles.find(CPU, aligned()) is not None
    profiles.save(made(other))
    assert len(profiles.find_for_device(CPU)) == 2
    found = profiles.find(CPU, other)
    assert found is not None
    assert found.key == profiles.make_key(CPU, other)


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "value"),
    [
        ("torch", torch, "__version__", "9.9"),
        ("gcnzc", profiles, "VERSION", "9.9"),
        ("kernels", profiles, "_kernels", lambda: "0"),
        ("triton", profiles.triton, "__version__", "9.9"),
        ("name", profiles.system_machine, "cpu_name", lambda: "another"),
        ("cores", os, "cpu_count", lambda: 77),
    ],
)
def test_another_machine_or_version_has_another_profile(name, owner, attribute, value, monkeypatch):
    profiles.save(made())
    monkeypatch.setattr(owner, attribute, value)
    assert name in json.dumps(profiles.make_key(CPU, aligned()))
    assert profiles.find(CPU, aligned()) is None
    assert profiles.find_for_device(CPU) == []
    # and is not lost
    assert len(profiles.read()) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"name": "A"},
        {"total_memory": 11},
        {"slot": {"driver": "571"}},
        {"slot": {"pcie_generation": 4}},
        {"slot": {"pcie_lanes": 8}},
        {"slot": {"pcie_generation": None, "pcie_lanes": None}},
    ],
    ids=str,
)
def test_another_gpu_or_driver_has_another_profile(other, monkeypatch):
    device = on_gpu(monkeypatch)
    profiles.save(made(device=device))
    assert profiles.find(device, aligned()) is not None
    # a second one like it in a slot like its own
    assert profiles.find(on_gpu(monkeypatch, uuid="v"), aligned()) is not None
    assert profiles.find(on_gpu(monkeypatch, **other), aligned()) is None
    assert profiles.find(CPU, aligned()) is None


def test_without_nvml_a_gpu_is_identified_by_its_uuid(monkeypatch, tmp_path):
    silent = dict.fromkeys(("pcie_generation", "pcie_lanes", "driver"))
    words = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC"
    (tmp_path / "version").write_text(f"{words}\nGCC version: 12\n")
    monkeypatch.setattr(profiles, "KERNEL_DRIVER", tmp_path / "version")
    keys = [
        profiles.make_key(on_gpu(monkeypatch, slot=silent, uuid=uuid), aligned()) for uuid in "uvu"
    ]
    assert keys[0] == keys[2] != keys[1]
    assert keys[0]["versions"]["driver"] == "535.104.05"
    monkeypatch.setattr(profiles, "KERNEL_DRIVER", tmp_path / "none")
    assert (
        profiles.make_key(on_gpu(monkeypatch, slot=silent), aligned())["versions"]["driver"] is None
    )


def test_the_number_of_profiles_is_bounded(monkeypatch):
    monkeypatch.setattr(profiles, "MAX_PROFILES", 3)
    for number in range(1, 6):
        profiles.save(made(aligned(num_rows=number)))
    assert [one.rows for one in profiles.read()] == [3, 4, 5]


def broken(**changes):
    words = {"format": profiles.FORMAT, "plans": [json.loads(json.dumps(made(), default=vars))]}
    words["plans"][0]["choices"] |= changes.pop("choices", {})
    words["plans"][0] |= changes.pop("plan", {})
    return json.dumps(words | changes)


def choice(value, basis="measured"):
    return {"value": value, "why": "", "basis": basis, "figures": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "\x00\x01",
        '{"format": 1}',
        '{"format": 1, "plans": 3}',
        '{"format": 1, "plans": [{}]}',
        broken(format=2),
        broken(plan={"key": 3}),
        broken(plan={"key": {"device": {"kind": "abacus"}}}),
        broken(plan={"rows": "many"}),
        broken(plan={"more": 1}),
        broken(choices={"threads": choice(0)}),
        broken(choices={"threads": choice("rm -rf")}),
        broken(choices={"threads": choice(True)}),
        broken(choices={"threads": choice(10**9)}),
        broken(choices={"ahead": choice(1.5)}),
        broken(choices={"warps": choice(3)}),
        broken(choices={"copied_share": choice(1.5)}),
        broken(choices={"copied_share": choice(float("nan"))}),
        broken(choices={"hot": choice(0)}),
        broken(choices={"hot": choice(0.5, "guessed")}),
        broken(choices={"hot": None}),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(text, cache):
    cache.mkdir()
    (cache / "plans.json").write_text(text)
    told = []
    assert profiles.find(CPU, aligned(), told.append) is None
    assert len(told) == 1
    assert str(cache / "plans.json") in told[0]
    assert "\n" not in told[0]
    one = made()
    profiles.save(one)
    assert profiles.find(CPU, aligned(), told.append) == one
    assert len(told) == 1


def test_profiles_saved_at_the_same_time_are_both_kept():
    tables = [aligned(num_rows=number) for number in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda table: profiles.save(made(table)), tables))
    assert sorted(one.rows for one in profiles.read()) == list(range(1, 9))


def test_settings_that_were_not_measured_are_default(monkeypatch):
    device = on_gpu(monkeypatch)
    told = made(device=device)
    assert told.kernel_config == KernelConfig(64, 8, 4)
    assert told.summary() == (
        "gathers by 64 programs, 3 threads, 5 prefetched batches, 25% of the rows copied"
    )
    nothing = made(device=device, basis="default")
    assert nothing.kernel_config == KernelConfig()
    assert nothing.cache_share(10) is None
    assert nothing.value("threads") is None
    assert made().kernel_config is None
    assert made(basis="default").summary() == "all defaults"
