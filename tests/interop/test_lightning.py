"""Lightning trains from our loaders, and resumes within an epoch."""

import importlib.util
import warnings

import pytest
import torch
from tiny_graph import tiny

import gcnzc

if all(importlib.util.find_spec(name) is None for name in ("lightning", "pytorch_lightning")):
    pytest.skip("Lightning is not installed", allow_module_level=True)

from gcnzc.interop.lightning import DataModule, import_lightning

lightning = import_lightning()

# Lightning's own code uses what torch deprecates, and asks for workers and progress bars
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return gcnzc.load(tiny(200, 2000).write(tmp_path_factory.mktemp("graph") / "tiny"))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = gcnzc.models.gnn.SAGE(5, 8, 3, num_layers=2, dropout=0.0)
        self.seen = []
        self.checked = []

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch.blocks, batch.x), batch.y)

    def training_step(self, batch, index):
        self.seen.append((self.current_epoch, batch.seeds.tolist(), batch.nodes.tolist()))
        return self.loss(batch)

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.checked.append(batch.nodes.tolist())
        self.log("loss", self.loss(batch), batch_size=len(batch.seeds))

    def test_step(self, batch, index):
        self.log("loss", self.loss(batch), batch_size=len(batch.seeds))

    def predict_step(self, batch, index):
        return batch.seeds, self.net(batch.blocks, batch.x).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def trainer(folder, **kwargs):
    names = "logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"
    options = dict.fromkeys(names, False) | {"accelerator": "cpu", "default_root_dir": folder}
    return lightning.Trainer(**(options | kwargs))


def fit(data, folder, checkpoint=None, **kwargs):
    model, module = Model(), DataModule(data, [3, 3], batch_size=16, seed=5)
    trainer(folder, **kwargs).fit(model, datamodule=module, ckpt_path=checkpoint)
    return model


@pytest.mark.parametrize(
    ("stop", "every"),
    [({"max_epochs": 1}, {"every_n_epochs": 1}), ({"max_steps": 9}, {"every_n_train_steps": 9})],
    ids=["after an epoch", "within an epoch"],
)
def test_a_resumed_run_gets_the_same_batches(data, tmp_path, stop, every):
    whole = fit(data, tmp_path, max_epochs=3)
    keep = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=-1, **every)
    part = fit(data, tmp_path, callbacks=[keep], enable_checkpointing=True, **stop)
    (saved,) = (tmp_path / "kept").iterdir()
    rest = fit(data, tmp_path, saved, max_epochs=3)
    assert part.seen + rest.seen == whole.seen
    for mine, other in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_test_and_prediction_batches_are_in_order(data, tmp_path):
    model, module = Model(), DataModule(data, [3, 3], batch_size=32, eval_fanouts=[-1, -1])
    told = trainer(tmp_path).test(model, datamodule=module, verbose=False)
    assert told[0]["loss"] > 0
    parts = trainer(tmp_path).predict(model, datamodule=module)
    seeds = torch.cat([seeds for seeds, _ in parts])
    assert torch.equal(seeds, torch.arange(200))
    # with all neighbours, what is predicted does not depend on the batches
    chosen = torch.tensor([7, 150, 3])
    few = DataModule(data, [3, 3], eval_fanouts=[-1, -1], predict_nodes=chosen)
    ((nodes, labels),) = trainer(tmp_path).predict(model, datamodule=few)
    assert torch.equal(nodes, chosen)
    assert torch.equal(labels, torch.cat([labels for _, labels in parts])[chosen])


def test_a_dataset_without_features_is_rejected(tmp_path):
    data = gcnzc.load(tiny().but(features=None).write(tmp_path / "bare"))
    with pytest.raises(ValueError, match="has no features"):
        DataModule(data, [3, 3])


def test_a_missing_lightning_is_reported(monkeypatch):
    monkeypatch.setattr("gcnzc.interop.lightning.NAMES", ("no_such_package",))
    with pytest.raises(ImportError, match="Lightning is not installed\n\nhint: pip install"):
        import_lightning()


def test_the_lightning_package_in_use_is_imported():
    assert import_lightning() is lightning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_lightning()
