"""Serve the predictions of a model that `gcnzc export` wrote, with torch and NumPy alone.

    gcnzc export runs/mine --out model.pt2
    python examples/serve_exported.py model.pt2 data/mine --port 8000
    curl 'http://127.0.0.1:8000/?nodes=3,1,4'

data/mine is a folder that `gcnzc prepare` wrote, whose files are memory-mapped. With --nodes, the
script prints the predictions of these nodes instead.
"""

import argparse
import json
import sys
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch


class Features:
    """The features of a prepared folder, as float32 rows, and the labels of training nodes."""

    def __init__(self, folder, label_columns):
        meta = json.loads((folder / "meta.json").read_text())
        self.about, self.num_nodes = meta["features"], meta["num_nodes"]
        if self.about is None or self.about["kind"] == "sparse":
            raise ValueError(f"{folder} has no dense features, which this script needs")
        self.columns, self.label_columns = self.about["columns"], label_columns
        self.values = np.load(folder / "features.npy", mmap_mode="r")
        self.scales = None
        if self.about.get("scales"):
            self.scales = np.load(folder / "features_scales.npy", mmap_mode="r")
        if label_columns:
            outputs = meta["num_tasks"] if meta["num_tasks"] > 1 else meta["num_classes"]
            if outputs != label_columns:
                raise ValueError(f"{folder} has labels of {outputs} columns, not {label_columns}")
            self.labels = np.load(folder / "labels.npy", mmap_mode="r")
            self.is_train = np.zeros(self.num_nodes, dtype=bool)
            self.is_train[np.load(folder / "split" / "train.npy")] = True

    def rows(self, ids):
        """Return (n, columns) float32, with the columns of labels that the model needs."""
        rows = torch.from_numpy(self.values[ids, : self.columns])
        if self.about["kind"] == "codes":
            # 8 or 16 bits of a dtype that NumPy lacks, or int8
            rows = rows.view(getattr(torch, self.about["dtype"])).float()
        rows = rows.float()
        if self.scales is not None and self.about["scales"] == "row":
            rows *= torch.from_numpy(self.scales[ids])[:, None]
        elif self.scales is not None:
            repeated = np.repeat(self.scales, self.about["scale_columns"])
            rows *= torch.from_numpy(repeated[: self.columns])
        return torch.cat([rows, self.label_rows(ids)], dim=1) if self.label_columns else rows

    def label_rows(self, ids):
        """Return the labels of training nodes as rows; rows of other nodes are 0."""
        rows = torch.zeros(len(ids), self.label_columns)
        found = np.flatnonzero(self.is_train[ids])
        labels = torch.from_numpy(np.asarray(self.labels[ids[found]]))
        if labels.ndim == 1:
            rows[found, labels] = 1.0
        else:
            rows[found] = (2 * labels.float() - 1).nan_to_num(0.0)
        return rows


