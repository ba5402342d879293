#!/usr/bin/env python3
"""What SABlock's blocks look like on the example model, and what breaking ties after pooling would change.

    benchmarks/sablock_blocks.py TOOL OUT.json [--context 4096] [--documents 4] [--budgets 48,96,256,512,1024]

Needs numpy and sentencepiece (`pip install numpy sentencepiece`). A document is a slice of examples/data/opticks.txt with eight
needles and a question behind it. The model's keys and queries are computed here in fp32 and handed to `tessera compress`.
Prints three tables, and writes them to OUT.json:

- sizes of the blocks that `sablock` takes, by budget, and how many tokens lie in blocks of each (figure 9 of SABlock);
- how many blocks of a fixed size would cross a segment's end (figure 2a);
- ties after pooling: of how many lists of `snapkv` the cut goes through tokens of one pooled score, and how many tokens would
  change if the score before pooling decided among them, instead of the lower index.
"""
import argparse
import collections
import json
import pathlib
import random
import struct
import subprocess
import tempfile

import numpy
import sentencepiece

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "model"
DELIMITERS = (*".,;:!?\n\r", *"。，；：！？、")
WINDOW, POOL, SEGMENT = 32, 7, 256


def read_tensors(path):
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    types = {"BF16": numpy.uint16, "F32": numpy.float32, "I32": numpy.int32, "I64": numpy.int64}
    tensors = {}
    for name, one in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in one["data_offsets"])
        tensor = numpy.frombuffer(content[begin:end], types[one["dtype"]]).reshape(one["shape"])
        if one["dtype"] == "BF16":
            tensor = (tensor.astype(numpy.uint32) << 16).view(numpy.float32)
        tensors[name] = tensor
    return tensors


