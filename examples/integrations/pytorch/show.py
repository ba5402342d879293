#!/usr/bin/env python3
"""Generates with a method and draws what it did: what each layer and head kept, memory over time, tokens per second.

    python show.py --method ada_snapkv --budget 128 --out pictures
"""
import argparse
import pathlib
import time

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from tessera_torch import TesseraCache, methods

ROOT = pathlib.Path(__file__).resolve().parents[3]


class Diary(transformers.StoppingCriteria):
    """Writes down time and memory after each token; never stops anything."""

    def __init__(self, cache):
        self.cache, self.seconds, self.held, self.full, self.read = cache, [], [], [], []

    def __call__(self, input_ids, scores, **_):
        self.seconds.append(time.perf_counter())
        self.held.append(self.cache.bytes())
        self.full.append(self.cache.full_bytes())
        self.read.append(self.cache.bytes_read())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def draw_kept(cache, tokens, path):
    """One line a layer and kv_head; a mark where a token is kept."""
    lines = [head.tolist() for layer in range(len(cache)) for head in cache.kept_positions(layer)[0]]
    heads = len(lines) // len(cache)
    figure, axes = plt.subplots(figsize=(10, 0.5 + 0.13 * len(lines)), layout="constrained")
    axes.eventplot(lines, lineoffsets=range(len(lines)), linelengths=0.8, linewidths=0.4)
    axes.set(xlabel="position", ylabel="layer", xlim=(0, tokens), ylim=(len(lines) - 0.5, -0.5),
             yticks=[layer * heads + (heads - 1) / 2 for layer in range(len(cache))], yticklabels=range(len(cache)),
             title=f"{cache}: tokens kept by each layer's {heads} heads")
    for layer in range(1, len(cache)):
        axes.axhline(layer * heads - 0.5, color="lightgrey", linewidth=0.6)
    figure.savefig(path, dpi=150)


def draw_memory(diary, path):
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for values, name in ((diary.full, "nothing dropped"), (diary.held, "held"), (diary.read[1:], "read by a step")):
        axes.plot(range(1 + len(diary.full) - len(values), 1 + len(diary.full)), [x / 2**20 for x in values], label=name)
    axes.set(xlabel="generated token", ylabel="MiB", ylim=(0, None), title="memory of the cache")
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_speed(diary, path):
    """Means over 8 tokens; the first token, which waits for the prompt, is left out."""
    window = 8
    speed = [window / (b - a) for a, b in zip(diary.seconds, diary.seconds[window:])]
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.plot(range(window + 1, window + 1 + len(speed)), speed)
    axes.set(xlabel="generated token", ylabel="tokens per second", ylim=(0, None), title="speed, means over 8 tokens")
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ROOT / "examples" / "model", help="a folder or a name of the hub")
    parser.add_argument("--method", default="ada_snapkv", choices=methods())
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="parameters of the method")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "examples" / "data" / "opticks.txt")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("pictures"))
    args = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="tessera").eval()
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, :args.prompt_tokens]
    cache = TesseraCache(model.config, args.method, None if args.method == "full" else args.budget,
                         **dict(setting.split("=", 1) for setting in args.set))
    diary = Diary(cache)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                            max_new_tokens=args.new_tokens, eos_token_id=None, pad_token_id=0,
                            stopping_criteria=transformers.StoppingCriteriaList([diary]))
    print(tokenizer.decode(output[0, ids.shape[1]:]))
    steps = len(diary.seconds) - 1
    print(f"{cache.bytes():,} bytes held of {cache.full_bytes():,}; {cache.bytes_read():,} read by the last step; "
          f"{steps / (diary.seconds[-1] - diary.seconds[0]):.1f} tokens a second")
    args.out.mkdir(parents=True, exist_ok=True)
    draw_kept(cache, ids.shape[1] + steps, args.out / "kept.png")
    draw_memory(diary, args.out / "memory.png")
    draw_speed(diary, args.out / "speed.png")
    print("pictures: " + ", ".join(str(args.out / name) for name in ("kept.png", "memory.png", "speed.png")))


if __name__ == "__main__":
    main()
