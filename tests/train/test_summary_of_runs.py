"""The summary of several runs."""

import json
import math

import pytest

from gcnzc.train.repeated_runs import format_summary, summarize


def result(seed, valid, test):
    return {
        "run": f"r/seed-{seed}", "seed": seed, "metric": "rocauc", "best_epoch": 1, "epochs": 2,
        "epoch_s": 0.5, "valid_rocauc": valid, "test_rocauc": test,
    }  # fmt: skip


def test_means_and_sample_standard_deviations(tmp_path):
    line = summarize(tmp_path, [result(0, 0.5, 0.25), result(1, 0.7, 0.75)])
    assert line["test_rocauc"] == 0.5
    assert line["test_rocauc_std"] == pytest.approx(0.5 / math.sqrt(2))
    assert "test rocauc 0.5000 ± 0.3536, mean" in format_summary(line)


def test_scores_that_are_not_defined_are_null(tmp_path):
    # labels of a single class have no ROC AUC
    line = summarize(tmp_path, [result(0, None, 0.25), result(1, None, None)])
    assert math.isnan(line["valid_rocauc"])
    assert line["valid_rocauc_std"] is None
    assert line["test_rocauc_std"] is None
    assert "test rocauc nan ± nan, mean" in format_summary(line)
    assert json.dumps(line["results"][1]["test_rocauc"]) == "null"
