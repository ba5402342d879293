#!/usr/bin/env python3
"""Draws reports of `tessera agree --json`, or records of benchmarks/agree/agree_all.py: KL divergence over the budget, one line a method.

    benchmarks/plots/plot_agree.py [--title TEXT] REPORT.json... PICTURE.svg

One panel for each length of a prompt, and one with KL over the step's number in its piece at the budget --at (the middle one unless
given). Divergences of 0 lie on the lower edge. Lines are labelled by their method, the smallest divergence first.
"""
import argparse
import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FLOOR = 1e-5  # where 0 is drawn
MARKERS = "os^Dv<>PX*dph"


def styles_of(methods):
    """Colour and marker by method, the same in every panel."""
    colours = [f"C{number}" for number in range(10)]
    return {method: (colours[number % 10], MARKERS[number % len(MARKERS)]) for number, method in enumerate(sorted(methods))}


def lines_of(rows):
    """{method: [(budget, divergence)]}, the method that is closest on average first."""
    lines = {}
    for row in rows:
        if row["budget"] is not None and row["kl_mean"] is not None:
            lines.setdefault(row["method"], []).append((row["budget"], max(row["kl_mean"], FLOOR)))
    mean = lambda method: sum(value for _, value in lines[method]) / len(lines[method])
    return {method: sorted(lines[method]) for method in sorted(lines, key=mean)}


def draw_budgets(axes, rows, styles):
    lines = lines_of(rows)
    for method, points in lines.items():
        colour, marker = styles[method]
        axes.plot(*zip(*points), color=colour, marker=marker, markersize=4, linewidth=1, label=method)
    budgets = sorted({budget for points in lines.values() for budget, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets], fontsize=8)
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel("budget, tokens per KV head")
    steps, pieces = rows[0]["steps"], rows[0]["pieces"]
    axes.set_title(f"prompts of {rows[0]['prompt']:,} tokens, {pieces} pieces, {steps} steps", fontsize=9)


def draw_steps(axes, rows, styles, budget, window=8):
    """Means of `window` neighbouring steps."""
    for row in rows:
        if row["budget"] != budget or None in row["kl_by_step"]:
            continue
        steps = row["kl_by_step"]
        parts = [steps[first:first + window] for first in range(0, len(steps), window)]
        colour, marker = styles[row["method"]]
        axes.plot([1 + window * number for number in range(len(parts))], [max(FLOOR, sum(part) / len(part)) for part in parts],
                  color=colour, marker=marker, markersize=3, linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel(f"step after the prompt (means of {window})")
    axes.set_title(f"over the steps, budget {budget}, prompts of {rows[0]['prompt']:,} tokens", fontsize=9)


def draw(rows, title, at, picture):
    lengths = sorted({row["prompt"] for row in rows})
    of_length = {length: [row for row in rows if row["prompt"] == length] for length in lengths}
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    if not budgets:
        raise SystemExit("plot_agree.py: no row has a budget; expected rows of methods with --budgets")
    styles = styles_of({row["method"] for row in rows})
    figure, axes = pyplot.subplots(1, len(lengths) + 1, figsize=(5.2 * (len(lengths) + 1), 6), sharey=True, layout="constrained",
                                   squeeze=False)
    for axis, length in zip(axes[0], lengths):
        draw_budgets(axis, of_length[length], styles)
    draw_steps(axes[0][-1], of_length[lengths[-1]], styles, at or budgets[len(budgets) // 2])
    axes[0][0].set_ylabel("KL(full, method) of the next token, nats, mean")
    # The last length may lack a method, whose prompts were shorter.
    handles = {}
    for axis in reversed(axes[0][:-1]):
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(picture)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+")
    parser.add_argument("picture")
    parser.add_argument("--title", default="")
    parser.add_argument("--at", type=int, help="budget of the panel over the steps")
    given = parser.parse_args()
    draw([row for report in given.reports for row in json.load(open(report))], given.title, given.at, given.picture)


if __name__ == "__main__":
    main()
