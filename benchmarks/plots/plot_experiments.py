#!/usr/bin/env python3
"""Makes docs/experiments_tables.md, with its pictures and its record, of what benchmarks/experiments.py asked.

    benchmarks/plots/plot_experiments.py FOLDER [--record RECORD.json] [--page PAGE.md] [--channels CHANNELS.json]

Without a FOLDER it makes the page again from the record; with one, its groups of cells replace the record's. Cells of documents of several
seeds are added up. What the page says of a
bar is computed. CHANNELS.json is what benchmarks/mosaickv_channels.py writes; a profile of lines in FOLDER is drawn too.
"""
import argparse
import contextlib
import json
import pathlib
import re
import shutil

from eval_cells import (Group, canvas, curve, documents, experiments, finish, heat, label, link, merge, picture, print_families, print_table,
                        shown, value_of, verdict)

ROOT = experiments.ROOT
ACCURACY = ROOT / "benchmarks/results/accuracy/experiments"


def show_sablock(groups, pictures):
    parts = [group for context in (4096, 8192) if (group := groups.get(f"sablock-parts-{context}"))]
    if not parts:
        return
    print(f"## SABlock's parts\n\nEight keys, the question last / first; {documents(*parts)}.\n")
    judged = []
    for context in (4096, 8192):
        for kind, title in (("parts", "parts (`lambda=0`: without segment scoring; `largest=1`: without blocks)"),
                            ("small", "short budgets, a window of 8"), ("fixed", "blocks of a fixed size")):
            group = groups.get(f"sablock-{kind}-{context}")
            if not group:
                continue
            print(f"{context:,} tokens, {title}:\n")
            name = label if kind != "fixed" else lambda method, differs: f"block of {differs.partition('=')[2] or 1}"
            print_table(["budget", *group.budgets], [[name(*row), *(
                " / ".join(shown(group.percent(*row, budget, family)) for family in group.families) for budget in group.budgets)] for row in group.rows])
            if kind == "parts":
                judged += [(share >= least, f"{shown(share)} % at {context:,} tokens, budget {budget}, `{family}`") for budget, least in ((48, 95), (96, 100))
                           for family in group.families if (share := group.percent("sablock", "", budget, family)) is not None]
    verdict("at least 95 % at a budget of 48, all at 96", judged)
    sweep, fixed = groups.get("sablock-sweep-4096"), groups.get("sablock-fixed-4096")
    maps = Group([cell for name, group in groups.items() if name.startswith("sablock-map") for cell in group.cells])
    figure, axes = canvas(2, 3)
    if fixed:
        for method, differs in fixed.rows:
            curve(axes[0][0], [(budget, fixed.mean(method, differs, budget)) for budget in fixed.budgets], label=f"block {int(value_of(differs)) if differs else 1}")
        finish(axes[0][0], "blocks of a fixed size, 4,096 tokens", "budget", log=True)
    if sweep:
        print("Sensitivity, 4,096 tokens, budget 48, mean of both places of the question:\n")
        for name, base in (("lambda", 0.5), ("alpha", 0.5), ("coverage", 0.9)):
            points = [(value_of(differs), sweep.mean(method, differs, 48)) for method, differs in sweep.rows if differs.startswith(name)]
            points = sorted([*points, (base, sweep.mean("sablock", "", 48))])
            curve(axes[0][1], points, label=name)
            print_table([f"`{name}`", *(f"{x:g}" for x, _ in points)], [["%", *(shown(y) for _, y in points)]])
        finish(axes[0][1], "sensitivity, 4,096 tokens, budget 48", "value")
    if maps.rows:
        print("One needle at five depths of texts of 1,024 to 8,000 tokens, mean:\n")
        print_table(["", 48, 96], [[label(*row), *(shown(maps.percent(*row, budget)) for budget in (48, 96))] for row in maps.rows])
        for axis, method in zip((axes[0][2], *axes[1]), ("h2o", "snapkv", "chunkkv", "sablock")):
            heat(axis, [[maps.percent(method, "", 48, f"{length} tokens, depth {depth}") for length in experiments.LENGTHS]
                        for depth in experiments.DEPTHS], experiments.LENGTHS, experiments.DEPTHS, f"one needle, {method}, budget 48", "tokens", "depth, %")
    picture(figure, pictures / "sablock.svg", "SABlock: fixed blocks, sensitivity, needle maps")


