import json
import math
import multiprocessing
import os
import subprocess

import numpy as np
import pytest
from limits import HANG_S
from touched import touched_bytes

from gcnzc.datasets import store
from gcnzc.datasets.rows import allocate_in_memory, convert_chunks, no_progress, rows_from_array

ABOUT = {
    "name": "mine",
    "split": {"name": "random", "train": 2, "valid": 1, "test": 1},
    "options": {},
    "origin": {},
    "num_nodes": 5,
    "num_edges": 4,
    "num_classes": 5,
    "num_tasks": 1,
    "num_labelled": 5,
    "metric": "accuracy",
    "best_accuracy": None,
    "links": None,
}
TABLE = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


def write_graph(writer):
    writer.save("indptr.npy", np.array([0, 2, 3, 3, 3, 4]))
    writer.save("indices.npy", np.array([1, 2, 0, 4], np.int32))
    writer.save("labels.npy", np.arange(5))
    for part, ids in (("train", [0, 1]), ("valid", [2]), ("test", [3])):
        writer.save(f"split/{part}.npy", np.array(ids))


def write(dest, table=TABLE, pitch_bytes=16):
    with store.atomic_folder(dest) as folder:
        writer = store.Writer(folder)
        write_graph(writer)
        about = None
        if table is not None:
            rows = rows_from_array(table, "table")
            chunks = convert_chunks(rows, rows.dtype, False, allocate_in_memory, no_progress)
            writer.save_rows("features.npy", rows, rows.dtype, pitch_bytes, chunks)
            about = {"kind": "dense", "columns": table.shape[1], "finite": True}
            about |= {"dtype": str(table.dtype), "pitch_bytes": pitch_bytes}
        writer.finish(ABOUT | {"features": about})
    return dest


def write_meta(folder, meta, **changes):
    """As if it had been written so; the checksum is right."""
    whole = meta | changes
    (folder / "meta.json").write_text(json.dumps(whole | {"crc32": store.checksum_of(whole)}))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_written_folders_are_opened(tmp_path):
    found = store.open_folder(write(tmp_path / "a"))
    assert (found.features == TABLE).all()
    assert found.features.strides == (16, 4)
    assert found.indices.tolist() == [1, 2, 0, 4]
    assert found.split["train"].tolist() == [0, 1]
    assert found.meta["name"] == "mine"
    names = ("indptr", "indices", "labels", "features", "split/train", "split/valid", "split/test")
    expected = {"a", "a/split", "a/meta.json", *(f"a/{name}.npy" for name in names)}
    assert files(tmp_path) == sorted(expected)
    store.verify(tmp_path / "a")


def test_arrays_are_npy_files_whose_data_begins_on_a_page(tmp_path):
    folder = write(tmp_path / "a", pitch_bytes=12)
    assert (np.load(folder / "features.npy") == TABLE).all()
    assert (np.load(folder / "features.npy", mmap_mode="r") == TABLE).all()
    for path in folder.rglob("*.npy"):
        array = np.load(path, mmap_mode="r")
        assert isinstance(array, np.memmap)
        assert array.offset == 4096
    found = store.open_folder(folder)
    assert found.features.ctypes.data % 4096 == 0


def test_arrays_that_a_driver_may_lock_are_mapped_read_only(tmp_path):
    found = store.open_folder(write(tmp_path / "a"), read_only=True)
    for array in (found.features, found.indptr, found.indices):
        assert not array.flags.writeable
    for array in (found.labels, *found.split.values()):
        assert array.flags.writeable


def test_what_is_read_to_open_a_folder_does_not_depend_on_its_size(tmp_path):
    folder = write(tmp_path / "a")
    meta = json.loads((folder / "meta.json").read_text())
    rows, columns = 1 << 28, 128
    meta["num_nodes"] = rows
    meta["features"] |= {"columns": columns, "pitch_bytes": 4 * columns}
    large = {"features.npy": (rows, columns), "indptr.npy": (rows + 1,), "labels.npy": (rows,)}
    for name, shape in large.items():
        entry = meta["files"][name]
        dtype = np.dtype(entry["dtype"])
        entry |= {"shape": shape, "bytes": 4096 + math.prod(shape) * dtype.itemsize}
        with (folder / name).open("wb") as file:
            file.write(store.npy_header(shape, dtype))
            # 128 GiB of features that take no room: a hole
            file.truncate(entry["bytes"])
            if name == "indptr.npy":
                file.seek(-8, os.SEEK_END)
                file.write(np.int64(4).tobytes())
    write_meta(folder, meta)
    found, num_bytes = touched_bytes(lambda: store.open_folder(folder))
    # the numbers of nodes alone, for each of which there is an index and a label, have 4 GiB
    assert num_bytes < 64 << 20
    assert found.features[rows - 1, columns - 1] == 0


