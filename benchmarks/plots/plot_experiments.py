#!/usr/bin/env python3
"""Tables and pictures of what benchmarks/experiments.py asked.

    benchmarks/plots/plot_experiments.py merge FOLDER RECORD.json              adds up the cells of documents of several seeds
    benchmarks/plots/plot_experiments.py show RECORD.json PICTURES [--channels CHANNELS.json]
                                     Markdown tables; pictures sablock.svg, loopserve.svg, mosaickv.svg, tangram.svg in a folder

CHANNELS.json is what benchmarks/mosaickv_channels.py writes.
"""
import argparse
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import experiments  # noqa: E402

FAMILIES = sorted({*experiments.FAMILIES, *experiments.WALKS, "multi_key_first"}, key=len, reverse=True)


def merge(folder, record):
    groups = {}
    for file in sorted(folder.glob("*.json")):
        cells = json.loads(file.read_text())
        if not isinstance(cells, list):
            continue
        name = re.sub(rf"-({'|'.join(FAMILIES)})(-\d+)?$", "", file.stem)
        for cell in cells:
            key = cell["method"], cell.get("differs", ""), cell["budget"], cell["family"], cell["turn"]
            to = groups.setdefault(name, {}).setdefault(key, {"questions": 0, "right": 0, "held": 0, "full": 0, "read": 0})
            for field, add in (("questions", cell["questions"]), ("right", cell["right"]),
                               ("held", cell["bytes_held"] * cell["questions"]), ("full", cell["bytes_full"] * cell["questions"]),
                               ("read", (cell["bytes_read_per_step"] or 0) * cell["questions"])):
                to[field] += add
    lines = []
    for name, cells in groups.items():
        rows = [json.dumps([*key, cell["questions"], cell["right"], round(cell["held"] / max(cell["full"], 1), 4),
                            round(cell["read"] / cell["questions"])]) for key, cell in cells.items()]
        lines.append(f'"{name}": [\n' + ",\n".join(rows) + "\n]")
    record.write_text('{"": ["method", "differs", "budget", "family", "turn", "questions", "right", "held", "bytes read per step"],\n'
                      + ",\n".join(lines) + "\n}\n")


class Group:
    """Cells of one group; a row is (method, what differs)."""

    def __init__(self, cells):
        self.cells = cells
        self.rows = list(dict.fromkeys((cell[0], cell[1]) for cell in cells))
        self.budgets = sorted({cell[2] for cell in cells if cell[2] is not None})
        self.families = [family for family in (*experiments.FAMILIES, *experiments.WALKS, "multi_key_first")
                         if any(cell[3] == family for cell in cells)]
        self.families = list(dict.fromkeys(self.families))

    def of(self, method, differs="", budget=None, family=None, turns=None):
        return [cell for cell in self.cells if cell[0] == method and cell[1] == differs and cell[2] in (budget, None)
                and family in (cell[3], None) and (turns is None or cell[4] in turns)]

    def percent(self, *which, **more):
        cells = self.of(*which, **more)
        return 100 * sum(cell[6] for cell in cells) / sum(cell[5] for cell in cells) if cells else None

    def mean(self, method, differs="", budget=None, families=None):
        """Of the families' shares."""
        shares = [self.percent(method, differs, budget, family) for family in families or self.families]
        shares = [share for share in shares if share is not None]
        return sum(shares) / len(shares) if shares else None

    def by_turn(self, method, differs, budget, family):
        if family == "conversation":
            parts = ((1,), (2,), (3,))
        elif family == "conversation_9":
            parts = ((1,), (2, 3, 4, 5), (6, 7, 8, 9))
        else:
            parts = (None,)
        return " / ".join(shown(self.percent(method, differs, budget, family, turns)) for turns in parts)


def shown(value):
    return "" if value is None else f"{value:.0f}"


def label(method, differs=""):
    return f"`{method}`" + (f", {differs}" if differs else "")


