"""Who may import whom, and the one door to each outside thing."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# a room, and what it may import besides itself and the standard library
ROOMS = {
    "kernels": {"torch", "triton", "numba", "numpy", "llvmlite"},
    "datasets": {"numpy", "pandas", "scipy", "sklearn", "threadpoolctl", "torch"},
}
# a module of gcnzc may import those before it
ORDER = [
    "_allocation",
    "_version",
    "finite",
    "scalars",
    "arguments",
    "background",
    "streams",
    "exchange",
    "flat",
    "replicas",
    "together",
    "compress",
    "optim",
    "graph",
    "wire",
    "driver",
    "mappings",
    "locking",
    "table",
    "edge_split",
    "data",
    "shared",
    "timeline",
    "tally",
    "sampler",
    "pairs",
    "transfer",
    "loader",
    "peers",
    "hot",
    "layers",
    "models",
    "decoders",
    "layerwise",
    "interop",
    "config",
    "record",
    "progress",
    "picture",
    "metrics",
    "checkpoint",
    "shapes",
    "nvml",
    "plan",
    "link",
    "stages",
    "memory",
    "methods",
    "tasks",
    "tune",
    "network_plan",
    "worker_states",
    "train",
    "builtin",
    "check",
    "launch",
    "cli",
]
# an outside thing, and the modules that may open its door
DOORS = {
    "torch.distributed": {"gcnzc/exchange/group.py", "gcnzc/launch.py"},
    "torch.distributed.elastic": {"gcnzc/launch.py"},
    "torch.distributed.launcher": {"gcnzc/launch.py"},
    "dgl": {"gcnzc/interop/dgl_door.py"},
    "torch_geometric": {"gcnzc/interop/pyg_door.py"},
    "lightning": {"gcnzc/interop/lightning.py"},
    "pytorch_lightning": {"gcnzc/interop/lightning.py"},
    "torch.cuda.Stream": {"gcnzc/streams.py"},
    "torch.cuda.Event": {"gcnzc/streams.py", "gcnzc/link.py"},
    "torch.cuda.stream": {"gcnzc/streams.py"},
    "torch.cuda.current_stream": {
        "gcnzc/exchange/group.py",
        "gcnzc/streams.py",
        "gcnzc/hot.py",
        "gcnzc/link.py",
    },
    "matplotlib": {"gcnzc/picture.py"},
    "rich": {"gcnzc/progress.py"},
    "tyro": {"gcnzc/config.py", "gcnzc/cli.py"},
    "urllib": {"datasets/download.py"},
    "requests": {"datasets/download.py"},
    "pynvml": {"gcnzc/nvml.py"},
    # a failed call of the runtime leaves its error behind; gcnzc/driver.py calls the driver
    "torch.cuda.cudart": set(),
    "ctypes.CDLL": {"gcnzc/driver.py", "gcnzc/mappings.py", "gcnzc/shared.py"},
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
def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def attributes(path: Path) -> set[str]:
    """Dotted names that the code uses, such as torch.distributed.all_reduce."""
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_rooms_know_nothing_of_others(path):
    room = path.relative_to(ROOT).parts[0]
    if room not in ROOMS:
        return
    may = ROOMS[room] | sys.stdlib_module_names
    for name in imports(path):
        ours = name.startswith(f"gcnzc.{room}.")
        assert ours or name.split(".")[0] in may, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_one_way(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "gcnzc" or parts[1] in ("__init__", "__main__"):
        return
    assert parts[1] in ORDER, f"{name_of(path)} has no place in the order"
    later = ORDER[ORDER.index(parts[1]) + 1 :]
    for name in imports(path):
        target = name.split(".")
        assert target[0] != "gcnzc" or len(target) == 1 or target[1] not in later, (
            f"{name_of(path)} imports {name}, which comes after it"
        )


@pytest.mark.parametrize("door", DOORS)
def test_one_door_to_each_outside_thing(door):
    for path in SOURCES:
        if name_of(path) in DOORS[door]:
            continue
        # a part of a package may be reached without an import of its own
        reached = attributes(path) if "." in door else set()
        for name in imports(path) | reached:
            assert not f"{name}.".startswith(f"{door}."), f"{name_of(path)} uses {name}"


def test_only_the_command_line_prints():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                assert name_of(path) == "gcnzc/cli.py", f"{name_of(path)}:{node.lineno} prints"


def test_the_package_defines_nothing_that_only_serves_a_comparison_with_deepspeed():
    for path in SOURCES:
        nodes = ast.walk(ast.parse(path.read_text()))
        definitions = (ast.ClassDef, ast.FunctionDef)
        names = [path.stem, *(each.name for each in nodes if isinstance(each, definitions))]
        for name in names:
            assert "deepspeed" not in name.lower(), f"{name_of(path)} defines {name}"
            assert "padded_sign" not in name.lower(), f"{name_of(path)} defines {name}"


def test_no_module_is_named_like_the_standard_library():
    # a script puts its own folder first on the path, and would hide the module of that name
    for path in [*SOURCES, *(ROOT / "bench").glob("*.py")]:
        if path.parent.name == "gcnzc" or path.stem.startswith("__"):
            continue
        assert path.stem not in sys.stdlib_module_names, name_of(path)


def test_every_folder_of_code_is_a_package_that_is_installed():
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(gcnzc[\w.]*)"', text[text.index("packages = [") :].split("]")[0]))
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in (ROOT / "gcnzc").iterdir()
        if folder.is_dir()
        for path in folder.glob("*.py")
    }
    assert listed == folders | {"gcnzc"}


def test_the_rooms_are_links_without_init():
    for room in ROOMS:
        assert (ROOT / "gcnzc" / room).is_symlink()
        assert not (ROOT / room / "__init__.py").exists()


def test_torch_is_asked_for_huge_pages_before_it_is_imported():
    program = (
        "import os, sys; import gcnzc._allocation as a; del a\n"
        "assert os.environ['THP_MEM_ALLOC_ENABLE'] == sys.argv[1]"
    )
    for given, expected in ((None, "1"), ("0", "0")):
        environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
        if given is not None:
            environment["THP_MEM_ALLOC_ENABLE"] = given
        subprocess.run([sys.executable, "-c", program, expected], env=environment, check=True)
    # the package's first import, so that torch comes after it
    tree = ast.parse((ROOT / "gcnzc" / "__init__.py").read_text())
    first = next(node for node in tree.body if isinstance(node, ast.ImportFrom))
    assert [name.name for name in first.names] == ["_allocation"]
