#!/usr/bin/env python3
"""How well a gate foretells KVzip's scores, and how a model answers from the tokens that either keeps.

Documents are held-out text with the sentences of held-out questions. A question comes after the document as a later
turn, which is kept whole. Answers count as in evaluate.py.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch

import evaluate
import tasks
from gate import Gate
from reader import SINKS, Reader

LATEST = 64  # newest tokens that are always kept, as the first SINKS are


def ranks(numbers):
    """Ranks of a row's numbers; equal ones share their mean rank."""
    _, kind, count = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[kind]


def spearman(one, other):
    """Mean over the heads of a layer, [layers]."""
    return [float(np.mean([np.corrcoef(ranks(a), ranks(b))[0, 1] for a, b in zip(x, y)]))
            for x, y in zip(one.numpy(), other.numpy())]


def largest(scores, share):
    """Flags of the rows' largest numbers, of each row the same share. scores [..., n]."""
    count = round(share * scores.shape[-1])
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)


def kept_tokens(scores, share):
    """What stays of a text at a share of all layers' heads: [layers, kv_heads, tokens]."""
    scores = scores.clone()
    scores[..., :SINKS] = torch.inf
    scores[..., -LATEST:] = torch.inf
    return largest(scores.flatten(), share).view_as(scores)


def scores_of(reader, gate, text):
    """Each scorer's opinion of a text, and the cache behind it."""
    hidden, cache = reader.read(text)
    keys, values = (torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values"))
    with torch.no_grad():
        learnt = gate(hidden)
    return {"kvzip": reader.kvzip_scores(text, cache), "gate": learnt, "value_norm": values.norm(dim=-1),
            "key_norm": -keys.norm(dim=-1), "random": torch.rand(learnt.shape)}, cache


def agreement(scores, share):
    """Spearman's correlation with KVzip's scores by layer, overlap of the largest, over the model and by head."""
    scores = {name: rows[..., SINKS:] for name, rows in scores.items()}
    target = scores.pop("kvzip")
    model, heads = largest(target.flatten(), share), largest(target, share)
    found = {}
    for name, rows in scores.items():
        both, both_heads = largest(rows.flatten(), share) & model, largest(rows, share) & heads
        found[name] = {"spearman": spearman(rows, target), "model": (both.sum() / model.sum()).item(),
                       "head": (both_heads.sum() / heads.sum()).item(),
                       "layer": (both_heads.sum((1, 2)) / heads.sum((1, 2))).tolist()}
    return found


def right(reader, cache, turn, answer, kept=None):
    """Whether the answer is the likeliest one; `turn` is the question with the answer."""
    guess = reader.guesses(turn, cache, kept)
    return guess[-len(answer) - 1:-1] == answer


def mean(numbers):
    return np.mean(numbers, 0).round(3).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--gate", type=Path, help="default: gate/gate.safetensors in the model's folder")
    parser.add_argument("--text", type=Path, default=evaluate.DEFAULT_TEXT)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--families", nargs="+", default=["single", "multi_key", "variable_tracking"])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.3, 0.1])
    parser.add_argument("--overlap", type=float, default=0.3, help="share of the tokens whose overlap is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    renderer = evaluate.load_text(args.model, args.text)
    reader = Reader(args.model, renderer.processor, args.device)
    gate = Gate(reader.layers, reader.hidden_size, reader.kv_heads, reader.heads).to(args.device)
    gate.restore(args.gate or args.model / "gate" / "gate.safetensors")
    agreements, answers, begun = [], {}, time.time()
    for family in args.families:
        rng = random.Random(f"{family} {args.context} {args.seed}")
        for sample in range(args.samples):
            task = tasks.evaluation_task(family, rng)
            row, spans = renderer.render(rng, task, document=args.context)
            row = [int(token) for token in row]
            first, end, _ = spans[0]
            begin = first - len(renderer.encode(tasks.SPEC["question"].format(question=task.turns[0][1])
                                                + tasks.SPEC["answer"]))
            scores, cache = scores_of(reader, gate, row[:begin])
            agreements.append(agreement(scores, args.overlap))
            count = answers.setdefault(family, {})
            turn, answer = row[begin:end], row[first:end]
            count["full"] = count.get("full", 0) + right(reader, cache, turn, answer)
            for share in args.shares:
                for name, rows in scores.items():
                    at = f"{name} {share}"
                    count[at] = count.get(at, 0) + right(reader, cache, turn, answer, kept_tokens(rows, share))
        print(f"{family}, {args.samples} documents, {(time.time() - begun) / 60:.1f} minutes: {count}", flush=True)
    figures = {name: {kind: mean([found[name][kind] for found in agreements]) for kind in agreements[0][name]}
               for name in agreements[0]}
    for name, found in figures.items():
        print(name, found)
    if args.json:
        args.json.write_text(json.dumps({"samples": args.samples, "right": answers, "agreement": figures}))


if __name__ == "__main__":
    main()
