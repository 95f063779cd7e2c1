"""Workers of one machine share memory, over real processes, as on one machine and as on two."""

import logging
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from fake_driver import FakeDriver
from limits import HANG_S
from processes import results, talk, workers
from tiny_graph import tiny

from gcnzc.exchange import init_group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features import registrations
from gcnzc.features.table import FeatureTable
from gcnzc.graph.load import load
from gcnzc.graph.prepare import prepare
from gcnzc.system import cuda_driver as cuda
from gcnzc.system.host_memory import mappings
from gcnzc.system.page_lock import PageLocks
from gcnzc.train import shared_data as module
from gcnzc.train.setup import feature_table
from gcnzc.train.shared_data import first_workers, load_shared, share_result, shared_empty

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def on_machines_of(per_machine):
    """Make the launcher's words say that so many workers are on each machine."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % per_machine)


def lies_in(tensor):
    """The files, or the like, that hold a tensor."""
    found = mappings(tensor.data_ptr(), max(tensor.numel() * tensor.element_size(), 1))
    return {mapping.path for mapping in found}


def value():
    """Tensors of every dtype and layout, at any depth."""
    rows = torch.arange(35).view(7, 5)
    by_dtype = {dtype: rows.to(dtype) for dtype in DTYPES}
    apart = torch.arange(60.0).view(6, 10)[:, 2:5]
    csr = module._csr(torch.tensor([0, 1, 3]), torch.tensor([4, 0, 2]), torch.arange(3.0), (2, 5))
    codes = FeatureTable.quantized(rows.float(), scale_columns=2)
    return {
        "dtypes": by_dtype,
        "apart": apart,
        "again": (apart, apart[1:]),
        "none": [torch.empty(0, 3), torch.empty(0, dtype=torch.int64), None],
        "number": torch.tensor(5),
        "csr": csr,
        "codes": codes,
        "path": Path("somewhere"),
    }


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, FeatureTable):
        assert_same(vars(found), vars(expected))
    elif not isinstance(expected, torch.Tensor):
        assert found == expected
    elif expected.layout == torch.sparse_csr:
        assert found.shape == expected.shape
        for part in ("crow_indices", "col_indices", "values"):
            assert_same(getattr(found, part)(), getattr(expected, part)())
    else:
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        assert found.shape == expected.shape
        assert found.tolist() == expected.tolist()


def share_values(per_machine):
    """Share values and empty tensors; what each worker then has and sees of the others."""
    on_machines_of(per_machine)
    made = []

    def make(allocate):
        made.append(True)
        rows = torch.from_numpy(allocate("rows", 12, "float32"))
        rows[:] = torch.arange(12.0)
        return value() | {"rows": rows.view(4, 3)}

    with init_group() as group:
        firsts = first_workers(group)
        given = share_result(make, group)
        run(all_gather_scalar(0), group)
        open_files = [name for name in map(os.readlink, _open_files()) if "memfd" in name]
        assert_same(given, value() | {"rows": torch.arange(12.0).view(4, 3)})
        assert lies_in(given["rows"]) == lies_in(given["number"]) == {"/memfd:gcnzc (deleted)"}
        # of one storage
        assert given["again"][0].data_ptr() == given["apart"].data_ptr()
        table = shared_empty((group.world_size, 3), torch.float64, group)
        nothing = shared_empty((0, 3), torch.float64, group)
        table[group.rank] = group.rank + 1
        given["rows"][0, group.rank] = -group.rank - 1
        run(all_gather_scalar(0), group)
        found = table.clone(), given["rows"][0].clone()
        run(all_gather_scalar(0), group)
    return firsts, bool(made), found, nothing.shape, len(open_files)


def _open_files():
    for file in Path("/proc/self/fd").iterdir():
        if file.is_symlink():
            yield file


@pytest.mark.parametrize("per_machine", [3, 2])
def test_workers_of_a_machine_share_memory(per_machine, tmp_path):
    found = results(3, tmp_path, share_values, per_machine)
    for rank, (firsts, made, (table, row), nothing, open_files) in enumerate(found):
        mates = [other for other in range(3) if other // per_machine == rank // per_machine]
        assert firsts == tuple(other // per_machine * per_machine for other in range(3))
        assert made == (rank == mates[0])
        expected = torch.zeros(3, 3)
        expected[mates] = torch.tensor(mates)[:, None].float() + 1
        assert torch.equal(table, expected.double())
        assert row.tolist() == [-i - 1 if i in mates else i for i in range(3)]
        assert nothing == (0, 3)
        # the map's own, none for others to open: as many as there are memories
        assert open_files <= 1 + len(DTYPES) + 12


def load_all(folders):
    """Load graphs of all kinds; where their tensors lie."""
    found = {}
    with init_group() as group:
        for name, folder in folders.items():
            data = load_shared(folder, group)
            tensors = {"indptr": data.graph.indptr, "indices": data.graph.indices}
            tensors |= {"labels": data.labels, "train": data.split["train"]}
            rows = data.table.rows
            tensors["rows"] = rows.values() if data.table.is_sparse else rows
            if data.links is not None:
                tensors["edges"] = data.links.edges["valid"]
            own = load(folder)
            assert torch.equal(own.graph.indices, data.graph.indices)
            assert (own.name, own.origin, own.metric) == (data.name, data.origin, data.metric)
            assert torch.equal(own.table.gather(own.labels), data.table.gather(own.labels))
            found[name] = {key: lies_in(tensor) for key, tensor in tensors.items()}
            run(all_gather_scalar(0), group)
    return found


def test_graphs_of_all_kinds_are_stored_once_per_machine(tmp_path):
    graph = tiny()
    folders = {
        "ogb": graph.write(tmp_path / "ogb"),
        "npz": graph.write_npz(tmp_path / "graph.npz"),
    }
    for name, options in {"prepared": {}, "coded": {"feature_dtype": "int8"}}.items():
        prepare(folders["ogb"], tmp_path / name, **options)
        folders[name] = tmp_path / name
    for found in results(2, tmp_path, load_all, folders):
        for name in folders:
            for where in found[name].values():
                if name in ("ogb", "npz"):
                    assert where == {"/memfd:gcnzc (deleted)"}
                else:
                    assert all(file.startswith(str(folders[name])) for file in where)


def fail_to_load(broken, missing):
    told = []
    with init_group(timeout_s=20) as group:
        for path in (missing, broken):
            try:
                load_shared(path, group)
            except (OSError, ValueError) as error:
                told.append((type(error).__name__, str(error)))
        usual = os.stat

        def stat(path, *options, **more):
            if str(path).startswith("/proc/"):
                raise PermissionError(13, "Permission denied", path)
            return usual(path, *options, **more)

        os.stat = stat
        try:
            shared_empty((2,), torch.float32, group)
        except RuntimeError as error:
            told.append((type(error).__name__, str(error)))
        module.available_bytes = lambda: 99
        try:
            shared_empty((25,), torch.float32, group)
        except RuntimeError as error:
            told.append((type(error).__name__, str(error)))
    return told


def test_errors_reach_all_workers(tmp_path):
    broken = tiny().write_npz(tmp_path / "graph.npz")
    broken.write_bytes(broken.read_bytes()[:200])
    first, second = results(2, tmp_path, fail_to_load, broken, tmp_path / "missing")
    for mine, other in zip(first, second, strict=True):
        assert mine[0] == other[0]
        assert mine[1].replace("rank 1: ", "") == other[1].replace("rank 0: ", "")
        assert "\n\nhint: " in mine[1]
    kinds, texts = zip(*first, strict=True)
    assert kinds == ("FileNotFoundError", "ValueError", "RuntimeError", "RuntimeError")
    assert texts[0].startswith(f"no folder {tmp_path / 'missing'}\n\nhint: ")
    assert str(broken) in texts[1]
    assert re.match(r"rank 1: process \d+ cannot open the memory of .*Permission denied", texts[2])
    assert texts[3].startswith("100 bytes of shared memory do not fit")


def share_until_killed(folder, moment):
    """Worker 0 is killed while it reads a graph, or while all write to what they share."""
    with init_group(timeout_s=5) as group:
        (folder / f"names{group.rank}").touch()

        def make(allocate):
            rows = torch.from_numpy(allocate("rows", 1 << 20, "float32"))
            rows[:] = 1
            if moment == "reading":
                os.kill(os.getpid(), signal.SIGKILL)
            return rows

        rows = share_result(make, group)
        empty = shared_empty((1 << 20,), torch.float32, group)
        for step in range(1000):
            with joint_work(group):
                empty[group.rank :: group.world_size] = rows[group.rank :: group.world_size]
                if step == 3:
                    (folder / f"names{group.rank}").write_text(_shared_names())
                    if group.rank == 0:
                        os.kill(os.getpid(), signal.SIGKILL)


def _shared_names():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return "\n".join(line for line in maps if " /dev/shm" in line or "memfd" in line)


@pytest.mark.parametrize("moment", ["reading", "writing"])
def test_a_killed_worker_leaves_no_shared_memory(moment, tmp_path):
    with workers(3, tmp_path, share_until_killed, tmp_path, moment) as processes:
        processes[0].join(HANG_S)
        assert processes[0].exitcode == -signal.SIGKILL
        for rank in (1, 2):
            # by itself
            processes[rank].join(HANG_S)
            assert processes[rank].exitcode == 1
            assert "WorkerLost" in talk(tmp_path, rank)
            assert "rank 0" in talk(tmp_path, rank)
    if moment == "writing":
        names = (tmp_path / "names0").read_text()
        # there was memory, and it never had a name
        assert "memfd:gcnzc" in names
        assert "/dev/shm" not in names


def pss_bytes():
    """What this process uses, pages that it shares counted in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Pss:")))


