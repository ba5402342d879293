#!/usr/bin/env python3
"""Exact answers of a model on held-out text, by family and document length.

Answers are teacher-forced: an answer counts when every one of its tokens, the closing newline included,
is the likeliest one. For the first turn that is what greedy decoding gives.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import sentencepiece as spm
import torch
from transformers import LlamaForCausalLM

import tasks

DEFAULT_TEXT = Path(__file__).resolve().parents[2] / "data" / "opticks.txt"


def load(folder, dtype, attention="sdpa", device="cuda"):
    """The model in one precision."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).to(device).eval()


def load_text(folder, text):
    """A renderer over the evaluation text."""
    processor = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return tasks.Renderer(processor, np.asarray(processor.encode(text.read_text()), np.uint16))


@torch.no_grad()
def predictions(model, rows, batch_tokens=65536):
    """Likeliest next token at every position of every row."""
    longest = max(map(len, rows))
    size = max(1, batch_tokens // longest)
    out = []
    for begin in range(0, len(rows), size):
        part = rows[begin:begin + size]
        tokens = torch.zeros(len(part), longest, dtype=torch.long)
        for index, row in enumerate(part):
            tokens[index, :len(row)] = torch.tensor(row)
        hidden = model.model(tokens.cuda(), use_cache=False).last_hidden_state
        out += list(model.lm_head(hidden).argmax(-1).cpu().numpy())
    return out


def score(model, renderer, family, context, args):
    """Right answers of every turn, as a list of counts."""
    rng = random.Random(f"{family} {context} {args.seed}")
    rendered = [renderer.render(rng, tasks.evaluation_task(family, rng, args.numbers), document=context)
                for _ in range(args.samples)]
    guesses = predictions(model, [row for row, _ in rendered])
    turns = np.zeros(len(rendered[0][1]), int)
    for (row, spans), guess in zip(rendered, guesses):
        for index, (start, end, _) in enumerate(spans):
            turns[index] += guess[start - 1:end - 1].tolist() == [int(token) for token in row[start:end]]
    return turns.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--families", nargs="+", default=tasks.FAMILIES)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numbers", type=float, default=0.0,
                        help="share of documents whose needles hold numbers")
    parser.add_argument("--json", type=Path, help="write the counts here")
    args = parser.parse_args()

    model = load(args.model, getattr(torch, args.dtype))
    renderer = load_text(args.model, args.text)
    results = {}
    for family in args.families:
        for context in args.contexts:
            turns = score(model, renderer, family, context, args)
            results.setdefault(family, {})[context] = turns
            print(f"{args.dtype} {family:18} {context:6} "
                  + "  ".join(f"{right}/{args.samples}" for right in turns), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"dtype": args.dtype, "samples": args.samples, "right": results}))


if __name__ == "__main__":
    main()