def print_table(head, rows):
    print("| " + " | ".join(map(str, head)) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def print_families(group, budgets=None, rows=None):
    """One line a row and budget; conversations by turn."""
    heads = {"conversation": "conversation, turns 1 / 2 / 3", "conversation_9": "nine turns: 1 / 2 to 5 / 6 to 9"}
    lines = []
    for method, differs in rows or group.rows:
        for budget in budgets or group.budgets:
            cells = group.of(method, differs, budget)
            if not cells or (cells[0][2] is None and budget != (budgets or group.budgets)[0]):
                continue
            held = sum(cell[7] * cell[5] for cell in cells) / sum(cell[5] for cell in cells)
            lines.append([label(method, differs), "" if cells[0][2] is None else budget,
                          *(group.by_turn(method, differs, budget, family) for family in group.families), f"{100 * held:.1f} %"])
    print_table(["method", "budget", *(heads.get(family, family) for family in group.families), "held"], lines)


def canvas(rows, columns, width=4.2, height=3.4):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot.subplots(rows, columns, squeeze=False, layout="constrained", figsize=(width * columns, height * rows))


def heat(axis, grid, xs, ys, title, xlabel, ylabel):
    axis.imshow([[-1 if value is None else value for value in line] for line in grid], cmap="YlGn", vmin=0, vmax=130, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axis.text(x, y, shown(value), ha="center", va="center", fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_xticks(range(len(xs)), xs, fontsize=8)
    axis.set_yticks(range(len(ys)), ys, fontsize=8)


def curve(axis, points, **style):
    points = [(x, y) for x, y in sorted(points) if y is not None]
    if points:
        axis.plot(*zip(*points), marker=style.pop("marker", "o"), markersize=4, **style)


def finish(axis, title, xlabel, log=False):
    axis.set_title(title, fontsize=9)
    axis.set(xlabel=xlabel, ylabel="right answers, %", ylim=(-4, 104))
    if log:
        axis.set_xscale("log", base=2)
    axis.legend(fontsize=7)


def value_of(differs):
    return float(differs.split("=")[1])


def show_sablock(groups, pictures):
    for context in (4096, 8192):
        for kind, title in (("parts", "parts"), ("small", "short budgets, window 8"), ("fixed", "blocks of a fixed size")):
            group = groups.get(f"sablock-{kind}-{context}")
            if not group:
                continue
            print(f"SABlock, {context} tokens, {title}; question last / first:\n")
            print_table(["", *group.budgets], [[label(*row), *(" / ".join(
                shown(group.percent(*row, budget, family)) for family in group.families) for budget in group.budgets)]
                for row in group.rows])
    sweep, fixed = groups.get("sablock-sweep-4096"), groups.get("sablock-fixed-4096")
    maps = Group([cell for name, group in groups.items() if name.startswith("sablock-map") for cell in group.cells])
    figure, axes = canvas(2, 3)
    if fixed:
        for method, differs in fixed.rows:
            size = int(value_of(differs)) if differs else 1
            curve(axes[0][0], [(budget, fixed.mean(method, differs, budget)) for budget in fixed.budgets], label=f"block {size}")
        finish(axes[0][0], "blocks of a fixed size, 4,096 tokens", "budget", log=True)
    if sweep:
        for name, base in (("lambda", 0.5), ("alpha", 0.5), ("coverage", 0.9)):
            points = [(value_of(differs), sweep.mean(method, differs, 48)) for method, differs in sweep.rows if differs.startswith(name)]
            points.append((base, sweep.mean("sablock", "", 48)))
            curve(axes[0][1], points, label=name)
            print(f"{name}: " + ", ".join(f"{x:g} {shown(y)}" for x, y in sorted(points)) + "\n")
        finish(axes[0][1], "sensitivity, 4,096 tokens, budget 48", "value")
    lengths = experiments.LENGTHS
    for axis, method in zip((axes[0][2], *axes[1]), ("h2o", "snapkv", "chunkkv", "sablock")):
        heat(axis, [[maps.percent(method, "", 48, f"{length} tokens, depth {depth}") for length in lengths] for depth in experiments.DEPTHS],
             lengths, experiments.DEPTHS, f"one needle, {method}, budget 48", "tokens", "depth, %")
    for method, differs in maps.rows:
        print(f"needle map, {method}: " + ", ".join(f"{budget}: {shown(maps.percent(method, differs, budget))}" for budget in (48, 96)))
    print()
    figure.savefig(pictures / "sablock.svg")


def show_loopserve(groups, pictures):
    main = Group([cell for name in ("decode", "lines") for cell in getattr(groups.get(f"loopserve-{name}-2048"), "cells", [])])
    print("LoopServe, 2,048 tokens, B = 128:\n")
    print_families(main)
    steps = {pool: groups.get(f"loopserve-steps-pool{pool}-2048") for pool in (1, 7)}
    for pool, group in steps.items():
        if group:
            print(f"loopserve_decode, 2,048 tokens, B = 128, pool {pool}:\n")
            print_families(group)
    alpha = groups.get("loopserve-alpha-2048")
    if alpha:
        print("alpha, 2,048 tokens, pool 7:\n")
        print_families(alpha)
    figure, axes = canvas(1, 3)
    for pool in (1, 7):
        group = groups.get(f"loopserve-budgets-pool{pool}-2048")
        if group:
            curve(axes[0][0], [(budget, group.mean("loopserve_decode", "", budget)) for budget in group.budgets],
                  label=f"loopserve_decode, pool {pool}")
            if pool == 7:
                curve(axes[0][0], [(budget, group.mean("snapkv", "", budget)) for budget in group.budgets], label="snapkv")
                print("budgets, 2,048 tokens:\n")
            print_families(group)
    finish(axes[0][0], "B, 2,048 tokens, mean of six families", "B", log=True)
    for pool, group in steps.items():
        for name, base in (("every", 16), ("observed", 16)):
            if group:
                points = [(value_of(differs), group.mean(method, differs, 128)) for method, differs in group.rows if differs.startswith(name)]
                curve(axes[0][1], points + [(base, group.mean("loopserve_decode", "", 128))], label=f"{name}, pool {pool}")
    finish(axes[0][1], "every and observed, 2,048 tokens, B = 128", "value", log=True)
    if alpha:
        for method in ("loopserve_prefill", "loopserve"):
            points = [(value_of(differs), alpha.mean(of, differs, 128)) for of, differs in alpha.rows if of == method and "alpha" in differs]
            curve(axes[0][2], points + [(0.955, alpha.mean(method, "", 128))], label=method)
        finish(axes[0][2], "alpha, 2,048 tokens, pool 7", "alpha")
    figure.savefig(pictures / "loopserve.svg")


def show_mosaickv(groups, pictures, channels):
    for context, budget in ((4096, 410), (8192, 819)):
        group = groups.get(f"mosaickv-bar-{context}")
        if group:
            print(f"MosaicKV, {context} tokens, a quarter of the channels, a tenth of the tokens:\n")
            print_families(group)
    ablation, table = groups.get("mosaickv-ablation-2048"), groups.get("mosaickv-table-2048")
    figure, axes = canvas(1, 4 if channels else 2, width=4)
    if ablation:
        print("Ablation, 2,048 tokens, 205 of them:\n")
        print_families(ablation)
        print_table(["", "mean of the families"], [[label(*row), f"{ablation.mean(*row, 205):.1f}"] for row in ablation.rows])
        for method in ("mosaickv_rotated", "mosaickv_plain"):
            points = [(100 * value_of(differs), ablation.mean(of, differs, 205)) for of, differs in ablation.rows
                      if of == method and "channels" in differs]
            curve(axes[0][1], points + [(25, ablation.mean(method, "", 205))], label=f"the same channels for all, {'rotated' if 'rot' in method else 'given'}")
        axes[0][1].plot([25, 25], [ablation.mean(name, "", 205) for name in ("mosaickv", "mosaickv_unrotated")], "k*", label="each vector's own: rotated, given")
        axes[0][1].axhline(ablation.mean("full"), color="0.7", linewidth=1)
        finish(axes[0][1], "channels, 10 % of 2,048 tokens", "% of the channels")
    if table:
        rows = {(0.25 if not differs else value_of(differs)): (method, differs) for method, differs in table.rows}
        grid = [[table.mean(*rows[share], budget) for budget in table.budgets] for share in sorted(rows)]
        shares = [f"{100 * share:g}" for share in sorted(rows)]
        heat(axes[0][0], grid, [f"{100 * budget / 2048:.1f}" for budget in table.budgets], shares, "right answers, %: six families, 2,048 tokens",
             "% of the tokens", "% of the channels")
        print_table(["channels, % \\ tokens", *table.budgets], [[share, *map(shown, line)] for share, line in zip(shares, grid)])
    if channels:
        for axis, side, name in zip(axes[0][2:], "kv", ("keys", "values")):
            for kind in ("given", "rotated"):
                axis.plot([100 * often for often in channels[side][kind]["often"]], label=f"{kind}: among the largest quarter")
            axis.plot([100 * share for share in channels[side]["rotated"]["energy"]], "k:", label="rotated: share of the energy")
            axis.set_title(f"where the largest elements of {name} lie", fontsize=9)
            axis.set(xlabel="channel, by falling energy", ylabel="%", ylim=(0, 104))
            axis.legend(fontsize=7)
    figure.savefig(pictures / "mosaickv.svg")


def show_tangram(groups, pictures):
    group = groups.get("tangram-2048")
    if not group:
        return
    held = lambda differs: "" if not group.of("tangram", differs, 205) else \
        f"{100 * sum(cell[7] for cell in group.of('tangram', differs, 205)) / len(group.of('tangram', differs, 205)):.1f} %"
    kinds = [("calibrated", "profile=profile-all-{:g}.json"), ("even", "profile=even-{:g}.json")]
    others = [(f"calibrated on {name}", f"profile=profile-{name}-{{:g}}.json") for name in experiments.SOURCES]
    lines = []
    for share in experiments.SHARES:
        for name, form in (*kinds, *others):
            differs = form.format(share)
            if ("tangram", differs) in group.rows:
                lines.append([f"{share:g}", name, *(group.by_turn("tangram", differs, 205, family) for family in group.families),
                              f"{group.mean('tangram', differs, 205):.1f}", held(differs)])
    print("TANGRAM, 2,048 tokens:\n")
    print_table(["share", "shares of heads", *group.families, "mean", "held"], lines)
    figure, axes = canvas(1, 2, width=5)
    for name, form in (*kinds, *others):
        curve(axes[0][0], [(100 * share, group.mean("tangram", form.format(share), 205)) for share in experiments.SHARES], label=name)
    finish(axes[0][0], "mean of the families", "kept, % of a prompt", log=True)
    for family in ("variable_tracking", "frequent_words", "long_answer", "conversation"):
        for (name, form), line in zip(kinds, ("-", ":")):
            color = f"C{('variable_tracking', 'frequent_words', 'long_answer', 'conversation').index(family)}"
            curve(axes[0][1], [(100 * share, group.percent("tangram", form.format(share), 205, family)) for share in experiments.SHARES],
                  linestyle=line, color=color, label=f"{family}, {name}")
    finish(axes[0][1], "families that differ", "kept, % of a prompt", log=True)
    figure.savefig(pictures / "tangram.svg")


def show_rows(groups, *prefixes):
    cells = [cell for name, group in groups.items() if name.startswith(prefixes) for cell in group.cells]
    if cells:
        print(f"{prefixes[0]}:\n")
        print_families(Group(cells))


def show(given):
    record = json.loads(given.record.read_text())
    groups = {name: Group(cells) for name, cells in record.items() if name}
    given.pictures.mkdir(parents=True, exist_ok=True)
    show_sablock(groups, given.pictures)
    show_loopserve(groups, given.pictures)
    show_mosaickv(groups, given.pictures, json.loads(given.channels.read_text()) if given.channels else None)
    show_tangram(groups, given.pictures)
    show_rows(groups, "fp8")
    show_rows(groups, "rows", "mosaickv-rows")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    merging = commands.add_parser("merge")
    merging.add_argument("folder", type=pathlib.Path)
    merging.add_argument("record", type=pathlib.Path)
    merging.set_defaults(run=lambda given: merge(given.folder, given.record))
    showing = commands.add_parser("show")
    showing.add_argument("record", type=pathlib.Path)
    showing.add_argument("pictures", type=pathlib.Path)
    showing.add_argument("--channels", type=pathlib.Path)
    showing.set_defaults(run=show)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