def touched(data):
    """Read all of a graph."""
    parts = data.graph.indptr, data.graph.indices, data.labels, data.table.rows
    return sum(float(part.flatten()[::256].float().sum()) for part in parts)


def grow(small, folders):
    """By how much loading lets the memory of all workers together grow."""
    grown = {}
    with init_group() as group:
        touched(load_shared(small, group))
        for name, folder in folders.items():
            before = sum(run(all_gather_scalar(pss_bytes()), group))
            data = load_shared(folder, group)
            touched(data)
            run(all_gather_scalar(0), group)
            grown[name] = sum(run(all_gather_scalar(pss_bytes()), group)) - before
            del data
    return grown


def test_three_workers_use_as_much_memory_as_one(tmp_path):
    small = tiny().write(tmp_path / "small")
    folders = {"ogb": tiny(50_000, 200_000, 160).write(tmp_path / "ogb")}
    prepare(folders["ogb"], tmp_path / "prepared")
    folders["prepared"] = tmp_path / "prepared"
    (alone,) = results(1, tmp_path, grow, small, folders)
    for grown in results(3, tmp_path, grow, small, folders):
        for name, num_bytes in grown.items():
            # The features are 32 MB; three copies of all arrays are three times as much. Pages of
            # libraries count in part, and more when another process with them ends.
            assert 30e6 < num_bytes < 1.5 * alone[name]