def write_tensors(path, tensors):
    header, body = {}, b""
    for name, tensor in tensors.items():
        data = numpy.ascontiguousarray(tensor).tobytes()
        kind = {"float32": "F32", "uint8": "U8"}[str(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def make_document(pieces, context, seed):
    """Tokens of a text with eight needles, and a question about one of them."""
    chance, tasks = random.Random(seed), json.loads((ROOT / "examples/data/tasks.json").read_text())
    text = (ROOT / "examples/data/opticks.txt").read_text()
    begin = text.index("\n", chance.randrange(len(text) // 2)) + 1
    names = [f"{chance.choice(tasks['adjectives'])} {chance.choice(tasks['nouns'])}" for _ in range(8)]
    values = [" ".join(chance.sample(tasks["words"], tasks["value_words"])) for _ in names]
    needles = [tasks["needle"].format(name=name, value=value) for name, value in zip(names, values)]
    asked = pieces.encode("\n" + tasks["question"].format(question=tasks["ask_one"].format(name=names[3])) + tasks["answer"])
    room = context - 1 - len(asked) - sum(len(pieces.encode("\n" + needle + "\n")) for needle in needles)
    lines = text[begin:begin + 8 * room].split("\n")
    kept, used = [], 0
    while used + len(pieces.encode(lines[len(kept)] + "\n")) <= room:
        used += len(pieces.encode(lines[len(kept)] + "\n"))
        kept.append(lines[len(kept)])
    for place, needle in enumerate(needles):
        kept.insert(round((place + 1) * len(kept) / 9), needle)
    return [1, *pieces.encode("\n".join(kept)), *asked]


def boundaries(pieces, tokens):
    """One flag a token, as the tool's tokenizer makes them."""
    texts = [pieces.decode([token]) for token in tokens]
    ends = [text.rstrip(" \t").endswith(DELIMITERS) for text in texts]
    alone = [end and not text.strip(" \t" + "".join(DELIMITERS)) for end, text in zip(ends, texts)]
    return [int(end and not (t + 1 < len(tokens) and alone[t + 1])) for t, end in enumerate(ends)]


def layers_of(tokens):
    """Keys [kv_heads, tokens, dim], values likewise, and the last WINDOW queries [WINDOW, q_heads, dim] of each layer, after RoPE."""
    config, weights = json.loads((MODEL / "config.json").read_text()), read_tensors(MODEL / "model.safetensors")
    q_heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n, group = len(tokens), q_heads // kv_heads
    angles = numpy.arange(n)[:, None] * config["rope_theta"] ** (-numpy.arange(0, dim, 2) / dim)
    cosine, sine = (numpy.tile(turn(angles), 2)[None].astype(numpy.float32) for turn in (numpy.cos, numpy.sin))

    def turned(x):
        return x * cosine + numpy.concatenate((-x[..., dim // 2:], x[..., :dim // 2]), -1) * sine

    def normed(x, name):
        return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        rows = normed(x, prefix + "input_layernorm.weight")
        q, k, v = ((rows @ weights[f"{prefix}self_attn.{kind}_proj.weight"].T).reshape(n, -1, dim).swapaxes(0, 1)
                   for kind in "qkv")
        q, k = turned(q), turned(k)
        yield {"k": k, "v": v, "q": q[:, -WINDOW:].swapaxes(0, 1)}
        seen = numpy.empty((n, q_heads, dim), numpy.float32)
        for head in range(q_heads):
            for first in range(0, n, 512):
                end = min(first + 512, n)
                seen[first:end, head] = attention(q[head, first:end], k[head // group, :end], first) @ v[head // group, :end]
        x = x + seen.reshape(n, -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        rows = normed(x, prefix + "post_attention_layernorm.weight")
        gate = rows @ weights[prefix + "mlp.gate_proj.weight"].T
        up = rows @ weights[prefix + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + numpy.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T


def attention(q, k, first):
    """Probabilities of rows first, first + 1, ... over the keys up to themselves."""
    logits = q @ k.T / numpy.sqrt(numpy.float32(q.shape[-1]))
    logits[numpy.arange(k.shape[0])[None] > first + numpy.arange(len(q))[:, None]] = -numpy.inf
    weights = numpy.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def pooled_lists(layer, budget):
    """For each kv_head: what stays by pooled scores with ties to the lower index, what would with ties to the score before
    pooling, and how many tokens have the score at the cut."""
    group, n = layer["q"].shape[1] // layer["k"].shape[0], layer["k"].shape[1]
    for head, keys in enumerate(layer["k"]):
        plain = sum(attention(layer["q"][:, head * group + member], keys, n - WINDOW).sum(0) for member in range(group))
        plain = plain[:n - WINDOW]
        padded = numpy.pad(plain, POOL // 2, constant_values=-numpy.inf)
        pooled = numpy.lib.stride_tricks.sliding_window_view(padded, POOL).max(-1)
        slots, keep = numpy.arange(len(plain)), budget - WINDOW
        lower = numpy.lexsort((slots, -pooled))[:keep]
        peak = numpy.lexsort((slots, -plain, -pooled))[:keep]
        cut = pooled[lower[-1]]
        tied = int((pooled == cut).sum()), int((pooled[lower] == cut).sum())
        yield set(lower.tolist()), set(peak.tolist()), tied[0] - tied[1]


def crossing(flags, size):
    """Of blocks of `size` tokens from the text's start, how many hold the end of a segment before their last token."""
    ends, length = [], 0
    for flag in flags:
        length += 1
        ends.append(bool(flag) or length == SEGMENT)
        length = 0 if ends[-1] else length
    blocks = [ends[first:first + size] for first in range(0, len(ends) - size + 1, size)]
    return sum(any(block[:-1]) for block in blocks), len(blocks)


def compressed(tool, folder, layer, method, budget, *settings):
    write_tensors(folder / "layer", layer)
    sets = [word for setting in settings for word in ("--set", setting)]
    subprocess.run([tool, "compress", "--in", folder / "layer", "--out", folder / "kept", "--method", method, "--budget",
                    str(budget), *sets], check=True, stdout=subprocess.DEVNULL)
    return read_tensors(folder / "kept")


def measure(given):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))
    budgets = [int(budget) for budget in given.budgets.split(",")]
    taken = {budget: collections.Counter() for budget in budgets}  # tokens by size of block
    segments = {budget: collections.Counter() for budget in budgets}
    crossed = {size: numpy.zeros(2, int) for size in (3, 5, 7, 9, 10)}
    ties = {budget: collections.Counter() for budget in budgets if budget > WINDOW}
    with tempfile.TemporaryDirectory() as scratch:
        for document in range(given.documents):
            tokens = make_document(pieces, given.context, document)
            flags = boundaries(pieces, tokens)
            for size in crossed:
                crossed[size] += crossing(flags, size)
            for layer in layers_of(tokens):
                marked = {**layer, "boundaries": numpy.array(flags, numpy.uint8)}
                for budget in budgets:
                    kept = compressed(given.tool, pathlib.Path(scratch), marked, "sablock", budget)
                    sizes = kept["segments.block_size"]
                    starts = numpy.cumsum([0, *segment_lengths(flags[:len(tokens) - 8])])
                    slots = kept["keep.indices"][:kept["keep.indptr"][1]]
                    for segment, size in enumerate(sizes):
                        if size == 0:
                            continue
                        segments[budget][int(size)] += 1
                        inside = (slots >= starts[segment]) & (slots < starts[segment + 1])
                        taken[budget][int(size)] += int(inside.sum())
                    if budget in ties:
                        count_ties(given.tool, pathlib.Path(scratch), layer, budget, ties[budget])
    return {"context": given.context, "documents": given.documents,
            "segments": {budget: dict(count) for budget, count in segments.items()},
            "tokens": {budget: dict(count) for budget, count in taken.items()},
            "crossing": {size: [int(count) for count in counts] for size, counts in crossed.items()},
            "ties": {budget: dict(count) for budget, count in ties.items()}}


def segment_lengths(flags):
    lengths = [0]
    for flag in flags:
        lengths[-1] += 1
        if flag or lengths[-1] == SEGMENT:
            lengths.append(0)
    return lengths


def count_ties(tool, folder, layer, budget, counts):
    kept = compressed(tool, folder, layer, "snapkv", budget, f"window={WINDOW}", f"pool={POOL}")
    own = [set(part.tolist()) for part in numpy.split(kept["keep.indices"], kept["keep.indptr"][1:-1])]
    window = set(range(layer["k"].shape[1] - WINDOW, layer["k"].shape[1]))
    for (lower, peak, left_out), ours in zip(pooled_lists(layer, budget), own):
        counts["lists"] += 1
        counts["as the tool keeps them"] += (lower | window) == ours
        counts["cut through a tie"] += left_out > 0
        counts["lists that change"] += lower != peak
        counts["tokens that change"] += len(peak - lower)
        counts["tokens"] += len(lower)


def print_table(head, rows):
    print("| " + " | ".join(map(str, head)) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def show(found):
    sizes = sorted({size for counts in found["tokens"].values() for size in counts})
    print("Tokens kept before the window in blocks of each size, per cent (segments, per cent):\n")
    rows = []
    for budget, counts in found["tokens"].items():
        tokens, segments = sum(counts.values()), found["segments"][budget]
        rows.append([budget, *(f"{100 * counts.get(size, 0) / tokens:.1f} "
                               f"({100 * segments.get(size, 0) / sum(segments.values()):.1f})" for size in sizes),
                     f"{sum(size * count for size, count in counts.items()) / tokens:.2f}"])
    print_table(["budget", *(f"block {size}" for size in sizes), "mean block of a token"], rows)
    print("Blocks of a fixed size that cross a segment's end:\n")
    print_table(["block", "crossing", "blocks", "%"], [[size, *counts, f"{100 * counts[0] / counts[1]:.1f}"]
                                                       for size, counts in found["crossing"].items()])
    print("snapkv, ties after pooling by the score before pooling in place of the lower index:\n")
    names = ("lists", "as the tool keeps them", "cut through a tie", "lists that change", "tokens", "tokens that change")
    print_table(["budget", *names], [[budget, *(counts.get(name, 0) for name in names)]
                                     for budget, counts in found["ties"].items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--budgets", default="48,96,256,512,1024")
    given = parser.parse_args()
    found = measure(given)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
