#!/usr/bin/env python3
"""How far a model's predictions go apart from those of whole rows, by bits an element, rotation, and whether keys share a scale by token or by channel.

    benchmarks/model/few_bits.py [--model examples/model] [--text examples/data/opticks.txt] [--prompt 2048] [--steps 128] [--count 4]
                                 [--bits 8,4,2] [--block 32] [--tail 32] [--json FILE]

Needs transformers and torch; runs on a CPU. A piece of the text is read whole; its keys (behind RoPE) and values are then replaced by what codes
hold of them, and the following tokens are given one by one, their rows coded as they come. Codes are asymmetric: a lowest value and a step in fp16,
as `int4_rows` has them. Values share them by token, in groups of 64 channels. Keys: by token, likewise; or by channel, each for a block of `--block`
tokens, as KIVI (arXiv:2402.02750) has them: the newest tokens, up to `--tail` and a block, are then whole, keys and values. A row of the table with
`+ tail` has keys by token behind the same whole tail. Prints KL(whole, coded) of the next token in nats, mean and 99th percentile, how often the
likeliest token is the same, and bits an element of the coded tokens, scales counted.
"""

import argparse
import json
import pathlib

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def coded(rows, dim, count, bits):
    """What codes of `bits` bits hold of rows, `count` neighbours of dimension `dim` sharing a lowest value and a step in fp16."""
    parts = rows.double().unflatten(dim, (-1, count))
    low = parts.amin(dim, keepdim=True).half().double()
    step = ((parts.amax(dim, keepdim=True) - low) / (2 ** bits - 1)).half().double()
    codes = ((parts - low) / step.clamp(min=1e-30)).round().clamp(0, 2 ** bits - 1)
    return (low + codes * step).flatten(dim - 1, dim).to(rows.dtype)


def hadamard(dim):
    made = torch.ones(1, 1)
    while made.shape[0] < dim:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made * dim ** -0.5


class Format:
    """Rows [1, heads, tokens, dim] as a cache holds them."""

    def __init__(self, name, bits, rotates, by_channel, block, tail):
        self.name, self.bits, self.rotates, self.by_channel, self.block, self.tail = name, bits, rotates, by_channel, block, tail

    def whole_tokens(self, tokens):
        """How many of the newest are whole: what is left behind full blocks, once `tail` and a block of them are there."""
        return min(tokens, self.tail + (tokens - self.tail) % self.block) if self.tail > 0 else 0

    def held(self, rows, keys):
        tokens, dim = rows.shape[2:]
        whole = self.whole_tokens(tokens)
        first, last = rows[:, :, :tokens - whole], rows[:, :, tokens - whole:]
        if first.shape[2] == 0:
            return rows
        by = hadamard(dim) if self.rotates else None
        if by is not None:
            first = first @ by
        first = coded(first, -2, self.block, self.bits) if keys and self.by_channel else coded(first, -1, min(64, dim), self.bits)
        if by is not None:
            first = first @ by
        return torch.cat([first, last], 2)

    def bits_an_element(self, dim):
        group = min(64, dim)
        return ((self.bits + 32 / (self.block if self.by_channel else group)) + (self.bits + 32 / group)) / 2


