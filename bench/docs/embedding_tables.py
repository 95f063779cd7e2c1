"""The table of the memory of trained embeddings."""

from bench.docs.result_tables import markdown, newest, read, table, with_caption


@table
def embeddings() -> str:
    """Return the table of the memory of each rule and library."""
    lines = newest([line for line in read("embeddings") if "library" in line], "rule", "library")
    names = {
        ("adagrad", "gcnzc"): "`gcnzc.optim.SparseAdagrad`",
        ("adagrad", "torch"): "`torch.optim.Adagrad`, `nn.Embedding(sparse=True)`",
        ("adam", "gcnzc"): "`gcnzc.optim.SparseAdam`",
        ("adam", "torch"): "`torch.optim.SparseAdam`, `nn.Embedding(sparse=True)`",
    }
    rows = [
        [
            name,
            f"{lines[key]['rows'] / 1e6:g} M",
            f"{lines[key]['table_and_state_bytes'] / 1e9:.2f} GB",
            f"{lines[key]['beside_bytes'] / 1e9:.2f} GB",
        ]
        for key, name in names.items()
        if key in lines
    ]
    heads = ["optimizer", "rows", "table and state", "other memory at the peak"]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.loading.embeddings")
