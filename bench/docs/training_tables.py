"""Compute tables of published recipes and of mixed precision, for the page on accuracy."""

from bench.docs.result_tables import markdown, newest, read, spread, table, with_caption


@table
def presets() -> str:
    """Return the table of the scores of presets, beside the published ones."""
    lines = newest(read("presets"), "preset")
    rows = []
    for name, line in sorted(lines.items()):
        metric = " (ROC AUC)" if line["metric"] == "rocauc" else ""
        epochs = f"{max(line['epochs'])}"
        gap = line["test_percent"] - line["published_percent"]
        published = f"{line['published_percent']:.2f}"
        rows.append(
            [
                f"`{name}`{metric}",
                line["split"],
                spread(line),
                published,
                f"{gap:+.2f}",
                len(line["tests_percent"]),
                epochs,
                f"{line['epoch_s']:.3g}",
            ]
        )
    heads = ["preset", "split", "test, %", "published, %", "difference", "seeds", "epochs"]
    heads.append("seconds per epoch")
    command = "python -m bench.training.presets PRESET"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def precision() -> str:
    """Return the table of mixed precision compared with float32, over the same seeds."""
    lines = newest(read("precision"), "case", "precision")
    rows = []
    for (name, kind), line in sorted(lines.items()):
        low, high = line["interval_points"]
        rows.append(
            [
                f"`{name}`",
                f"`{kind}`",
                f"{line['float32_percent']:.2f}",
                f"{line['test_percent']:.2f}",
                f"{line['difference_points']:+.2f} ({low:+.2f} to {high:+.2f})",
                line["seeds"],
                f"{line['speedup']:.2f}",
            ]
        )
    heads = ["case", "precision", "float32, %", "test, %", "difference (95 % interval)", "seeds"]
    heads.append("float32's time of an epoch, divided")
    command = "python -m bench.training.precision CASE"
    return with_caption(markdown(heads, rows), lines.values(), command)
