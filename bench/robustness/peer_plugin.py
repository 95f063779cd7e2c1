"""Pytest plugin: run the tests of PyG or DGL with gcnzc's drop-in loaders.

    python -m pytest -p peer_plugin --peer pyg --loaders gcnzc --report FILE TESTS

Before the tests are imported, the plugin replaces `torch_geometric.loader.NeighborLoader` and
`LinkNeighborLoader`, or `dgl.dataloading.DataLoader`, with the loaders of gcnzc. With
`--loaders own`, it does not replace them. It appends one JSON line for each test to FILE: the
outcome, the number of loaders constructed, and the reason of the outcome. PyG's tests that do not
name these loaders are deselected.

Other differences from a plain run of these tests:

- With gcnzc's loaders, which do not need pyg-lib, tests run that PyG would skip because pyg-lib is
  missing, including the rest of tests that return early for that reason.
- DGL's tests download Cora. The plugin replaces it with a random graph with features and labels.
- Random numbers are seeded before each test, and an open process group is destroyed after it.
- A test that takes longer than `TEST_LIMIT_S` fails.

The loaders are also replaced in processes that a test starts with `torch.multiprocessing.spawn`.
"""

import functools
import inspect
import json
import os
import pickle
import random
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gcnzc

TEST_LIMIT_S = 300
# environment variable with the path of a file, to which each constructed loader appends one byte
COUNTER = "GCNZC_PEER_LOADER_COUNTER"
# reasons by which PyG skips tests without pyg-lib, except tests that compare samplers
WITHOUT_PYG_LIB = re.compile(
    r"No neighbor sampler installed|Package pyg_lib not found|'pyg-lib' does not support"
)
# names that PyG's test modules import to decide whether to return early
FLAGS = (
    "WITH_EDGE_TIME_NEIGHBOR_SAMPLE",
    "WITH_PYG_LIB",
    "WITH_TORCH_SPARSE",
    "WITH_WEIGHTED_NEIGHBOR_SAMPLE",
)
REJECTION = re.compile(r"does not support (?P<what>[^\n]+?)((: |, but )[^\n]*)?\n\nhint: ")


def swap_loaders(peer: str, loaders: str) -> None:
    """Replace a library's loaders with those to test, and count the loaders constructed.

    Args:
        peer: "pyg" or "dgl".
        loaders: "gcnzc", or "own" for the library's.
    """
    holder, names, ours = _pyg() if peer == "pyg" else _dgl()
    for name in names:
        loader = getattr(ours if loaders == "gcnzc" else holder, name)
        # gcnzc's loaders of HeteroData are subclasses that do not call the constructor of the base
        for each in (loader, *loader.__subclasses__()):
            _count_constructions(each)
        setattr(holder, name, loader)
    _swap_in_spawned_processes(peer, loaders)


