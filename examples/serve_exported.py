"""Serve the predictions of a model that `gcnzc export` wrote, with torch and NumPy alone.

    gcnzc export runs/mine --out model.pt2
    python examples/serve_exported.py model.pt2 graph.npz --port 8000
    curl 'http://127.0.0.1:8000/?nodes=3,1,4'

graph.npz has `edge_index` (2, E), from sources to destinations, and `node_feat` (N, D). With
--nodes, the script prints the predictions of these nodes instead.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch


class Predictor:
    """Samples the in-neighbours of nodes, and computes their class probabilities."""

    def __init__(self, model, graph):
        extra = {"gcnzc.json": ""}
        self.model = torch.export.load(model, extra_files=extra).module()
        self.about = json.loads(extra["gcnzc.json"])
        with np.load(graph) as arrays:
            source, target = torch.from_numpy(arrays["edge_index"].astype(np.int64))
            self.x = torch.from_numpy(arrays["node_feat"].astype(np.float32))
        # in-edges by destination: those of node t are indices[indptr[t] : indptr[t + 1]]
        self.degrees = torch.bincount(target, minlength=len(self.x))
        self.indptr = torch.nn.functional.pad(self.degrees.cumsum(0), (1, 0))
        self.indices = source[target.argsort(stable=True)]

    def block(self, targets, fanout):
        """Sample in-neighbours: sources, which begin with the targets, indptr and indices."""
        counts, parts = [], []
        for node in targets.tolist():
            found = self.indices[self.indptr[node] : self.indptr[node + 1]]
            if 0 <= fanout < len(found):
                found = found[torch.randperm(len(found))[:fanout]]
            counts.append(len(found))
            parts.append(found)
        ids = torch.cat([targets, *parts])
        position = {}
        for node in ids.tolist():
            position.setdefault(node, len(position))
        indices = torch.tensor([position[node] for node in ids[len(targets) :].tolist()]).long()
        indptr = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0))
        return torch.tensor(list(position)), indptr, indices

    def predict(self, nodes, exact=False):
        """Return a list of dicts: node, class and probability."""
        wrong = [node for node in nodes if not 0 <= node < len(self.x)]
        if wrong:
            raise ValueError(f"no node {wrong[0]}; nodes are numbered from 0 to {len(self.x) - 1}")
        if not nodes:
            return []
        seeds, places = torch.tensor(nodes).unique(return_inverse=True)
        sources, blocks = seeds, []
        for fanout in reversed(self.about["fanouts"]):
            sources, *block = self.block(sources, -1 if exact else fanout)
            degrees = self.degrees[sources]
            blocks.insert(0, (*block, degrees))
        indptr, indices, degrees = map(list, zip(*blocks, strict=True))
        if not self.about["needs_degrees"]:
            degrees = []
        with torch.no_grad():
            logits = self.model(self.x[sources], indptr, indices, degrees)[places]
        values, classes = logits.softmax(1).max(1)
        names = self.about["classes"] or list(range(logits.shape[1]))
        return [
            {"node": nodes[i], "class": names[classes[i]], "probability": float(values[i])}
            for i in range(len(nodes))
        ]


def serve(predictor, port):
    """Answer requests until the process is stopped."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            try:
                words = parse_qs(urlsplit(self.path).query).get("nodes", [""])[0]
                answer, status = predictor.predict([int(n) for n in words.split(",") if n]), 200
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
    parser.add_argument("graph", help=".npz with edge_index and node_feat")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free port")
    parser.add_argument("--nodes", help="predict these nodes, such as 3,1,4, instead of serving")
    parser.add_argument("--exact", action="store_true", help="with --nodes: use all neighbours")
    args = parser.parse_args()
    predictor = Predictor(args.model, args.graph)
    if args.nodes is None:
        serve(predictor, args.port)
    else:
        print(json.dumps(predictor.predict([int(n) for n in args.nodes.split(",")], args.exact)))


if __name__ == "__main__":
    main()