def pin_prepared(folder, codes):
    """Where the features of a prepared folder are, by what the driver says to read-only memory."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    said = []
    logging.getLogger("gcnzc").addHandler(CallHandler(said.append))
    with init_group() as group:
        data = load_shared(folder, group)
        return [(*pin_once(data, group, code), said.copy()) for code in codes]


def pin_once(data, group, code):
    driver = FakeDriver(read_only_code=code)
    ledger = PageLocks(driver)
    registrations.process_page_locks = lambda: ledger
    with feature_table(data, "host", torch.device("cuda"), group) as table:
        assert driver.is_covered(table.rows.data_ptr(), table.nbytes)
        assert torch.equal(table.rows, data.table.rows)
        run(all_gather_scalar(0), group)
        if group.rank == 0 and table.rows is not data.table.rows:
            table.rows[2, 1] = 77
        run(all_gather_scalar(0), group)
        found = lies_in(table.rows), table.rows[2, 1].item()
        run(all_gather_scalar(0), group)
    assert driver.ranges == {}
    return found


class CallHandler(logging.Handler):
    def __init__(self, deed):
        super().__init__()
        self.deed = deed

    def emit(self, record):
        self.deed(record.getMessage())


def test_workers_of_a_machine_share_the_copy_of_memory_that_cannot_be_locked(tmp_path):
    prepare(tiny().write(tmp_path / "raw"), tmp_path / "graph")
    codes = [0, cuda.OPERATING_SYSTEM]
    first, second = results(2, tmp_path, pin_prepared, tmp_path / "graph", codes)
    in_place, copied = zip(first, second, strict=True)
    assert [place for place, *_ in copied] == [{"/memfd:gcnzc (deleted)"}] * 2
    assert [seen for _, seen, _ in copied] == [77, 77]
    assert in_place[0][:2] == in_place[1][:2]
    assert in_place[0][0] != copied[0][0]
    # one worker says that there is a copy
    assert [len(said) for *_, said in (*in_place, *copied)] == [0, 0, 1, 0]
