#!/usr/bin/env python3
"""Draws profiles of `tessera calibrate`: shares by layer and head, for each task family, and how alike heads rank.

    benchmarks/plots/plot_profile.py PROFILE.json PICTURE.svg
"""
import argparse
import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(profile, picture):
    stability = profile["stability"]
    families, layers = stability["families"], len(profile["mean"])
    figure, (shares, ranks) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained",
                                              gridspec_kw={"width_ratios": [1.9, 1]})
    heads = len(profile["mean"][0])
    at = range(layers * heads)
    flat = lambda table: [100 * number for row in table for number in row]
    mean, deviation, budget = flat(profile["mean"]), flat(profile["deviation"]), flat(profile["budget"])
    shares.bar(at, budget, color="0.88", label=f"budget (alpha {profile['alpha']:g})")
    shares.errorbar(at, mean, deviation, fmt="none", ecolor="0.35", elinewidth=1, capsize=2,
                    label=f"mean and deviation, {profile['samples']} prompts")
    for name, table in zip(families, stability["family_mean"]):
        shares.plot(at, flat(table), ".", markersize=5, label=name.replace("_", " "))
    for layer in range(1, layers):
        shares.axvline(layer * heads - 0.5, color="0.8", linewidth=0.6)
    shares.axhline(100 * profile["share"], color="C3", linewidth=0.8)
    shares.set_xticks([layer * heads + (heads - 1) / 2 for layer in range(layers)],
                      [f"layer {layer}" for layer in range(layers)], fontsize=8)
    shares.set_ylabel("kept of a prompt, %")
    shares.set_ylim(0, 104)
    shares.set_title(f"{profile['model']}, {profile['method']}, share {profile['share']:g}: one bar a KV head", fontsize=9)
    shares.legend(fontsize=6.5, ncols=2)

    grid = ranks.imshow(stability["between_families"], cmap="YlGn", vmin=0, vmax=1)
    for y, row in enumerate(stability["between_families"]):
        for x, value in enumerate(row):
            ranks.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
    names = [name.replace("_", " ") for name in families]
    ranks.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    ranks.set_yticks(range(len(names)), names, fontsize=7)
    ranks.set_title(f"rank correlation of heads; a prompt with the mean of all: {stability['mean']:.3f}, "
                    f"least {stability['least']:.3f}", fontsize=8)
    figure.colorbar(grid, ax=ranks, shrink=0.8)
    figure.savefig(picture)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("picture")
    given = parser.parse_args()
    draw(json.load(open(given.profile)), given.picture)


if __name__ == "__main__":
    main()