def show_loopserve(groups, pictures):
    main = Group([cell for name in ("decode", "lines") for cell in getattr(groups.get(f"loopserve-{name}-2048"), "cells", [])])
    if not main.cells:
        return
    print("""## LoopServe: places of the question, turns, long answers

All of this section, and the rows of LoopServe in later ones, had the first choice at the prompt's end and random \
sampled rows, which `--set first=0
--set sampling=random` gives today. LoopServe's own falls after 16 outputs of a turn, which read everything: \
[results](results.md#lines-of-prompts-and-choices-that-are-made-again).
""")
    print(f"2,048 tokens, B = 128; {documents(main)}. "
          "Pool 1 is without pooling, as the paper's choice; A-shape, Tri-shape and vertical-slash have the shapes in `benchmarks/experiments.py`.\n")
    print_families(main)
    full = {family: main.percent("full", "", None, family) for family in main.families}
    for name, differs in (("pool 1", ""), ("pool 7", "pool=7")):
        verdict(f"`loopserve` within 3 points of `full`, {name}", [
            (share >= full[family] - 3, f"{shown(share)} of {shown(full[family])} in `{family}`") for family in main.families
            if (share := main.percent("loopserve", differs, 128, family)) is not None and full[family] is not None])
    steps = {pool: groups.get(f"loopserve-steps-pool{pool}-2048") for pool in (1, 7)}
    for pool, group in steps.items():
        if group:
            print(f"`every` and `observed`, dense prompts, pool {pool}; {documents(group)}:\n")
            print_families(group)
    alpha = groups.get("loopserve-alpha-2048")
    if alpha:
        print(f"`alpha`, pool 7; {documents(alpha)}:\n")
        print_families(alpha)
    budgets = {pool: groups.get(f"loopserve-budgets-pool{pool}-2048") for pool in (1, 7)}
    figure, axes = canvas(1, 3)
    for pool, group in budgets.items():
        if group:
            print(f"B, dense prompts, pool {pool}; {documents(group)}:\n")
            print_families(group)
            curve(axes[0][0], [(budget, group.mean("loopserve_decode", "", budget)) for budget in group.budgets],
                  label=f"loopserve_decode, pool {pool}")
            if pool == 7:
                curve(axes[0][0], [(budget, group.mean("snapkv", "", budget)) for budget in group.budgets], label="snapkv")
    finish(axes[0][0], "B, mean of the families asked", "B", log=True)
    for pool, group in steps.items():
        for name in ("every", "observed"):
            if group:
                points = [(value_of(differs), group.mean(method, differs, 128)) for method, differs in group.rows if differs.startswith(name)]
                curve(axes[0][1], points + [(16, group.mean("loopserve_decode", "", 128))], label=f"{name}, pool {pool}")
    finish(axes[0][1], "every and observed, B = 128", "value", log=True)
    if alpha:
        for method in ("loopserve_prefill", "loopserve"):
            points = [(value_of(differs), alpha.mean(of, differs, 128)) for of, differs in alpha.rows if of == method and "alpha" in differs]
            curve(axes[0][2], points + [(0.955, alpha.mean(method, "", 128))], label=method)
    finish(axes[0][2], "alpha, pool 7", "alpha")
    picture(figure, pictures / "loopserve.svg", "LoopServe over B, every, observed and alpha")


