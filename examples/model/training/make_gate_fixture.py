#!/usr/bin/env python3
"""Reference scores of the shipped gate, and KVzip's own, for two short texts.

Per text i the file holds tokens.i (I32 [n]), gate.i and kvzip.i (F32 [layers, kv_heads, n]). The model runs in
float32 with the shipped bf16 weights widened; the gate runs in float64 on the model's hidden states. Text 0 is plain
text, text 1 a prompt that asks for one of eight codes. Nothing is forced to be kept: the first tokens have scores
like all others.
"""

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

import evaluate
import make_logits_fixture
from gate import Gate
from reader import Reader

LENGTHS = (100, 600)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--text", type=Path, default=evaluate.DEFAULT_TEXT)
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    args = parser.parse_args()

    renderer = evaluate.load_text(args.model, args.text)
    reader = Reader(args.model, renderer.processor)
    gate = Gate(reader.layers, reader.hidden_size, reader.kv_heads, reader.heads)
    gate.restore(args.model / "gate" / "gate.safetensors").double()
    rng = random.Random(7)
    tensors = {}
    for index, length in enumerate(LENGTHS):
        tokens = make_logits_fixture.prompt(renderer, rng, length)
        hidden, cache = reader.read(tokens)
        with torch.no_grad():
            scores = gate(hidden.double())
        tensors |= {f"tokens.{index}": torch.tensor(tokens, dtype=torch.int32),
                    f"gate.{index}": scores.float().contiguous(), f"kvzip.{index}": reader.kvzip_scores(tokens, cache)}
        print(f"text {index}: {len(tokens)} tokens, gate {scores.min():.1e} to {scores.max():.3f}, "
              f"kvzip {tensors[f'kvzip.{index}'].min():.1e} to {tensors[f'kvzip.{index}'].max():.3f}")
    save_file(tensors, args.out)


if __name__ == "__main__":
    main()
