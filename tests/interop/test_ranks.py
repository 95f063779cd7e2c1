"""Drop-in loaders on several ranks: with Lightning, with Accelerate, and without either."""

import importlib.util
import os
import warnings
from collections import Counter

import pytest
import torch
from processes import results

for name in ("torch_geometric", "dgl", "lightning"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
ITEMS, BATCH_SIZE, EPOCHS, RANKS = 24, 4, 2, 2
# within the second epoch, of three steps
SAVED_STEP = 4


def make_loaders(**kwargs):
    """A loader of every kind, each of which iterates over ITEMS items."""
    from torch_geometric.data import Data

    from gcnzc.interop.dgl import DataLoader, import_dgl
    from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader

    edges = torch.randint(ITEMS, (2, 200), generator=torch.Generator().manual_seed(3))
    data = Data(x=torch.arange(ITEMS).view(-1, 1).float(), edge_index=edges)
    dgl = import_dgl()
    graph, sampler = dgl.graph(tuple(edges), num_nodes=ITEMS), dgl.dataloading.NeighborSampler([2])
    kwargs = {"batch_size": BATCH_SIZE, "shuffle": True} | kwargs
    return {
        "nodes": NeighborLoader(data, [2, 2], **kwargs),
        "links": LinkNeighborLoader(data, [2], edges[:, :ITEMS], **kwargs),
        "dgl": DataLoader(graph, torch.arange(ITEMS), sampler, **kwargs),
    }


def items_of(name, batch):
    return batch[1].tolist() if name == "dgl" else batch.input_id.tolist()


def drawn(name, batch):
    """Neighbours, which differ from epoch to epoch."""
    return batch[0].tolist() if name == "dgl" else batch.n_id.tolist()


def train_with_lightning(folder):
    """Which items each fit's epochs and a prediction gave, by the kind of loader."""
    from gcnzc.interop.lightning import import_lightning

    lightning = import_lightning()

    class Model(lightning.LightningModule):
        def __init__(self, has_loaders=False):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.has_loaders = has_loaders
            self.seen = []

        def train_dataloader(self):
            return make_loaders() if self.has_loaders else None

        def training_step(self, batch, index):
            assert all(batch[name] is not None for name in ("nodes", "links", "dgl"))
            self.seen += [
                (self.current_epoch, name, items_of(name, batch[name]), drawn(name, batch[name]))
                for name in batch
            ]
            return self.weight.sum()

        def predict_step(self, batch, index):
            return batch.input_id.tolist()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == SAVED_STEP:
                trainer.save_checkpoint(folder / "within.ckpt")

    def trainer(*callbacks):
        names = "logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"
        options = dict.fromkeys(names, False) | {"accelerator": "cpu", "default_root_dir": folder}
        options |= {"strategy": "ddp", "devices": RANKS, "max_epochs": EPOCHS}
        return lightning.Trainer(callbacks=list(callbacks), **options)

    found = {}
    # Lightning makes a loader anew from its attributes, or from the arguments that a hook gave
    found["given"] = given = Model()
    trainer(Save()).fit(given, make_loaders(seed=7))
    found["resumed"] = resumed = Model()
    trainer().fit(resumed, make_loaders(seed=7), ckpt_path=folder / "within.ckpt")
    found["in a hook"] = hook = Model(has_loaders=True)
    trainer().fit(hook)
    predicted = trainer().predict(Model(), make_loaders(shuffle=False)["nodes"])
    seen = {how: model.seen for how, model in found.items()}
    return seen, [item for part in predicted for item in part]


@pytest.mark.processes
def test_lightning_gives_each_rank_its_share(found):
    found = [of_rank["lightning"] for of_rank in found]
    for how in ("given", "in a hook"):
        for name in ("nodes", "links", "dgl"):
            epochs = []
            for epoch in range(EPOCHS):
                shares = [
                    [items for at, kind, items, _ in seen[how] if (at, kind) == (epoch, name)]
                    for seen, _ in found
                ]
                assert [[len(part) for part in share] for share in shares] == [[4, 4, 4]] * RANKS
                epochs.append([item for share in shares for part in share for item in part])
            assert [sorted(epoch) for epoch in epochs] == [list(range(ITEMS))] * EPOCHS, (how, name)
            assert epochs[0] != epochs[1]
    for seen, _ in found:
        assert seen["resumed"] == seen["given"][SAVED_STEP * 3 :]
    predicted = Counter(item for _, items in found for item in items)
    assert predicted == Counter(range(ITEMS))


def load_without_ranks():
    """The warnings of iterations over loaders of all kinds, without and with ranks given."""
    import torch.distributed as dist

    warned = []
    ranks = {"rank": 0, "world_size": 1}, {"rank": dist.get_rank(), "world_size": 2}
    for kwargs in ({}, {}, *ranks):
        for name, loader in make_loaders(**kwargs).items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                items = [item for batch in loader for item in items_of(name, batch)]
            warned += [str(each.message) for each in caught if "ranks" in str(each.message)]
            assert len(items) == ITEMS // kwargs.get("world_size", 1)
    return warned


@pytest.mark.processes
def test_a_loader_that_repeats_all_items_in_each_rank_warns_once(found):
    for of_rank in found:
        (message,) = of_rank["warned"]
        assert "torch.distributed has 2 ranks, but this loader yields all 24 items" in message
        assert "hint: rank=dist.get_rank(), world_size=dist.get_world_size()" in message


def train_with_accelerate(num_workers=0):
    """The items that each rank and epoch gave, by the kind of loader."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == RANKS
    found = {}
    for name, loader in make_loaders(num_workers=num_workers).items():
        prepared = accelerator.prepare(loader)
        epochs = (list(prepared) for _ in range(EPOCHS))
        found[name] = [[(items_of(name, b), drawn(name, b)) for b in epoch] for epoch in epochs]
    return found


def use_loaders(folder):
    """What one rank gets, without a trainer and under each that is installed."""
    import torch.distributed as dist

    os.environ["TORCHELASTIC_RUN_ID"] = "ranks"
    dist.init_process_group("gloo")
    # ranks may well draw different random numbers
    torch.manual_seed(dist.get_rank())
    found = {"warned": load_without_ranks()}
    warnings.simplefilter("ignore")
    found["lightning"] = train_with_lightning(folder)
    if HAS_ACCELERATE:
        found["accelerate"] = train_with_accelerate()
    return found


def use_accelerate_with_workers():
    warnings.simplefilter("ignore")
    torch.manual_seed(int(os.environ["RANK"]))
    return {"accelerate": train_with_accelerate(num_workers=1)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found: one launch for all tests, since to import the libraries takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    return results(RANKS, folder, use_loaders, folder)


def check_shares_of_accelerate(found):
    found = [of_rank["accelerate"] for of_rank in found]
    for name in ("nodes", "links", "dgl"):
        of_epochs = zip(*(rank[name] for rank in found), strict=True)
        epochs = [[[items for items, _ in share] for share in epoch] for epoch in of_epochs]
        for epoch in epochs:
            assert [[len(part) for part in share] for share in epoch] == [[4, 4, 4]] * RANKS
            taken = [item for share in epoch for part in share for item in part]
            assert sorted(taken) == list(range(ITEMS)), name
        assert epochs[0] != epochs[1]


@pytest.mark.processes
@pytest.mark.skipif(not HAS_ACCELERATE, reason="Accelerate is not installed")
def test_accelerate_gives_each_rank_its_share(found):
    check_shares_of_accelerate(found)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_ACCELERATE, reason="Accelerate is not installed")
def test_accelerate_with_worker_processes_gives_each_rank_its_share(tmp_path):
    check_shares_of_accelerate(results(RANKS, tmp_path, use_accelerate_with_workers))