def show_mosaickv(groups, pictures, channels):
    bars = [(context, budget, group) for context, budget in ((4096, 410), (8192, 819)) if (group := groups.get(f"mosaickv-bar-{context}"))]
    if not bars:
        return
    print("## MosaicKV: a quarter of the channels, a tenth of the tokens\n\nThe model's heads have 64 channels, so 16 elements stay; those of "
          "the paper's models have 128.\n")
    judged = []
    for context, budget, group in bars:
        print(f"{context:,} tokens; {documents(group)}:\n")
        print_families(group)
        judged += [(share >= whole - 5, f"{shown(share)} of {shown(whole)} in `{family}` at {context:,} tokens") for family in group.families
                   if (share := group.percent("mosaickv", "", budget, family)) is not None
                   and (whole := group.percent("full", "", None, family)) is not None]
    verdict("every family within 5 points of `full`", judged)
    ablation, table = groups.get("mosaickv-ablation-2048"), groups.get("mosaickv-table-2048")
    figure, axes = canvas(1, 4 if channels else 2, width=4)
    if ablation:
        print(f"""Parts of it, 2,048 tokens, a tenth of them; {documents(ablation)}. `mosaickv_plain`: neither rotation nor a choice for each \
vector; `mosaickv_rotated`: the same channels for all vectors after rotation; `mosaickv_unrotated`: a choice for each vector without rotation.
""")
        print_families(ablation)
        order = [("mosaickv_plain", "channels=0.25"), ("mosaickv_rotated", "channels=0.25"), ("mosaickv", ""), ("mosaickv", "strategy=searched")]
        if all(row in ablation.rows for row in order):  # records up to 2026-11-22 have no quarter of the channels for all vectors
            means = [ablation.mean(*row, 205) for row in order]
            verdict("plain, rotated, for each vector, searched: in this order (figure 9)",
                    [(means == sorted(means), "means of the families " + ", ".join(f"{mean:.1f}" for mean in means))])
        for method in ("mosaickv_rotated", "mosaickv_plain"):
            points = [(100 * value_of(differs), ablation.mean(of, differs, 205)) for of, differs in ablation.rows
                      if of == method and "channels" in differs]
            points += [(60, ablation.mean(method, "", 205))]  # its default
            curve(axes[0][1], points, label=f"the same channels for all, {'rotated' if 'rot' in method else 'given'}")
        axes[0][1].plot([25, 25], [ablation.mean(name, "", 205) for name in ("mosaickv", "mosaickv_unrotated")], "k*", label="each vector's own: rotated, given")
        axes[0][1].axhline(ablation.mean("full"), color="0.7", linewidth=1)
        finish(axes[0][1], "channels, 10 % of 2,048 tokens", "% of the channels")
    if table:
        rows = {(0.25 if not differs else value_of(differs)): (method, differs) for method, differs in table.rows}
        grid = [[table.mean(*rows[share], budget) for budget in table.budgets] for share in sorted(rows)]
        shares = [f"{100 * share:g}" for share in sorted(rows)]
        heat(axes[0][0], grid, [f"{100 * budget / 2048:.1f}" for budget in table.budgets], shares, "right answers, %, 2,048 tokens",
             "% of the tokens", "% of the channels")
        print(f"Channels by tokens, mean of {', '.join(f'`{family}`' for family in table.families)}; {documents(table)}:\n")
        print_table(["channels, % \\ tokens", *table.budgets], [[share, *map(shown, line)] for share, line in zip(shares, grid)])
    if channels:
        for axis, side, name in zip(axes[0][2:], "kv", ("keys", "values")):
            for kind in ("given", "rotated"):
                axis.plot([100 * often for often in channels[side][kind]["often"]], label=f"{kind}: among the largest quarter")
            axis.plot([100 * share for share in channels[side]["rotated"]["energy"]], "k:", label="rotated: share of the energy")
            axis.set_title(f"where the largest elements of {name} lie", fontsize=9)
            axis.set(xlabel="channel, by falling energy", ylabel="%", ylim=(0, 104))
            axis.legend(fontsize=7)
    picture(figure, pictures / "mosaickv.svg", "MosaicKV: channels by tokens, channels alone, and where the largest elements lie")


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
    print(f"""## Calibrated shares of the heads

`tangram`, 2,048 tokens, each prompt one chunk; {documents(group)}. Profiles come of other documents and give the share on average; `even` gives it
to every head.
""")
    print_table(["share", "shares of heads", *group.families, "mean", "held"], lines)
    kept = [(share, family, group.percent("tangram", kinds[0][1].format(share), 205, family),
             group.percent("tangram", kinds[1][1].format(share), 205, family)) for share in experiments.SHARES for family in group.families]
    kept = [one for one in kept if None not in one]
    verdict("calibrated at least as good as even in every family, but for noise (two answers of ten)",
            [(mine >= even - 20, f"{shown(mine)} against {shown(even)} in `{family}` at {share:g}") for share, family, mine, even in kept])
    verdict("better in at least one family", [(any(mine > even + 20 for *_, mine, even in kept), "nowhere by more than noise")])
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
    picture(figure, pictures / "tangram.svg", "Calibrated and even shares over the share")


