"""Allowed imports between packages, and one adapter for each external system."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from programs import output_of
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).parents[1]

# neither group may import the other, directly or through other modules
NETWORK = {"exchange", "compress", "optim"}
GRAPHS = {"graph", "features", "sampling", "loader", "models", "interop", "tune", "datasets"}
# the packages that a package may import besides itself
MAY_IMPORT = {
    "kernels": set(),
    "datasets": set(),
    "system": {"kernels"},
    "exchange": {"system"},
    "compress": {"exchange", "system", "kernels"},
    "optim": {"compress", "exchange", "system", "kernels"},
    "features": {"system", "kernels"},
    "graph": {"features", "datasets", "system", "kernels"},
    "sampling": {"graph", "system", "kernels"},
    "loader": {"sampling", "features", "graph", "system", "kernels"},
    # executes any kernel, so it knows none of the project's
    "testing": set(),
    "models": {"sampling", "system", "kernels"},
    "interop": {"loader", "sampling", "features", "graph", "system", "kernels"},
    "tune": GRAPHS - {"models", "interop", "tune"} | {"system", "kernels", "testing"},
    "train": {*NETWORK, *GRAPHS, "system", "kernels"},
    "cli": {*NETWORK, *GRAPHS, "system", "kernels", "train"},
}
# modules that every package may import
SHARED = {"_allocation", "_files", "_lazy", "_version"}
# the packages at the root, and what they may import besides the standard library
LIBRARIES = {
    "kernels": {"torch", "triton", "numba", "numpy", "llvmlite"},
    "datasets": {
        *("numpy", "pandas", "pyarrow", "scipy", "sklearn", "threadpoolctl", "tomli", "torch")
    },
}
# an outside thing, and the modules that may open its door
DOORS = {
    "torch.distributed": {
        *(
            f"gcnzc/exchange/{name}.py"
            for name in ("group", "init", "process_group", "processes", "store")
        ),
        "gcnzc/cli/launch.py",
        "gcnzc/optim/fully_shard.py",
    },
    "torch.distributed.elastic": {"gcnzc/cli/launch.py"},
    "torch.distributed.launcher": {"gcnzc/cli/launch.py"},
    "dgl": {"gcnzc/interop/dgl/importing.py"},
    "torch_geometric": {"gcnzc/interop/pyg/importing.py"},
    "lightning": {"gcnzc/interop/lightning.py"},
    "pytorch_lightning": {"gcnzc/interop/lightning.py"},
    "wandb": {"gcnzc/train/wandb.py"},
    "torch.cuda.Stream": {"gcnzc/system/streams.py"},
    "torch.cuda.Event": {"gcnzc/system/streams.py", "gcnzc/tune/pcie_bench.py"},
    "torch.cuda.stream": {"gcnzc/system/streams.py"},
    "torch.cuda.current_stream": {
        "gcnzc/exchange/pending.py",
        "gcnzc/system/streams.py",
        "gcnzc/features/cache.py",
        "gcnzc/tune/pcie_bench.py",
    },
    "matplotlib": {"gcnzc/train/plots.py"},
    "pyarrow": {
        f"datasets/{name}.py" for name in ("csvgz", "parquet_tables", "tables", "text_tables")
    },
    "rich": {"gcnzc/train/progress.py"},
    "urllib": {"datasets/download.py"},
    "requests": {"datasets/download.py"},
    "pynvml": {"gcnzc/system/nvml.py"},
    # private interfaces of Triton
    "triton.backends": {"gcnzc/testing/triton_driver.py"},
    "triton.runtime.driver": {"gcnzc/testing/triton_driver.py"},
    "triton.runtime.jit": {"gcnzc/testing/triton_driver.py"},
    # a failed call of the runtime leaves its error behind; system/cuda_driver.py calls the driver
    "torch.cuda.cudart": set(),
    "ctypes.CDLL": {
        "gcnzc/system/bus_errors.py",
        "gcnzc/system/cuda_driver.py",
        "gcnzc/system/files.py",
        "gcnzc/system/host_memory.py",
        "gcnzc/system/malloc.py",
    },
}
SOURCES = sorted(
    path
    for room in ("gcnzc", "kernels", "datasets")
    for path in (ROOT / room).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def attributes(path: Path) -> set[str]:
    """Dotted names that the code uses, such as torch.distributed.all_reduce."""
    return {dotted(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}


def dotted(node: ast.expr) -> str:
    """The dotted name of an attribute; empty for one of an expression without a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "gcnzc" else ("gcnzc", *parts))
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imported_modules(module: str) -> frozenset[str]:
    """Modules of the project that the import of a module imports."""
    found = set()
    pending: list[ast.AST] = [tree_of(MODULES[module])]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
        pending += ast.iter_child_nodes(node)
    # importing a module imports the packages around it
    outer = {".".join(name.split(".")[:count]) for name in found for count in range(1, 5)}
    return frozenset(name for name in found | outer if name in MODULES and name != module)


