"""Import DGL; the only module that does.

DGL 2.1.0, the newest wheel, brings a part called GraphBolt that is compiled for single versions of
torch, up to 2.2.1, and `import dgl` fails where that part does. Nothing else in DGL needs it, so
`import_dgl` lets DGL find an empty module of that name where GraphBolt cannot work.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GRAPHBOLT = "dgl.graphbolt"


INSTALL = (
    "pip install 'dgl==2.1.0'"
    if sys.version_info < (3, 13)
    else "DGL has no wheel for Python 3.13 and later: use Python 3.12, or gcnzc's own sampler"
)


def import_dgl() -> Any:
    """The module `dgl`, beside any version of torch.

    What DGL warns of while it is imported is not shown, and its file of settings is not written.
    Where GraphBolt works it is imported normally; elsewhere `dgl.graphbolt` is an empty module.

    Raises:
        RuntimeError: DGL is not installed, or does not import for another reason.
    """
    if "dgl" not in sys.modules and importlib.util.find_spec("dgl") is None:
        raise RuntimeError(f"DGL is not installed\n\nhint: {INSTALL}")
    try:
        with warnings.catch_warnings(), _backend_named(), _graphbolt_where_it_works():
            warnings.simplefilter("ignore")
            import dgl
    except (ImportError, OSError) as error:
        raise RuntimeError(f"DGL does not import: {error}\n\nhint: {INSTALL}") from error
    if dgl.__version__.startswith("0."):
        # pip takes 0.1.3 where no newer wheel fits
        raise RuntimeError(f"DGL {dgl.__version__} is too old\n\nhint: {INSTALL}")
    return dgl


def block_class() -> Any:
    """The class of DGL's blocks, whose module `dgl.heterograph` is hidden by a function."""
    import_dgl()
    from dgl.heterograph import DGLBlock

    return DGLBlock


def graphbolt_works() -> bool:
    """Whether DGL's GraphBolt is compiled for this torch, and has the torchdata that it needs."""
    package, torchdata = (importlib.util.find_spec(name) for name in ("dgl", "torchdata"))
    if package is None or torchdata is None:
        return False
    version = torch.__version__.partition("+")[0]
    library = Path("graphbolt") / f"libgraphbolt_pytorch_{version}.so"
    return _holds(package, library) and _holds(torchdata, Path("datapipes"))


def check_cuda(device: torch.device) -> None:
    """Refuse a GPU that the installed DGL has no code for.

    Raises:
        RuntimeError: it has none; or there is no DGL.
    """
    dgl = import_dgl()
    try:
        dgl.graph(([0], [0])).to(device)
    except (dgl.DGLError, AssertionError, RuntimeError) as error:
        raise RuntimeError(
            f"the installed DGL {dgl.__version__} puts no blocks on {device}: "
            f"{str(error).strip().splitlines()[-1]}\n\n"
            "hint: gcnzc.Loader and gcnzc.interop.pyg.NeighborLoader hand out minibatches there "
            "without DGL; or install a build of DGL with CUDA, see https://www.dgl.ai/pages/start"
        ) from error


def _holds(package: Any, path: Path) -> bool:
    return any((Path(folder) / path).exists() for folder in package.submodule_search_locations)


@contextmanager
def _graphbolt_where_it_works() -> Iterator[None]:
    if "dgl" in sys.modules or graphbolt_works():
        yield
        return

    def refuse(name: str) -> Any:
        raise AttributeError(
            f"{GRAPHBOLT}.{name}: GraphBolt is not made for torch {torch.__version__}"
        )

    stub = ModuleType(GRAPHBOLT, "GraphBolt does not work here; gcnzc put this in its place.")
    stub.__getattr__ = refuse  # type: ignore[method-assign]
    sys.modules[GRAPHBOLT] = stub
    try:
        yield
    except BaseException:
        del sys.modules[GRAPHBOLT]
        raise
    sys.modules["dgl"].graphbolt = stub  # type: ignore[attr-defined]


@contextmanager
def _backend_named() -> Iterator[None]:
    # without it DGL writes its choice into the home folder, and prints that it did
    named = os.environ.get("DGLBACKEND")
    os.environ["DGLBACKEND"] = named or "pytorch"
    try:
        yield
    finally:
        if named is None:
            del os.environ["DGLBACKEND"]