def show_fp8(groups):
    cells = [cell for name, group in groups.items() if name.startswith("fp8") for cell in group.cells]
    if not cells:
        return
    group = Group(cells)
    print(f"""## Rows in fp8, every method

2,048 tokens; {documents(group)}. The same methods over bf16 rows: [results](results.md).
""")
    print_families(group)


def show_rows(groups):
    cells = [cell for name, group in groups.items() if name.startswith(("rows", "mosaickv-rows")) for cell in group.cells]
    if cells:
        print(f"## Newer methods at 2,048 tokens\n\n{documents(Group(cells))}; as the table in [results](results.md).\n")
        print_families(Group(cells))


def show_lines(file, pictures):
    import plot_lines
    profile = json.loads(file.read_text())
    plot_lines.draw(profile, pictures / "lines.svg")
    shares = [share for layer in profile["share"] for share in layer]
    print(f"""## Which lines carry the attention

`line_profile` over {profile["inputs"]} slices of {profile["context"]:,} tokens. {100 * sum(shares) / len(shares):.1f} % of the lines carry {100 * profile["weight"]:.0f} % of the weight, \
by head {100 * min(shares):.1f} to {100 * max(shares):.1f} %.
""")
    link(pictures / "lines.svg", "Shares of lines by layer and head, and overlaps")


def write_page(record, page, channels, lines):
    pictures = page.parent / "images"
    groups = {name: Group(cells) for name, cells in json.loads(record.read_text()).items() if name}
    with open(page, "w") as out, contextlib.redirect_stdout(out):
        print("""# Experiments on the example model

Made by `benchmarks/plots/plot_experiments.py` from what `benchmarks/experiments.py` asked, on an H200 (`--backend cuda`), MosaicKV's
ablation and rows in fp8 on CPUs; nobody edits this page. Per cent of right answers. A cell of 10 documents moves by 10 points with one answer, and 100 of 10 is an interval from 72 to 100.
""")
        show_sablock(groups, pictures)
        show_loopserve(groups, pictures)
        if lines.is_file():
            show_lines(lines, pictures)
        show_mosaickv(groups, pictures, json.loads(channels.read_text()) if channels.is_file() else None)
        show_tangram(groups, pictures)
        show_fp8(groups)
        show_rows(groups)
    page.write_text(re.sub(r"\n{3,}", "\n\n", page.read_text()).rstrip() + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--record", type=pathlib.Path, default=ACCURACY / "2026-11-22.json")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/experiments_tables.md")
    parser.add_argument("--channels", type=pathlib.Path, default=ACCURACY / "2026-11-22-mosaickv-channels-4096.json")
    given = parser.parse_args()
    lines = given.record.parent / "2026-11-22-lines-2048.json"
    if given.folder:
        merge(given.folder, given.record)
        if (given.folder / "lines-2048.json").is_file():
            shutil.copyfile(given.folder / "lines-2048.json", lines)
    write_page(given.record, given.page, given.channels, lines)


if __name__ == "__main__":
    main()
