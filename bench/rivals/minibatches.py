"""Load the minibatches of cases with PyG's loaders, or with loaders of the same signature.

    python bench/rivals/minibatches.py CASES OUT [--sampler pyg-lib|torch-sparse]

in the environment of PyG; see bench/interop/pyg_sampler.py, which writes CASES and reads OUT. A
case that the library does not support has the message of its error.
"""

import argparse
import importlib.metadata
import warnings

import torch
import torch_geometric.loader
import torch_geometric.typing

LIBRARIES = ("pyg-lib", "torch-sparse")


def select(library):
    """Let PyG's loaders sample with a library, although both are installed.

    Raises:
        ImportError: the library is not installed.
    """
    typing = torch_geometric.typing
    if not (typing.WITH_PYG_LIB if library == "pyg-lib" else typing.WITH_TORCH_SPARSE):
        raise ImportError(f"{library} is not installed")
    if library == "torch-sparse":
        for flag in ("PYG_LIB", "EDGE_TIME_NEIGHBOR_SAMPLE", "WEIGHTED_NEIGHBOR_SAMPLE"):
            setattr(typing, f"WITH_{flag}", False)


def load(case, loaders, collect):
    """Return what `collect` returns for the minibatches of each epoch, or an error's message.

    Args:
        case: a dict of the class's name `loader`, its `data` and `arguments`, and `epochs`.
        loaders: a module with the classes.
        collect: function of the minibatches of an epoch.
    """
    try:
        loader = getattr(loaders, case["loader"])(case["data"], **case["arguments"])
        return [collect(loader) for _ in range(case["epochs"])]
    except (ImportError, ValueError) as error:
        return str(error).splitlines()[0]


def first_hop(loader):
    """Return, of an epoch with one minibatch, the sampled in-edges of the seeds, and the sizes.

    Returns:
        Two dicts: the edge ids by edge type, and the numbers of nodes and edges by type.
    """
    (batch,) = loader
    if not hasattr(batch, "node_types"):
        is_first = batch.edge_index[1] < batch.batch_size
        return {"": batch.e_id[is_first]}, {"nodes": len(batch.n_id), "edges": batch.num_edges}
    edges, sizes = {}, {}
    for node_type in batch.node_types:
        sizes[node_type] = len(batch[node_type].n_id)
    for edge_type in batch.edge_types:
        own, target = batch[edge_type], batch[edge_type[2]]
        sizes[edge_type] = own.edge_index.shape[1]
        if "batch_size" in target:
            edges[edge_type] = own.e_id[own.edge_index[1] < target.batch_size]
    return edges, sizes


def versions():
    """Return the versions of the installed libraries by name."""
    found = {"torch": torch.__version__, "torch_geometric": torch_geometric.__version__}
    for name in ("pyg_lib", "torch_sparse"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # built, but not installed by pip
            module = torch_geometric.typing.__dict__.get(name)
            found[name] = getattr(module, "__version__", "none")
    return found


def main():
    """Load the cases of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases")
    parser.add_argument("out")
    parser.add_argument("--sampler", choices=LIBRARIES, default="pyg-lib")
    options = parser.parse_args()
    select(options.sampler)
    # PyG warns that the arguments `directed` and torch-sparse are deprecated
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    cases = torch.load(options.cases, weights_only=False)
    results = {}
    for name, case in cases.items():
        collect = first_hop if case["sampled"] else list
        results[name] = load(case, torch_geometric.loader, collect)
    torch.save({"results": results, "versions": versions()}, options.out)


if __name__ == "__main__":
    main()
