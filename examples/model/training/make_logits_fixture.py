#!/usr/bin/env python3
"""Reference logits of the shipped model, computed with transformers on a GPU.

Per prompt i the file holds tokens.i (I32), fp32.i (F32 [vocabulary]: logits of the last position, weights
upcast, float32 arithmetic, no TF32, plain attention) and bf16.i (F32 [vocabulary]: the model run in
bf16). The shortest prompt is plain text; every other one asks for one of eight codes, so that the next
token has to be retrieved.
"""

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

import evaluate
import tasks

LENGTHS = (100, 257, 512, 1000, 2048, 4096, 6000, 8192)


def prompt(renderer, rng, length):
    """Exactly `length` tokens."""
    if length == min(LENGTHS):
        return [tasks.BOS] + renderer.slice(rng, length - 1).tolist()
    task = tasks.evaluation_task("multi_key", rng)
    row, spans = renderer.render(rng, task, total=length + tasks.SPEC["value_words"] + 1)
    return [int(token) for token in row[:spans[0][0]]]


@torch.no_grad()
def last_logits(model, tokens):
    return model(torch.tensor([tokens]).cuda(), use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--text", type=Path, default=evaluate.DEFAULT_TEXT)
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    exact = evaluate.load(args.model, torch.float32, "eager")
    half = evaluate.load(args.model, torch.bfloat16)
    renderer = evaluate.load_text(args.model, args.text)
    rng = random.Random(7)
    tensors = {}
    for index, length in enumerate(LENGTHS):
        tokens = prompt(renderer, rng, length)
        assert len(tokens) == length, (len(tokens), length)
        fp32, bf16 = last_logits(exact, tokens), last_logits(half, tokens)
        tensors |= {f"tokens.{index}": torch.tensor(tokens, dtype=torch.int32), f"fp32.{index}": fp32,
                    f"bf16.{index}": bf16}
        error = ((bf16 - fp32).norm() / fp32.norm()).item()
        print(f"prompt {index}: {length} tokens, likeliest {fp32.argmax().item()} / {bf16.argmax().item()}, "
              f"relative error of bf16 {error:.2e}", flush=True)
    save_file(tensors, args.out)


if __name__ == "__main__":
    main()
