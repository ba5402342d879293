#!/usr/bin/env python3
"""What packing leaves out of the keys and values of a real text, by the rule that says which rows a basis is found from.

    benchmarks/model/bases_of_few_rows.py [--model examples/model] [--text examples/data/opticks.txt] [--long 0]

Passes the text through the model (transformers, torch and numpy are needed) and packs a quarter of the channels of every KV head as
`mosaickv` does, in double: prompts of a few tokens with answers, under the rule of `packed_rows::fate` and under the one before it, where the
prompt's whole tails make the basis of all that follows. Figures are energies lost, relative to the basis of the text's first 4,096 rows. With
--long N a prompt of N tokens and 2,000 decoded ones too: what the decoded rows lose in the prompt's basis, in one of the prompt's rest behind a
multiple of 65,536, in one of the 4,096 rows before them, and in one of 4,096 decoded rows; --long 65576 takes ten minutes of a core.
"""

import argparse
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TAIL, LASTING = 32, 2048


def vectors(model_folder, text, tokens):
    """Keys behind RoPE and values of the first tokens of a text, repeated if it is short: [layers, heads, tokens, dim] each."""
    import torch
    from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model_folder)(pathlib.Path(text).read_text(), return_tensors="pt").input_ids
    ids = ids.repeat(1, tokens // ids.shape[1] + 1)[:, :tokens]
    cache = DynamicCache()
    with torch.no_grad():
        for first in range(0, tokens, 1024):
            model.model(ids[:, first:first + 1024], past_key_values=cache, use_cache=True)
            print(f"\r{min(first + 1024, tokens)} of {tokens} tokens", end="", flush=True)
    print()
    return {"keys": [layer.keys[0].numpy() for layer in cache.layers], "values": [layer.values[0].numpy() for layer in cache.layers]}


def basis(rows):
    rows = rows.astype(float)
    dim = rows.shape[1]
    return np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :dim - dim // 4].T


def lost(rows, turned_by):
    rows = rows.astype(float)
    energies = np.sort((rows @ turned_by.T) ** 2, axis=1)[:, ::-1]
    return (rows ** 2).sum() - energies[:, :rows.shape[1] // 4].sum()


def lost_by_rule(rows, prompt, end):
    """Follows `packed_rows::fate` tail by tail. Returns what the packed rows have lost, and how many these are."""
    total, packed, last, current = 0.0, 0, 0, None
    for upto in range(prompt // TAIL * TAIL, end // TAIL * TAIL + 1, TAIL):
        due = upto - packed
        wanted = max(4 * rows.shape[1], min(packed, LASTING)) if last < LASTING else TAIL
        if due < max(wanted, 1):
            continue
        begins = last < LASTING
        if begins:
            current = basis(rows[packed:upto])
        total += lost(rows[packed:upto], current)
        last = due if begins else last + due
        packed = upto
    return total, packed


def heads(side):
    return [head for layer in side for head in layer]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ROOT / "examples/model")
    parser.add_argument("--text", default=ROOT / "examples/data/opticks.txt")
    parser.add_argument("--long", type=int, default=0)
    given = parser.parse_args()
    sides = vectors(given.model, given.text, max(6200, given.long + 2000 + 4096 if given.long else 0))
    for prompt, decoded in ((40, 2000), (100, 2000), (40, 6096), (100, 6096), (1500, 4096)):
        for name, side in sides.items():
            before = now = good = 0.0
            packed = 0
            end = (prompt + decoded) // TAIL * TAIL
            for rows in heads(side):
                good += lost(rows[:end], basis(rows[:4096]))
                before += lost(rows[:end], basis(rows[:max(prompt // TAIL, 1) * TAIL]))
                more, packed = lost_by_rule(rows, prompt, end)
                now += more
            print(f"prompt {prompt}, {decoded} decoded, {name}: before {before / good:.2f}, now {now / good:.2f}, {packed} rows packed")
    if given.long:
        end = given.long // TAIL * TAIL
        for name, side in sides.items():
            found = dict.fromkeys(("the prompt", "its rest", "the 4,096 rows before", "4,096 decoded rows"), 0.0)
            for rows in heads(side):
                decoded = rows[end:end + 2008]
                for of, some in zip(found, (rows[:end], rows[end // 65536 * 65536:end], rows[end - 4096:end], rows[end:end + 4096])):
                    found[of] += lost(decoded, basis(some))
            print(f"prompt {given.long}, 2000 decoded, {name}: " +
                  ", ".join(f"{of} {value / found['the 4,096 rows before']:.2f}" for of, value in found.items()))


if __name__ == "__main__":
    main()