class Predictor:
    """Samples the in-neighbours of nodes, and computes their probabilities."""

    def __init__(self, model, folder):
        if not zipfile.is_zipfile(model):
            raise ValueError(f"{model} is not a file that `gcnzc export` wrote, or is incomplete")
        extra = {"gcnzc.json": ""}
        self.model = torch.export.load(model, extra_files=extra).module()
        self.about = json.loads(extra["gcnzc.json"])
        if "node_types" in self.about:
            raise ValueError(
                f"{model} is of a heterogeneous graph, and this script serves graphs of one node "
                "type"
            )
        if self.about["task"] != "node":
            raise ValueError(f"{model} predicts links, and this script predicts labels of nodes")
        self.features = Features(Path(folder), self.about["label_columns"])
        needed = self.about["in_features"] - self.about["label_columns"]
        if self.features.columns != needed:
            raise ValueError(
                f"{model} needs {needed} columns of features, and {folder} has "
                f"{self.features.columns}"
            )
        # in-edges by target: those of node t are indices[indptr[t] : indptr[t + 1]]
        self.indptr = np.load(Path(folder) / "indptr.npy", mmap_mode="r")
        self.indices = np.load(Path(folder) / "indices.npy", mmap_mode="r")

    def block(self, targets, fanout):
        """Sample in-neighbours: sources, which begin with the targets, indptr and indices."""
        counts, parts = [], []
        for node in targets.tolist():
            found = torch.from_numpy(self.indices[self.indptr[node] : self.indptr[node + 1]].copy())
            if 0 <= fanout < len(found):
                found = found[torch.randperm(len(found))[:fanout]]
            counts.append(len(found))
            parts.append(found.long())
        ids = torch.cat([targets, *parts])
        position = {}
        for node in ids.tolist():
            position.setdefault(node, len(position))
        indices = torch.tensor([position[node] for node in ids[len(targets) :].tolist()]).long()
        indptr = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0))
        return torch.tensor(list(position)), indptr, indices

    def predict(self, nodes, exact=False):
        """Return a list of dicts: node, class and probability, or the probabilities of tasks."""
        count = self.features.num_nodes
        wrong = [node for node in nodes if not 0 <= node < count]
        if wrong:
            raise ValueError(f"no node {wrong[0]}; nodes are numbered from 0 to {count - 1}")
        seeds, places = torch.tensor(nodes).unique(return_inverse=True)
        sources, blocks = seeds, []
        for fanout in reversed(self.about["fanouts"]):
            sources, *block = self.block(sources, -1 if exact else fanout)
            ids = sources.numpy()
            degrees = torch.from_numpy(self.indptr[ids + 1] - self.indptr[ids])
            blocks.insert(0, (*block, degrees))
        indptr, indices, degrees = map(list, zip(*blocks, strict=True))
        if not self.about["needs_degrees"]:
            degrees = []
        with torch.no_grad():
            x = self.features.rows(sources.numpy())
            logits = self.model(x, indptr, indices, degrees)[places]
        if self.about["num_tasks"] > 1:
            rows = zip(nodes, logits.sigmoid().tolist(), strict=True)
            return [{"node": node, "probabilities": row} for node, row in rows]
        values, classes = logits.softmax(1).max(1)
        names = self.about["classes"] or list(range(logits.shape[1]))
        return [
            {"node": nodes[i], "class": names[classes[i]], "probability": float(values[i])}
            for i in range(len(nodes))
        ]


def parse_nodes(text):
    """Return the node ids of a text such as 3,1,4."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of node ids, such as 3,1,4") from None


def serve(predictor, port):
    """Answer requests until the process is stopped."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            try:
                words = parse_qs(urlsplit(self.path).query).get("nodes", [""])[0]
                answer, status = predictor.predict(parse_nodes(words)), 200
            except ValueError as error:
                answer, status = {"error": str(error)}, 400
            body = (json.dumps(answer) + "\n").encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = HTTPServer(("127.0.0.1", port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/?nodes=0", flush=True)
    server.serve_forever()


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="file that `gcnzc export` wrote")
    parser.add_argument("graph", help="folder that `gcnzc prepare` wrote")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free port")
    parser.add_argument("--nodes", help="predict these nodes, such as 3,1,4, instead of serving")
    parser.add_argument("--exact", action="store_true", help="with --nodes: use all neighbours")
    args = parser.parse_args()
    for path, kind in ((args.model, "file"), (f"{args.graph}/meta.json", "prepared folder with a")):
        if not Path(path).is_file():
            remedy = "; `gcnzc prepare SOURCE FOLDER` writes one" * (path != args.model)
            parser.error(f"there is no {kind} {path}{remedy}")
    try:
        predictor = Predictor(args.model, args.graph)
        if args.nodes is None:
            serve(predictor, args.port)
        else:
            print(json.dumps(predictor.predict(parse_nodes(args.nodes), args.exact)))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
