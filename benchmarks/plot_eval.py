#!/usr/bin/env python3
"""Draws the report of `tessera eval --json`: right answers by task family and turn, one row a method and budget.

    benchmarks/plot_eval.py REPORT.json PICTURE.svg
"""
import argparse
import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report")
    parser.add_argument("picture")
    given = parser.parse_args()

    cells = json.load(open(given.report))
    turns = {}
    for cell in cells:
        turns[cell["family"]] = max(turns.get(cell["family"], 0), cell["turn"])
    rows, columns, share, held = [], [], {}, {}
    for cell in cells:
        row = cell["method"] + ("" if cell["budget"] is None else f"  {cell['budget']}")
        column = cell["family"].replace("_", "\n") + (f"\nturn {cell['turn']}" if turns[cell["family"]] > 1 else "")
        if row not in rows:
            rows.append(row)
        if column not in columns:
            columns.append(column)
        share[row, column] = 100 * cell["right"] / cell["questions"]
        held.setdefault(row, []).append(cell["bytes_held"] / cell["bytes_full"])

    figure, axes = pyplot.subplots(figsize=(1.6 + 0.82 * len(columns), 0.9 + 0.34 * len(rows)), layout="constrained")
    grid = [[share.get((row, column), 0) for column in columns] for row in rows]
    axes.imshow(grid, cmap="YlGn", vmin=0, vmax=130, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(columns)), columns, fontsize=7.5)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), [f"{row}   ({100 * sum(held[row]) / len(held[row]):.0f} % held)" for row in rows],
                    fontsize=8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(given.picture)


if __name__ == "__main__":
    main()
