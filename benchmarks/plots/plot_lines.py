#!/usr/bin/env python3
"""Draws what line_profile found: which share of its lines carries a model's attention, and how far what matters stays the same.

    benchmarks/plots/plot_lines.py PROFILE.json PICTURE.svg
"""
import argparse
import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def grid(figure, axis, table, title, top):
    shown = axis.imshow([[100 * number for number in row] for row in table], cmap="YlGn", vmin=0, vmax=top)
    for y, row in enumerate(table):
        for x, number in enumerate(row):
            axis.text(x, y, f"{100 * number:.0f}", ha="center", va="center", fontsize=7)
    axis.set_xlabel("query head")
    axis.set_ylabel("layer")
    axis.set_title(title, fontsize=9)
    figure.colorbar(shown, ax=axis, shrink=0.7)


def draw(profile, picture):
    figure, ((share, inputs), (halves, along)) = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    context = profile["context"]
    grid(figure, share, profile["share"], f"% of {2 * context:,} lines that carry {100 * profile['weight']:.0f} % of the weight", 60)
    grid(figure, inputs, profile["between_inputs"], f"% of lines shared by two of {profile['inputs']} texts", 100)
    grid(figure, halves, profile["between_halves"], "% of lines shared by the halves of a text", 100)
    overlap = [100 * number for number in profile["along_the_text"]]
    along.plot([16 * (i + 1) for i in range(len(overlap))], overlap)
    along.set_ylim(0, 100)
    along.set_xlabel("tokens between two blocks of 16 queries")
    along.set_ylabel("% of the best tenth that both choose")
    along.set_title("the tokens that matter, along a text", fontsize=9)
    figure.savefig(picture)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("picture")
    given = parser.parse_args()
    with open(given.profile) as file:
        draw(json.load(file), given.picture)


if __name__ == "__main__":
    main()