@cache
def reached(module: str) -> frozenset[str]:
    """Modules of the project that are imported along with a module."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imported_modules(name)
    return frozenset(seen)


def test_a_package_imports_only_what_the_table_allows():
    wrong = []
    for module in MODULES:
        package = package_of(module)
        if package in SHARED or package in ("", "__main__"):
            continue
        allowed = MAY_IMPORT[package] | SHARED | {package, ""}
        imported = imported_anywhere(MODULES[module])
        wrong += [f"{module}: {name}" for name in imported if package_of(name) not in allowed]
    assert not wrong


def test_network_and_graphs_do_not_reach_each_other():
    wrong = []
    for module in MODULES:
        for package, others in ((NETWORK, GRAPHS), (GRAPHS, NETWORK)):
            if package_of(module) in package:
                met = sorted(name for name in reached(module) if package_of(name) in others)
                wrong += [f"{module} imports {name}, perhaps through others" for name in met]
    assert not wrong


def imported_anywhere(path: Path) -> set[str]:
    """Modules of the project that a module names in an import: also in functions and for types."""
    names = {name if name in MODULES else name.rpartition(".")[0] for name in imports(path)}
    return names & MODULES.keys() - {module_of(path)}


def test_no_imports_go_in_a_circle_also_not_through_functions_or_types():
    modules = list(MODULES)
    edges = [
        (source, modules.index(name))
        for source, module in enumerate(modules)
        for name in imported_anywhere(MODULES[module])
    ]
    graph = coo_array((np.ones(len(edges)), tuple(np.array(edges).T)), (len(modules),) * 2)
    _, labels = connected_components(graph, connection="strong")
    circles = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    named = [[modules[number] for number in circle] for circle in circles if len(circle) > 1]
    assert not named


def test_libraries_at_the_root_import_no_others():
    wrong = []
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[0]
        if package not in LIBRARIES:
            continue
        may = LIBRARIES[package] | sys.stdlib_module_names
        for name in imports(path):
            # atomic writes and locks, which use the standard library alone
            is_own = name.startswith((f"gcnzc.{package}.", "gcnzc._files."))
            if not is_own and name.split(".")[0] not in may:
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong


ABSENT = {
    "from gcnzc.optim import OneBitAdam": {*GRAPHS, "train", "cli"},
    "from gcnzc import Loader, FeatureTable, Graph": {*NETWORK, "train", "cli"},
    "from gcnzc.models import SAGE": {*NETWORK, "loader", "train", "cli"},
}
COMMAND_LINE = "import gcnzc.cli.execute"
# forks of one process, since the import of torch takes most of the time
FORKS = """
import os, sys
import torch
for statement in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(statement)
        print(*sys.modules, flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, statement
"""


@pytest.fixture(scope="module")
def loaded_by():
    """The modules of a process that imports torch and executes a statement."""
    statements = [*ABSENT, COMMAND_LINE]
    lines = output_of("-c", FORKS, *statements).splitlines()
    return {each: set(line.split()) for each, line in zip(statements, lines, strict=True)}


@pytest.mark.parametrize("statement", ABSENT)
def test_one_half_does_not_load_the_other(loaded_by, statement):
    loaded, absent = loaded_by[statement], ABSENT[statement]
    ours = {package_of(name) for name in loaded if name.startswith("gcnzc.")}
    assert not ours & absent
    assert not {"pandas", "sklearn", "matplotlib"} & loaded


def test_a_start_of_the_command_line_loads_no_library_that_only_some_commands_use(loaded_by):
    loaded = loaded_by[COMMAND_LINE]
    assert "gcnzc.cli" in loaded
    unused = {"matplotlib", "networkx", "pandas", "scipy.sparse", "sklearn", "tensorboard", "dgl"}
    unused.add("gcnzc.testing")
    assert not loaded & {*unused, "torch_geometric", "lightning"}


@pytest.mark.parametrize("door", DOORS)
def test_each_external_system_is_used_by_its_adapter_modules_only(door):
    for path in SOURCES:
        if name_of(path) in DOORS[door]:
            continue
        # a part of a package may be reached without an import of its own
        reached = attributes(path) if "." in door else set()
        for name in imports(path) | reached:
            assert not f"{name}.".startswith(f"{door}."), f"{name_of(path)} uses {name}"


def test_the_package_defines_nothing_that_only_serves_a_comparison_with_deepspeed():
    for path in SOURCES:
        nodes = ast.walk(tree_of(path))
        definitions = (ast.ClassDef, ast.FunctionDef)
        names = [path.stem, *(each.name for each in nodes if isinstance(each, definitions))]
        for name in names:
            assert "deepspeed" not in name.lower(), f"{name_of(path)} defines {name}"
            assert "padded_sign" not in name.lower(), f"{name_of(path)} defines {name}"


def test_no_module_is_named_like_the_standard_library():
    # a script puts its own folder first on the path, and would hide the module of that name
    for path in [*SOURCES, *(ROOT / "bench").rglob("*.py")]:
        if path.parent.name == "gcnzc" or path.stem.startswith("__"):
            continue
        assert path.stem not in sys.stdlib_module_names, name_of(path)


def test_every_folder_of_code_is_a_package_that_is_installed():
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(gcnzc[\w.]*)"', text[text.index("packages = [") :].split("]")[0]))
    folders = {module_of(path.parent / "__init__.py") for path in SOURCES}
    assert listed == folders


def test_kernels_and_datasets_are_links_without_init():
    for room in LIBRARIES:
        assert (ROOT / "gcnzc" / room).is_symlink()
        assert not (ROOT / room / "__init__.py").exists()


def test_torch_is_asked_for_huge_pages_before_it_is_imported():
    program = (
        "import os, sys; import gcnzc._allocation as a; del a\n"
        "assert os.environ['THP_MEM_ALLOC_ENABLE'] == sys.argv[1]"
    )
    for given, expected in ((None, "1"), ("0", "0")):
        output_of("-c", program, expected, THP_MEM_ALLOC_ENABLE=given)
    # the package's first import, so that torch comes after it
    tree = ast.parse((ROOT / "gcnzc" / "__init__.py").read_text())
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    first = next(node for node in froms if node.module != "typing")
    assert [name.name for name in first.names] == ["_allocation"]
