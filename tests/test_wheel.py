"""The wheel that is built from the source distribution: its files, its types, and a first run."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
# what a user's first program has, with its types
PROGRAM = """
    import torch

    import gcnzc
    from gcnzc.exchange import Group
    from gcnzc.models import SAGE
    from gcnzc.optim import OneBitAdam

    graph = gcnzc.Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), 3)
    loader = gcnzc.Loader(
        graph,
        gcnzc.FeatureTable(torch.rand(3, 4)),
        torch.arange(3),
        fanouts=[2],
        batch_size=2,
        labels=torch.arange(3),
    )
    model: SAGE = SAGE(4, 8, 3, num_layers=1)
    optimizer = OneBitAdam(model.parameters(), group=Group(0, 1), lr=0.1)
    for batch in loader:
        assert batch.x is not None and batch.y is not None
        logits: torch.Tensor = model(batch.blocks, batch.x)
        torch.nn.functional.cross_entropy(logits, batch.y).backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the extracted source distribution, as pip does where there is no wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    build(copy, "sdist", folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    build(next(each for each in folder.glob("gcnzc-*") if each.is_dir()), "wheel", folder)
    return next(folder.glob("*.whl"))


def build(source, kind, to):
    subprocess.check_output([sys.executable, "-c", BUILD.format(kind), to], cwd=source)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment with the wheel, and the dependencies of the one of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # behind the environment's own packages; an editable install there has no effect here
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin/python"


def run(python, *words, folder):
    environment = os.environ | {"GCNZC_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([python, *words], check=False, **options)


@pytest.mark.processes
def test_the_wheel_has_every_module_and_the_marker_of_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if "dist-info" not in name}
    words = ["git", "ls-files", "gcnzc", "kernels", "datasets"]
    listed = subprocess.check_output(words, cwd=ROOT, text=True).split()
    files = {name for name in listed if not (ROOT / name).is_symlink()}
    expected = {name if name.startswith("gcnzc/") else f"gcnzc/{name}" for name in files}
    assert found == expected


@pytest.mark.processes
def test_the_wheel_is_imported_without_the_checkout(installed, tmp_path):
    shown = run(installed, "-c", "import gcnzc.cli; print(gcnzc.cli.__file__)", folder=tmp_path)
    assert Path(shown.stdout.strip()).is_relative_to(installed.parents[1]), shown.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_the_wheel_trains_without_the_checkout(installed, tmp_path):
    graph = ["--nodes", "300", "--edges", "900", "--num-features", "8", "--classes", "3"]
    sizes = ["--hidden", "8", "--fanouts", "3", "--epochs", "1"]
    for words in (
        ["make", "raw", *graph],
        ["prepare", "raw", "data"],
        ["train", "data", *sizes, "--out", "run"],
        ["evaluate", "run"],
    ):
        done = run(installed, "-m", "gcnzc", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.slow
def test_a_program_that_uses_the_public_names_passes_mypy_strict(installed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    assert run(installed, program, folder=tmp_path).returncode == 0
    # torch does not declare the types of Tensor.backward
    mypy = ["-m", "mypy", "--strict", "--allow-untyped-calls"]
    done = run(installed, *mypy, program, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import gcnzc\n\ngcnzc.Loader(1, 2, 3, 4, 5)\n")
    assert run(installed, *mypy, wrong, folder=tmp_path).returncode == 1
