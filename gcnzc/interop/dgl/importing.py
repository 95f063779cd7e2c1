"""Import DGL, with any version of torch. Other modules get DGL from here.

DGL 2.1.0, the newest wheel, includes GraphBolt, which is compiled for specific versions of torch up
to 2.2.1. With another version `import dgl` fails, although nothing else in DGL needs GraphBolt. In
this case `import_dgl` puts an empty module in the place of `dgl.graphbolt`.
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


# the module once its import succeeded: the checks take longer than building a block
_imported: ModuleType | None = None


def import_dgl() -> Any:
    """Import `dgl`, with any version of torch.

    Warnings during the import are suppressed, and DGL's configuration file is not written. If
    GraphBolt is not compiled for this torch, `dgl.graphbolt` is an empty module.

    Raises:
        ImportError: DGL is not installed, is too old, or its import fails for another reason.
    """
    global _imported
    if _imported is not None and sys.modules.get("dgl") is _imported:
        return _imported
    if "dgl" not in sys.modules:
        found = importlib.util.find_spec("dgl")
        if found is None:
            raise ImportError(f"DGL is not installed\n\nhint: {INSTALL}")
        if found.submodule_search_locations is None:
            raise ImportError(
                f"`import dgl` imports {found.origin}, which is not DGL\n\nhint: rename that file"
            )
        # of an import that failed, such as that by `ogb` without GraphBolt: they are incomplete
        for name in [name for name in sys.modules if name.startswith("dgl.")]:
            del sys.modules[name]
    try:
        with warnings.catch_warnings(), _pytorch_backend(), _stub_graphbolt_if_broken():
            warnings.simplefilter("ignore")
            import dgl
    except (ImportError, OSError) as error:
        raise ImportError(f"the import of DGL failed: {error}\n\nhint: {INSTALL}") from error
    if dgl.__version__.startswith("0."):
        # pip installs 0.1.3 if no newer wheel fits
        raise ImportError(f"DGL {dgl.__version__} is too old\n\nhint: {INSTALL}")
    _imported = dgl
    return dgl


def block_class() -> Any:
    """Return the class of DGL's blocks, from a module that is shadowed by a function's name."""
    import_dgl()
    from dgl.heterograph import DGLBlock

    return DGLBlock


def graphbolt_works() -> bool:
    """Whether DGL's GraphBolt is compiled for this torch, and its torchdata is installed."""
    package, torchdata = (importlib.util.find_spec(name) for name in ("dgl", "torchdata"))
    if package is None or torchdata is None:
        return False
    version = torch.__version__.partition("+")[0]
    library = Path("graphbolt") / f"libgraphbolt_pytorch_{version}.so"
    return _contains(package, library) and _contains(torchdata, Path("datapipes"))


def check_cuda(device: torch.device) -> None:
    """Check that the installed DGL supports a GPU.

    Raises:
        RuntimeError: it does not.
        ImportError: DGL is not installed.
    """
    dgl = import_dgl()
    try:
        dgl.graph(([0], [0])).to(device)
    except (dgl.DGLError, AssertionError, RuntimeError) as error:
        raise RuntimeError(
            f"the installed DGL {dgl.__version__} does not support blocks on {device}: "
            f"{str(error).strip().splitlines()[-1]}\n\n"
            "hint: gcnzc.Loader and gcnzc.interop.pyg.NeighborLoader yield minibatches on a GPU "
            "without DGL; or install a build of DGL with CUDA, see https://www.dgl.ai/pages/start"
        ) from error


def _contains(package: Any, path: Path) -> bool:
    return any((Path(folder) / path).exists() for folder in package.submodule_search_locations)


@contextmanager
def _stub_graphbolt_if_broken() -> Iterator[None]:
    if "dgl" in sys.modules or graphbolt_works():
        yield
        return

    def refuse(name: str) -> Any:
        raise AttributeError(
            f"{GRAPHBOLT}.{name}: GraphBolt is not compiled for torch {torch.__version__}"
        )

    stub = ModuleType(GRAPHBOLT, "Empty module in place of GraphBolt, which cannot be imported.")
    stub.__getattr__ = refuse  # type: ignore[method-assign]
    sys.modules[GRAPHBOLT] = stub
    try:
        yield
    except BaseException:
        del sys.modules[GRAPHBOLT]
        raise
    sys.modules["dgl"].graphbolt = stub  # type: ignore[attr-defined]


@contextmanager
def _pytorch_backend() -> Iterator[None]:
    # without this variable DGL writes its default to the home folder, and prints a message
    named = os.environ.get("DGLBACKEND")
    os.environ["DGLBACKEND"] = named or "pytorch"
    try:
        yield
    finally:
        if named is None:
            del os.environ["DGLBACKEND"]
