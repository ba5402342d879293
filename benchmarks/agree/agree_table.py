#!/usr/bin/env python3
"""Makes the table of a record of agree_all.py, or of a report of `tessera agree --json`.

    benchmarks/agree/agree_table.py RECORD.json                        prints it
    benchmarks/agree/agree_table.py RECORD.json --page PAGE.md --name NAME

The second writes it into a page, between the lines `<!-- agree: NAME -->` and `<!-- end of agree: NAME -->`. One line a method and
length, one column a budget: mean KL(full, method) in nats, and how often the likeliest token is the full cache's. The method with the
smallest mean over its budgets stands first. `0` is exactly 0: every logit had the full cache's bits.
"""
import argparse
import json
import pathlib
import sys


def shown(row):
    if row is None:
        return ""
    if row["kl_mean"] is None:
        return "no number"
    if row["kl_mean"] == 0 and row["same_logits"] == 1:
        return "0"
    value = row["kl_mean"]
    return f"{value:.3f} / {100 * row['same_top']:.0f} %" if value >= 0.001 else f"{value:.1e} / {100 * row['same_top']:.0f} %"


def table(rows):
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    lengths = sorted({row["prompt"] for row in rows})
    lines = {}
    for row in rows:
        lines.setdefault((row["prompt"], row["method"]), {})[row["budget"]] = row
    numbers = lambda of: [row["kl_mean"] for row in of.values() if row["kl_mean"] is not None]
    mean = lambda of: sum(numbers(of)) / len(numbers(of)) if numbers(of) else float("inf")
    text = ["| method | prompt | " + " | ".join(f"{budget:,}" for budget in budgets) + " |",
            "| --- | --- |" + " --- |" * len(budgets)]
    for (prompt, method), of in sorted(lines.items(), key=lambda line: (line[0][0], mean(line[1]))):
        cells = [shown(of.get(budget, of.get(None))) for budget in budgets]
        text.append(f"| `{method}` | {prompt:,} | " + " | ".join(cells) + " |")
    first = next(row for row in rows if row["method"] == "full" and row["prompt"] == lengths[-1])
    text.append(f"\nThe full cache's perplexity at {first['prompt']:,} tokens is {first['perplexity']:.2f}; {first['pieces']} pieces, "
                f"{first['steps']} steps.")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--name")
    given = parser.parse_args()
    made = table(json.loads(given.record.read_text()))
    if not given.page:
        print(made)
        return 0
    if not given.name:
        parser.error("--page needs --name")
    begin, end = f"<!-- agree: {given.name} -->", f"<!-- end of agree: {given.name} -->"
    text = given.page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"agree_table.py: {given.page} has no place for {given.name}; expected the lines {begin} and {end} once each")
    before, after = text[:text.index(begin) + len(begin)], text[text.index(end):]
    given.page.write_text(f"{before}\n{made}\n{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