def rejected_feature(error: BaseException | None) -> str | None:
    """Return the feature that a loader rejected as unsupported; None for other errors.

    Args:
        error: the error of a failed test; its causes and contexts are examined, too.
    """
    package = str(Path(gcnzc.__file__).parent)
    while error is not None:
        found = REJECTION.search(str(error))
        is_native = isinstance(error, ValueError) and _raised_in(error).startswith(package)
        # in a spawned process: the message has the traceback
        is_native = is_native or (isinstance(error, _spawn_error()) and package in str(error))
        if found and is_native:
            return found["what"]
        error = error.__cause__ or error.__context__
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("drop-in loaders")
    group.addoption("--peer", choices=("pyg", "dgl"), required=True)
    group.addoption("--loaders", choices=("gcnzc", "own"), default="gcnzc")
    group.addoption("--report", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Replace the loaders before any test is imported."""
    report: Path = config.getoption("report")
    counter = report.with_suffix(".counter")
    counter.write_bytes(b"")
    os.environ[COUNTER] = str(counter)
    swap_loaders(config.getoption("peer"), config.getoption("loaders"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests without these loaders; run those that PyG skips because pyg-lib is missing."""
    if config.getoption("peer") == "pyg":
        items[:] = [item for item in items if _names_loader(item)]
    if config.getoption("loaders") != "gcnzc":
        return
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if not _needs_pyg_lib(mark)]
        module = getattr(item, "module", None)
        for flag in FLAGS:
            if hasattr(module, flag):
                setattr(module, flag, True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit the time of a test, seed it, and report its outcome."""
    outcome = SimpleNamespace(name="passed", reason="")
    item.stash[_OUTCOME] = outcome
    before = _loaders_constructed()
    _seed(item.nodeid)
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.alarm(TEST_LIMIT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        _close_process_group()
        line = {
            "test": item.nodeid,
            "outcome": outcome.name,
            "loaders": _loaders_constructed() - before,
            "reason": outcome.reason,
        }
        with item.config.getoption("report").open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Distinguish errors that name an unsupported feature from other failures."""
    report: Any = yield
    outcome = item.stash[_OUTCOME]
    # the first phase that did not pass decides
    if outcome.name == "passed" and report.outcome != "passed":
        error = call.excinfo.value if call.excinfo else None
        rejected = rejected_feature(error)
        if hasattr(report, "wasxfail"):
            outcome.name, outcome.reason = "xfailed", report.wasxfail
        elif rejected is not None:
            outcome.name, outcome.reason = "rejected", rejected
        else:
            outcome.name = report.outcome
            lines = [line for line in str(error).splitlines() if line] or [""]
            line = lines[-1 if isinstance(error, _spawn_error()) else 0]
            outcome.reason = f"{type(error).__name__}: {line}"[:300]
    return report


def restore(peer: str, loaders: str, pickled: bytes) -> Any:
    """Replace the loaders in a spawned process, before the test's own module is imported there."""
    swap_loaders(peer, loaders)
    return pickle.loads(pickled)


class Spawned:
    """A pickled function, before whose unpickling a spawned process replaces the loaders.

    Args:
        fn: function of the test.
        peer: see `swap_loaders`.
        loaders: see `swap_loaders`.
    """

    def __init__(self, fn: Callable[..., Any], peer: str, loaders: str) -> None:
        self._reduced = (restore, (peer, loaders, pickle.dumps(fn)))

    def __call__(self, *args: Any) -> Any:
        """Raise an error, since unpickling returns the function itself."""
        raise AssertionError("it must be called in a spawned process")

    def __reduce__(self) -> Any:
        return self._reduced


_OUTCOME = pytest.StashKey[SimpleNamespace]()


def _pyg() -> tuple[Any, tuple[str, ...], Any]:
    import torch_geometric.loader

    import gcnzc.interop.pyg

    names = ("NeighborLoader", "LinkNeighborLoader")
    return torch_geometric.loader, names, gcnzc.interop.pyg


def _dgl() -> tuple[Any, tuple[str, ...], Any]:
    import gcnzc.interop.dgl

    dgl = gcnzc.interop.dgl.import_dgl()
    dgl.data.CoraFullDataset = lambda *_, **__: [_random_graph(dgl)]
    return dgl.dataloading, ("DataLoader",), gcnzc.interop.dgl


def _random_graph(dgl: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    num_nodes = 2000
    ends = torch.randint(num_nodes, (2, 10 * num_nodes), generator=generator)
    graph = dgl.graph((ends[0], ends[1]), num_nodes=num_nodes)
    graph.ndata["feat"] = torch.rand(num_nodes, 16, generator=generator)
    graph.ndata["label"] = torch.randint(7, (num_nodes,), generator=generator)
    return graph


def _count_constructions(loader: type) -> None:
    construct: Any = loader.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        with Path(os.environ[COUNTER]).open("ab") as file:
            file.write(b".")
        construct(self, *args, **kwargs)

    loader.__init__ = counted  # type: ignore[misc]


def _swap_in_spawned_processes(peer: str, loaders: str) -> None:
    spawn = torch.multiprocessing.spawn

    @functools.wraps(spawn)
    def swapped(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return spawn(Spawned(fn, peer, loaders), *args, **kwargs)

    torch.multiprocessing.spawn = swapped  # type: ignore[assignment]


def _names_loader(item: pytest.Item) -> bool:
    return "NeighborLoader" in inspect.getsource(getattr(item, "function", item))


def _needs_pyg_lib(mark: pytest.Mark) -> bool:
    reason = str(mark.kwargs.get("reason", ""))
    return mark.name == "skipif" and WITHOUT_PYG_LIB.match(reason) is not None


def _loaders_constructed() -> int:
    return Path(os.environ[COUNTER]).stat().st_size


def _seed(test: str) -> None:
    seed = zlib.crc32(test.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test took longer than {TEST_LIMIT_S} s")


def _close_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _raised_in(error: BaseException) -> str:
    """Return the file of the statement that raised an error."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "" if traceback is None else traceback.tb_frame.f_code.co_filename


def _spawn_error() -> type[Exception]:
    return torch.multiprocessing.ProcessRaisedException
