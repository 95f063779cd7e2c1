"""Documented accuracies are measured by commands that exist."""

import json

import pytest

from bench import harness
from bench.training import accuracy
from gcnzc.cli import parser

QUICK = "--model sage --layers 1 --fanouts 4 --hidden 8 --lr 0.05 --batch-size 256 --epochs"


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "accuracy.jsonl"


@pytest.mark.parametrize("recipe", accuracy.RECIPES, ids=lambda recipe: recipe.graph)
def test_recipes_are_options_of_train(recipe):
    assert recipe.graph in accuracy.MADE_BY
    assert parser.parse(["train", "data", *recipe.options.split()]).epochs >= 1


def test_seeds_are_averaged_and_held_against_the_target(monkeypatch, results):
    recipes = [accuracy.Recipe("digits", target, f"{QUICK} 3") for target in (30.0, 100.0)]
    monkeypatch.setattr(accuracy, "RECIPES", recipes)
    assert accuracy.main(["digits", "--seeds", "2"]) == 1
    low, high = map(json.loads, results.read_text().splitlines())
    assert low["reached"]
    assert not high["reached"]
    first, second = low["tests_percent"]
    assert first != second
    assert low["test_percent"] == pytest.approx((first + second) / 2, abs=0.01)
    assert low["spread_percent"] == pytest.approx(abs(first - second) / 2**0.5, abs=0.01)
    assert low["tests_percent"] == high["tests_percent"]
    assert low["command"].endswith("--epochs 3 --sampler gcnzc")