class Held:
    """A cache whose coded rows are made once, and whose newest rows become codes when their block is full."""

    def __init__(self, cache, form):
        self.form = form
        self.whole = [(layer.keys, layer.values) for layer in cache.layers]
        self.made = [[form.held(keys, True), form.held(values, False)] for keys, values in self.whole]

    def put(self, cache):
        for layer, (keys, values) in zip(cache.layers, self.made):
            layer.keys, layer.values = keys, values

    def add(self, cache):
        """Behind a step, whose rows the cache has appended whole."""
        form = self.form
        for i, layer in enumerate(cache.layers):
            new = [layer.keys[:, :, -1:], layer.values[:, :, -1:]]
            self.whole[i] = tuple(torch.cat([old, one], 2) for old, one in zip(self.whole[i], new))
            tokens = self.whole[i][0].shape[2]
            if form.tail == 0:
                self.made[i] = [torch.cat([made, form.held(one, side == 0)], 2) for side, (made, one) in enumerate(zip(self.made[i], new))]
                continue
            coded_before = tokens - 1 - form.whole_tokens(tokens - 1)
            coded_now = tokens - form.whole_tokens(tokens)
            for side in (0, 1):
                rows = self.whole[i][side]
                fresh = rows[:, :, coded_before:coded_now]
                if coded_now > coded_before:
                    alone = Format(form.name, form.bits, form.rotates, form.by_channel, form.block, 0)
                    fresh = alone.held(fresh, side == 0)
                self.made[i][side] = torch.cat([self.made[i][side][:, :, :coded_before], fresh, rows[:, :, coded_now:]], 2)


def formats(bits, block, tail):
    for count in bits:
        for rotates in (False, True):
            turn = ", rotated" if rotates else ""
            yield Format(f"{count} bits, K by token{turn}", count, rotates, False, block, 0)
            yield Format(f"{count} bits, K by token{turn} + tail", count, rotates, False, block, tail)
            yield Format(f"{count} bits, K by channel{turn} + tail", count, rotates, True, block, tail)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ROOT / "examples/model")
    parser.add_argument("--text", default=ROOT / "examples/data/opticks.txt")
    for name, value in (("prompt", 2048), ("steps", 128), ("count", 4), ("block", 32), ("tail", 32)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--bits", default="8,4,2")
    parser.add_argument("--json")
    given = parser.parse_args()
    from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(given.model)(pathlib.Path(given.text).read_text(), return_tensors="pt").input_ids[:, 1:]
    dim = model.config.head_dim
    all_formats = list(formats([int(one) for one in given.bits.split(",")], given.block, given.tail))
    sums = {form.name: {"divergences": [], "same": 0} for form in all_formats}
    room = tokens.shape[1] - given.prompt - given.steps
    for piece in range(given.count):
        at = piece * room // max(given.count - 1, 1)
        prompt = torch.cat([torch.tensor([[model.config.bos_token_id]]), tokens[:, at:at + given.prompt - 1]], 1)
        following = tokens[:, at + given.prompt - 1:at + given.prompt - 1 + given.steps]
        cache = DynamicCache()
        for first in range(0, given.prompt, 1024):
            end = model(prompt[:, first:first + 1024], past_key_values=cache, logits_to_keep=1)
        read = [(layer.keys, layer.values) for layer in cache.layers]
        expected = [end.logits[0, -1].log_softmax(-1)]
        for step in range(given.steps):
            expected.append(model(following[:, step:step + 1], past_key_values=cache).logits[0, -1].log_softmax(-1))
        for form in all_formats:
            for layer, (keys, values) in zip(cache.layers, read):
                layer.keys, layer.values = keys, values
            held = Held(cache, form)
            for step in range(given.steps):
                held.put(cache)
                got = model(following[:, step:step + 1], past_key_values=cache).logits[0, -1].log_softmax(-1)
                held.add(cache)
                whole = expected[step + 1]
                sums[form.name]["divergences"].append(float((whole.exp() * (whole - got)).sum()))
                sums[form.name]["same"] += int(whole.argmax() == got.argmax())
            print(f"piece {piece + 1} of {given.count}: {form.name}", flush=True)
    print(f"\n{'':38} {'KL mean':>9} {'KL 99 %':>9} {'same top':>9} {'bits':>6}")
    for form in all_formats:
        own = sums[form.name]
        ordered = sorted(own["divergences"])
        own["mean"], own["most"] = sum(ordered) / len(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        own["bits"] = form.bits_an_element(dim)
        print(f"{form.name:38} {own['mean']:9.5f} {own['most']:9.5f} {100 * own['same'] / len(ordered):7.2f} % {own['bits']:6.2f}")
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({name: {key: own[key] for key in ("mean", "most", "same", "bits")}
                                                        for name, own in sums.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
