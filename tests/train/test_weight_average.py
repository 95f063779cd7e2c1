"""Averages of weights equal their definition, on one worker and on several."""

import math

import pytest
import torch
from processes import results
from torch import nn
from training import assert_same_weights, planted, saved, train_as_worker

from gcnzc.exchange import Group, lockstep, run
from gcnzc.train import checkpoint
from gcnzc.train.config import TrainConfig
from gcnzc.train.run import train
from gcnzc.train.weight_average import build_average


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    graph = planted(tmp_path_factory, 400, 2400, 8, 3)
    sizes = {"fanouts": (3, 3), "hidden": 8, "batch_size": 30, "threads": 1}
    return TrainConfig(data=graph, **sizes, epochs=4, lr=0.01, dropout=0.2, model="sage:norm=batch")


class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def change(self, number):
        with torch.no_grad():
            for each in (*self.parameters(), *self.buffers()):
                if each.is_floating_point():
                    each.copy_(
                        torch.rand(each.shape, generator=torch.Generator().manual_seed(number))
                    )


def average_of(model, **options):
    return build_average(TrainConfig(**options).training, model)


def test_the_averages_are_those_of_their_definitions():
    model = Small()
    ema = average_of(model, average="ema:decay=0.5")
    swa = average_of(model, average="swa:start=0.5", epochs=4)
    weights, statistics, by_epoch = [], [], []
    for epoch in range(4):
        for step in range(3):
            model.change(10 * epoch + step)
            weights.append(model[0].weight.detach().clone())
            ema.end_step()
            swa.end_step()
        statistics.append(model[1].running_mean.clone())
        by_epoch.append(weights[-1])
        ema.end_epoch(epoch)
        swa.end_epoch(epoch)
        swa.end_epoch(epoch)  # of a run whose last epoch is evaluated later
        if epoch < 2:
            assert run(swa.build_evaluated_model(), Group()) is model
    expected, statistic = weights[0], statistics[0]
    decays = [min(0.5, (1 + number) / (10 + number)) for number in range(12)]
    assert decays[7] < 0.5 == decays[8]
    for decay, value in zip(decays[1:], weights[1:], strict=True):
        expected = decay * expected + (1 - decay) * value
    for epoch, value in enumerate(statistics[1:], start=1):
        kept = math.prod(decays[3 * epoch : 3 * epoch + 3])
        statistic = statistic.lerp(value, 1 - kept)
    found = run(ema.build_evaluated_model(), Group())
    torch.testing.assert_close(found[0].weight, expected)
    torch.testing.assert_close(found[1].running_mean, statistic)
    assert ema.updates == 12
    found = run(swa.build_evaluated_model(), Group())
    torch.testing.assert_close(found[0].weight, (by_epoch[2] + by_epoch[3]) / 2)
    torch.testing.assert_close(found[1].running_mean, (statistics[2] + statistics[3]) / 2)
    assert swa.updates == 2
    # the averages are not those of the model that is trained
    assert torch.equal(model[0].weight, weights[-1])
    assert average_of(model) is None


def test_workers_with_other_weights_evaluate_their_mean():
    models, averages = [Small() for _ in range(3)], []
    for number, model in enumerate(models):
        model.change(number)
        averages.append(average_of(model, average="ema"))
        averages[-1].end_step()
        averages[-1].end_epoch(0)
    found = lockstep([each.build_evaluated_model() for each in averages]).results
    mean = sum(model[0].weight for model in models) / 3
    for each in found:
        torch.testing.assert_close(each[0].weight, mean)
        assert torch.equal(each[0].weight, found[0][0].weight)
    # the same for a run that resumes with one worker
    one = average_of(Small(), average="ema")
    one.load_state_dicts([each.state_dict() for each in averages])
    torch.testing.assert_close(run(one.build_evaluated_model(), Group())[0].weight, mean)
    with pytest.raises(RuntimeError, match="invalid for input of size 1"):
        one.load_state_dicts([{**one.state_dict(), "parameters": [torch.zeros(1)] * 4}])
    first = one.state_dict()["parameters"][:1]
    with pytest.raises(ValueError, match=r"(shorter|longer) than argument"):
        one.load_state_dicts([{**one.state_dict(), "parameters": first}])


def test_the_mean_of_the_last_epochs_is_evaluated_and_kept(config, tmp_path):
    states = []
    for epochs in (3, 4):
        train(config.replace(epochs=epochs), tmp_path / f"{epochs}")
        states.append(saved(tmp_path / f"{epochs}")["model"])
    swa = config.replace(average="swa:start=0.5", evaluate_every=4)
    line = train(swa, tmp_path / "swa")
    best = checkpoint.load(tmp_path / "swa" / "best.pt")
    for name, value in best["model"].items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (states[0][name] + states[1][name]) / 2, msg=name)
    assert torch.equal(
        saved(tmp_path / "swa")["model"]["layers.0.own.weight"], states[1]["layers.0.own.weight"]
    )
    record = (tmp_path / "swa" / "record.jsonl").read_text().splitlines()
    assert '"averaged": 2' in record[-1]
    assert line["options"]["average"] == "swa:start=0.5"


@pytest.mark.parametrize(
    "strategy", ["diloco:local_steps=4", pytest.param("average", marks=pytest.mark.slow)]
)
def test_two_workers_resume_bit_for_bit(strategy, config, tmp_path):
    config = config.replace(epochs=2, strategy=strategy, average="ema:decay=0.9", batch_size=15)
    whole = results(2, tmp_path, train_as_worker, config, tmp_path / "whole")
    stopped = results(2, tmp_path, train_as_worker, config, tmp_path / "cut", 11)
    assert stopped[0].startswith("stopped in epoch ")
    assert saved(tmp_path / "cut")["in_epoch"]
    again = config.replace(resume=tmp_path / "cut")
    found = results(2, tmp_path, train_as_worker, again, tmp_path / "cut")
    assert found[0]["test_accuracy"] == found[1]["test_accuracy"] == whole[0]["test_accuracy"]
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
