#!/usr/bin/env python3
"""Draws the record of benchmarks/gpu.sh: one picture a figure, bars beside peers and limits.

    benchmarks/plots/plot_cuda.py RECORD.json FOLDER

Writes FOLDER/cuda_NAME.png for decode, gathered, uneven, scoring, top_k, pack, prefill and rocketkv; a figure of which nothing
was measured is left out.
"""
import argparse
import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from cuda_record import DECODE, TOP_K, best_peer, copy_ceiling, read_ceiling, time_of

COLOURS = {"tessera": "#2c6e49", "tessera, pages of 16": "#8cb369", "flash": "#b0b0b0", "cudnn": "#707070",
           "flashinfer": "#5b8e9e", "torch.topk": "#b0b0b0", "best dense peer": "#b0b0b0"}


def draw(record, folder, name, title, unit, labels, series, limits=(), log=False):
    """Grouped bars. `series` {name: [value or None a label]}; `limits` [(label index or None for all, value, text)]."""
    series = {key: values for key, values in series.items() if any(value is not None for value in values)}
    if not series:
        return
    figure, axes = pyplot.subplots(figsize=(max(4.6, 1.4 + 0.27 * len(labels) * (len(series) + 0.8)), 3.4),
                                   layout="constrained")
    width = 0.8 / len(series)
    for i, (key, values) in enumerate(series.items()):
        places = [x - 0.4 + width * (i + 0.5) for x in range(len(labels))]
        axes.bar(places, [value or 0 for value in values], width * 0.94, label=key, color=COLOURS.get(key))
        for x, value in zip(places, values):
            if value is not None:
                axes.annotate(f"{value:.3g}", (x, value), ha="center", va="bottom", fontsize=6.5)
    said = set()
    for at, value, text in limits:
        low, high = (-0.5, len(labels) - 0.5) if at is None else (at - 0.45, at + 0.45)
        axes.hlines(value, low, high, colors="#c1121f", linestyles="dashed", linewidth=1.1,
                    label=None if text in said else text)
        said.add(text)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    if log:
        axes.set_yscale("log")
    axes.margins(y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    machine = record["machine"]
    axes.set_title(f"{title}\n{machine.get('gpu')}, CUDA {machine.get('toolkit')}, {machine.get('date')}", fontsize=9)
    figure.legend(fontsize=7, frameon=False, ncols=5, loc="outside lower center")
    figure.savefig(f"{folder}/cuda_{name}.png", dpi=160)
    pyplot.close(figure)


def share(part, whole):
    return None if part is None or not whole else 100 * part / whole


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record")
    parser.add_argument("folder")
    given = parser.parse_args()
    record = json.load(open(given.record))
    figures = record["figures"]

    def rate(name):
        return figures.get(name, {}).get("GB/s")

    def peers(names):
        found = {}
        for name in names:
            for peer in figures.get(name, {}).get("peers", {}):
                found[peer] = [figures.get(n, {}).get("peers", {}).get(peer, {}).get("us") for n in names]
        return found

    def picture(*arguments, **options):
        draw(record, given.folder, *arguments, **options)

    names = ["decode/" + shape for shape in DECODE]
    times = {"tessera": [time_of(figures, n) for n in names],
             "tessera, pages of 16": [time_of(figures, n.replace("decode/", "decode_paged/")) for n in names],
             **peers(names)}
    best = [best_peer(figures, n) for n in names]
    relative = {key: [value / peer[0] if value and peer else None for value, peer in zip(values, best)]
                for key, values in times.items()}
    picture("decode", "Dense decode attention, 32 q_heads, 8 kv_heads, d 128, bf16", "time / best peer",
            [f"{shape.replace('/', ' ')}\n{peer[0]:.3g} us" if peer else shape for shape, peer in zip(DECODE, best)],
            relative, [(i, 1.0 if i < 2 else 1.03, "bar") for i in range(len(DECODE))])

    shapes = ["B1/singles", "B1/runs_of_16", "B16/singles", "B16/runs_of_16"]
    picture("gathered", "Decode over 2,048 of 128K tokens", "% of the read ceiling",
            [f"{s.replace('/', ' ').replace('_', ' ')}\n{time_of(figures, 'gathered/' + s) or 0:.3g} us"
             for s in shapes],
            {"tessera": [share(rate("gathered/" + s), read_ceiling(figures)) for s in shapes]},
            [(2, 55, "bar"), (3, 75, "bar")])

    one_read = time_of(figures, "read/256MiB")
    kinds = ["lse_computed", "lse_given"]
    picture("scoring", "Window scoring of 128K keys, window 32", "reads of K", [k.replace("_", " ") for k in kinds],
            {"tessera": [time_of(figures, "score/128K/" + k) and time_of(figures, "score/128K/" + k) / one_read
                         if one_read else None for k in kinds]}, [(0, 6, "bar"), (1, 3.5, "bar")])

    rows = [name for name in figures if name.startswith("top_k/") and name.endswith("/normal")]
    most = dict(TOP_K)
    picture("top_k", "Exact top-k of fp32 scores, rows x tokens", "us",
            [name.split("/")[1] + "\n" + name.split("/")[2] for name in rows],
            {"tessera": [time_of(figures, name) for name in rows], **peers(rows)},
            [(i, most[n[6:-7]], "bar") for i, n in enumerate(rows) if n[6:-7] in most], log=True)

    places = [("pack_fresh", 75), ("pack_in_place", 40)]
    labels = [(place, run, least) for place, least in places for run in ("singles", "runs_of_16")]
    picture("pack", "Compaction of 128K tokens to a quarter", "% of the copy ceiling",
            [f"{place[5:].replace('_', ' ')}\n{run.replace('_', ' ')}" for place, run, _ in labels],
            {"tessera": [share(rate(f"{place}/{run}"), copy_ceiling(figures)) for place, run, _ in labels]},
            [(i, least, "bar") for i, (_, _, least) in enumerate(labels)])

    draws = ["drawn", "one_long"]
    picture("uneven", "Lengths of 8 heads: uneven against the same total evened", "us",
            ["1/16 to 1 of 128K", "one 128K, seven 8K"],
            {"tessera": [time_of(figures, "uneven/" + d) for d in draws],
             "evened": [time_of(figures, f"uneven/{d}_evened") for d in draws]},
            [(i, 1.15 * time_of(figures, f"uneven/{d}_evened"), "bar") for i, d in enumerate(draws)
             if time_of(figures, f"uneven/{d}_evened")])

    steps = [(f"B{batch}/{context}", least) for batch, context, least in
             [(1, "32K", 2.5), (1, "128K", 8), (1, "256K", None), (8, "128K", 35)]]
    names = [f"rocketkv/{where}/t1024/step" for where, _ in steps]
    dense = [best_peer(figures, "decode/" + where) for where, _ in steps]
    picture("rocketkv", "A RocketKV step with t = 1,024: one layer, d 128, bf16", "us",
            [where.replace("/", " ") for where, _ in steps],
            {"tessera": [time_of(figures, n) for n in names],
             "best dense peer": [peer[0] if peer else None for peer in dense]},
            [(i, peer[0] / least, "bar") for i, (peer, (_, least)) in enumerate(zip(dense, steps)) if peer and least],
            log=True)

    names = [name for name in figures if name.startswith("prefill/")]
    picture("prefill", "Causal prefill attention, 32 q_heads, 8 kv_heads, d 128, bf16", "ms",
            [name.split("/")[1] for name in names],
            {key: [value and value / 1000 for value in values] for key, values in
             {"tessera": [time_of(figures, name) for name in names], **peers(names)}.items()}, log=True)


if __name__ == "__main__":
    main()
