"""Compute tables of published recipes, for the page on accuracy."""

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