def swap(old, new):
    return lambda data: data.replace(old, new)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("features.npy", lambda data: data[:-1], "has 4,175 bytes, but.*4,176"),
        ("indices.npy", lambda data: data + b"0", "indices.npy has 4,113 bytes"),
        ("labels.npy", None, "no file .*labels.npy, which meta.json lists"),
        ("indptr.npy", swap(b"i8", b"u8"), "has no header of"),
        ("meta.json", lambda data: data[:-9], "meta.json is not valid JSON"),
        ("meta.json", lambda data: b"{}", "is not the meta.json of a prepared folder"),
        ("meta.json", swap(b'"version": 1', b'"version": 7'), "a has format version 7"),
        ("meta.json", swap(b'"version"', b'"edition"'), "has format version None"),
        ("meta.json", swap(b'"metric"', b'"meter"'), "was changed after it was written"),
        ("meta.json", swap(b"labels.npy", b"label.npy"), "was changed after it was written"),
    ],
)
def test_a_damaged_folder_is_rejected(tmp_path, name, damage, words):
    path = write(tmp_path / "a") / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    error = FileNotFoundError if damage is None else ValueError
    with pytest.raises(error, match=words + "(.|\n)*\n\nhint: "):
        store.open_folder(tmp_path / "a")


@pytest.mark.parametrize("name", ["features.npy", "indices.npy", "split/test.npy"])
def test_verify_reports_the_file_with_a_flipped_bit(tmp_path, name):
    path = write(tmp_path / "a") / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store.open_folder(tmp_path / "a")
    with pytest.raises(ValueError, match=rf"{name} has the checksum .*\n\nhint: "):
        store.verify(tmp_path / "a")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_nothing(tmp_path, error):
    def build():
        with store.atomic_folder(tmp_path / "a") as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text("half")
            raise error

    with pytest.raises(error):
        build()
    assert files(tmp_path) == []


def test_files_of_a_killed_process_are_removed(tmp_path):
    left = tmp_path / ".a.partial"
    (left / "split").mkdir(parents=True)
    (left / "indptr.npy").write_text("half")
    (left / "split" / "train.npy").write_text("half")
    write(tmp_path / "a")
    store.verify(tmp_path / "a")
    assert not left.exists()


def test_a_folder_that_another_process_writes_is_reported(tmp_path):
    message = rf"pid {os.getpid()}.* is writing .*a\n\nhint: wait for it"
    with store.atomic_folder(tmp_path / "a"):
        with pytest.raises(RuntimeError, match=message), store.atomic_folder(tmp_path / "a"):
            pytest.fail("it began")
        assert files(tmp_path) == [".a.partial"]


def _many(dest, failures):
    try:
        write(dest)
    except (FileExistsError, RuntimeError):
        failures.put(1)


def test_only_one_of_many_processes_writes(tmp_path):
    context = multiprocessing.get_context("forkserver")
    failures = context.Queue()
    workers = [context.Process(target=_many, args=(tmp_path / "a", failures)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.verify(tmp_path / "a")
    assert [failures.get(timeout=HANG_S) for _ in range(3)] == [1, 1, 1]
    assert not (tmp_path / ".a.partial").exists()


def test_too_little_disk_space_is_reported_before_writing(tmp_path):
    dest = store.atomic_folder(tmp_path / "a", [1 << 60])
    with pytest.raises(RuntimeError, match="about 1,152,921,504,606,846,976 bytes"), dest:
        pytest.fail("it began")
    assert files(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported(small_disk):
    # fits as a whole, so it is found full only once the first files are there
    table = np.zeros((1 << 17, 2), np.float32)
    with pytest.raises(RuntimeError, match=r"no space for .*a: .* are free\n\nhint: "):
        write(small_disk / "a", table)
    assert files(small_disk) == []
    too_large = pytest.raises(RuntimeError, match="no space for")
    with too_large, store.atomic_folder(small_disk / "a") as folder:
        store.scratch_allocator(folder)("sources", 1 << 20, np.int32)
    assert files(small_disk) == []


def test_scratch_arrays_have_no_file_name(tmp_path):
    allocate = store.scratch_allocator(tmp_path)
    array = allocate("sources", 1000, np.int32)
    array[:] = np.arange(1000)
    assert (array == np.arange(1000)).all()
    assert allocate("none", 0, np.int32).shape == (0,)
    assert files(tmp_path) == []


def test_folders_are_copied_and_checked(tmp_path):
    source = tmp_path / "mapping"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "nodes.csv").write_text("0,zero\n")
    with store.atomic_folder(tmp_path / "a") as folder:
        writer = store.Writer(folder)
        write_graph(writer)
        writer.copy(source, "mapping")
        writer.finish(ABOUT | {"features": None})
    copy = tmp_path / "a" / "mapping" / "deep" / "nodes.csv"
    assert copy.read_text() == "0,zero\n"
    entry = store.read_meta(tmp_path / "a")["files"]["mapping/deep/nodes.csv"]
    assert entry == {"bytes": 7, "crc32": store.checksum(copy)}


def test_a_destination_that_cannot_be_created_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "file").write_text("")
    dest = store.atomic_folder(tmp_path / "file" / "folder" / "dest")
    with pytest.raises(OSError, match=r"dest cannot be created: (.|\n)*hint: choose"), dest:
        pytest.fail("it began")
