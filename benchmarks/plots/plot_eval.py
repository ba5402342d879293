#!/usr/bin/env python3
"""Draws reports of `tessera eval --json`.

Right answers by task family and turn, one row a method and budget, of reports over the same documents:
    benchmarks/plots/plot_eval.py REPORT.json... PICTURE.svg
Right answers of one family over the budget, one panel a report, with 95 % intervals; and a published table beside them:
    benchmarks/plots/plot_eval.py --over-budgets FAMILY [--published TABLE.json] REPORT.json... PICTURE.svg
"""
import argparse
import json
import math

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def wilson(right, questions, z=1.96):
    """The 95 % interval of a share, after Wilson."""
    share, square = right / questions, z * z
    middle = (share + square / (2 * questions)) / (1 + square / questions)
    half = z * math.sqrt(share * (1 - share) / questions + square / (4 * questions**2)) / (1 + square / questions)
    return max(0.0, middle - half), min(1.0, middle + half)


def draw_grid(cells, picture):
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
    figure.savefig(picture)


# A method looks the same in every panel.
STYLES = {"rocketkv": ("C3", "o"), "rocketkv_mt": ("C1", "P"), "hsa": ("C0", "s"), "snapkv": ("C2", "^"),
          "quest": ("C4", "D"), "sparq": ("C5", "v"), "exact_topk": ("0.45", "x")}


def measured_panel(path, family):
    """Title, tokens of a document and per method a list of (budget, share, low, high)."""
    cells = [cell for cell in json.load(open(path)) if cell["family"] == family and cell["turn"] == 1]
    lines, full = {}, None
    for cell in cells:
        share = cell["right"] / cell["questions"]
        if cell["budget"] is None:
            full = share
        else:
            lines.setdefault(cell["method"], []).append(
                (cell["budget"], share, *wilson(cell["right"], cell["questions"])))
    return f"{family}, {path.rsplit('-', 1)[-1].removesuffix('.json')} tokens, {cells[0]['questions']} documents", lines, full


def published_panel(path):
    table = json.load(open(path))
    lines = {method: [(budget, percent / 100, percent / 100, percent / 100)
                      for budget, percent in zip(table["budgets"], row)] for method, row in table["percent"].items()}
    return table["title"], lines, table["full_percent"] / 100


def draw_over_budgets(reports, family, published, picture):
    panels = [measured_panel(path, family) for path in reports] + ([published_panel(published)] if published else [])
    figure, row = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), sharey=True, layout="constrained",
                                  squeeze=False)
    for axes, (title, lines, full) in zip(row[0], panels):
        if full is not None:
            axes.axhline(100 * full, color="0.7", linewidth=1)
        for method, points in lines.items():
            color, marker = STYLES.get(method, ("k", "."))
            budgets, shares, lows, highs = zip(*sorted(points))
            error = [[100 * max(0, share - low) for share, low in zip(shares, lows)],
                     [100 * max(0, high - share) for share, high in zip(shares, highs)]]
            axes.errorbar(budgets, [100 * share for share in shares], error, color=color, marker=marker, markersize=4,
                          linewidth=1.2, elinewidth=0.6, capsize=2, label=method,
                          zorder=4 if method == "rocketkv" else 3)
        axes.set_xscale("log", base=2)
        budgets = sorted({point[0] for points in lines.values() for point in points})
        axes.set_xticks(budgets, [str(budget) for budget in budgets], fontsize=8)
        axes.minorticks_off()
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("budget t, tokens")
        axes.set_ylim(-4, 104)
    row[0][0].set_ylabel("right answers, %")
    row[0][0].legend(fontsize=7.5)
    figure.savefig(picture)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+")
    parser.add_argument("picture")
    parser.add_argument("--over-budgets", metavar="FAMILY")
    parser.add_argument("--published", metavar="TABLE.json")
    given = parser.parse_args()

    if given.over_budgets:
        draw_over_budgets(given.reports, given.over_budgets, given.published, given.picture)
    elif given.published:
        parser.error("--published needs --over-budgets")
    else:
        draw_grid([cell for report in given.reports for cell in json.load(open(report))], given.picture)


if __name__ == "__main__":
    main()
