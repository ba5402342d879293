#!/usr/bin/env python3
"""Asks the example model what SABlock's parts are worth, and shows it as tables and pictures.

    benchmarks/sablock.py ask TOOL FOLDER [--contexts 4096,8192] [--count 20] [--map-count 4]
    benchmarks/sablock.py show FOLDER PICTURE.svg

`ask` runs `tessera eval` over eight needles with the question last (multi_key) and first (multi_key_first) and writes
its reports to FOLDER: parts-N.json (SnapKV, SABlock, ablations, lambda, alpha, tau), small-N.json (both with a window of 8
where budgets are short), fixed-N.json (blocks of fixed sizes over budgets) and map.json (one needle over depth and length). `show` prints Markdown tables and draws them.
"""
import argparse
import json
import pathlib
import random
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GRID = "0.1,0.3,0.5,0.7,0.9"
SMALL = "10,12,16,24,32"
DEPTHS = (0, 25, 50, 75, 100)


def tool(path, *arguments):
    subprocess.run([path, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def ask_documents(path, folder, context, count):
    """Both runs over the same documents."""
    tasks = json.loads((ROOT / "examples/data/tasks.json").read_text())
    tasks["families"]["multi_key_first"] = {"about": "eight needles; the question stands first", "needles": 8}
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "tasks.json"
        file.write_text(json.dumps(tasks))
        base = ["eval", "--model", ROOT / "examples/model", "--tasks", file, "--families", "multi_key,multi_key_first",
                "--context", context, "--count", count]
        tool(path, *base, "--methods", "full,snapkv,sablock", "--budgets", "48,96", "--vary", "sablock.lambda=0,0.1,0.3,0.7,0.9",
             "--vary", "sablock.alpha=0.1,0.3,0.7,0.9", "--vary", "sablock.coverage=0.1,0.3,0.5,0.7,1", "--vary",
             "sablock.largest=1", "--vary", "snapkv.window=8", "--json", folder / f"parts-{context}.json")
        tool(path, *base, "--methods", "snapkv,sablock", "--budgets", SMALL, "--set", "window=8", "--vary", "sablock.lambda=0",
             "--vary", "sablock.largest=1", "--json", folder / f"small-{context}.json")
        tool(path, *base, "--methods", "sablock", "--budgets", f"{SMALL},48,96", "--set", "coverage=0", "--set", "largest=1",
             "--vary", "largest=3,5,7,9,10", "--json", folder / f"fixed-{context}.json")


def needle_questions(tool_path, count):
    """One needle at each depth of texts of each length; the length in tokens follows from the tool's own count."""
    text = (ROOT / "examples/data/opticks.txt").read_text()
    tasks = json.loads((ROOT / "examples/data/tasks.json").read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as probe:
        probe.write(text[:8000])
        probe.flush()
        said = subprocess.run([tool_path, "run", "--model", ROOT / "examples/model", "--prompt", probe.name, "--method", "full",
                               "--max-new", "1", "--json"], check=True, capture_output=True, text=True).stdout
    per_token = 8000 / json.loads(said)["prompt_tokens"]
    chance = random.Random(7)
    for length in (1024, 2048, 4096, 8000):
        for depth in DEPTHS:
            for _ in range(count):
                size = int((length - 60) * per_token)
                begin = text.index("\n", chance.randrange(len(text) - size - 2000)) + 1
                lines = text[begin:begin + size].split("\n")
                name = f"{chance.choice(tasks['adjectives'])} {chance.choice(tasks['nouns'])}"
                value = " ".join(chance.sample(tasks["words"], tasks["value_words"]))
                lines.insert(round(depth / 100 * len(lines)), tasks["needle"].format(name=name, value=value))
                question = tasks["question"].format(question=tasks["ask_one"].format(name=name))
                yield {"family": f"{length} tokens, depth {depth}",
                       "turns": [{"prompt": "\n".join(lines) + "\n" + question + tasks["answer"], "answer": value}]}


def ask(given):
    folder = pathlib.Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for context in filter(None, given.contexts.split(",")):
        ask_documents(given.tool, folder, context, given.count)
    if given.map_count:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as questions:
            for one in needle_questions(given.tool, given.map_count):
                questions.write(json.dumps(one) + "\n")
            questions.flush()
            tool(given.tool, "eval", "--model", ROOT / "examples/model", "--questions", questions.name, "--methods",
                 "snapkv,sablock", "--budgets", "48,96", "--json", folder / "map.json")


def load(file):
    """{(method and what differs, budget, family): percent}"""
    shares = {}
    for cell in json.loads(file.read_text()):
        name = cell["method"] + (" " + cell["differs"] if "differs" in cell else "")
        shares[name, cell["budget"], cell["family"]] = 100 * cell["right"] / cell["questions"]
    return shares


def print_table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(f"{value:.0f}" if isinstance(value, float) else str(value) for value in row) + " |")
    print()


def show_parts(file):
    shares = load(file)
    families = ("multi_key", "multi_key_first")
    names = list(dict.fromkeys(name for name, budget, _ in shares if budget))
    head = ["", *(f"{budget}, question {place}" for budget in (48, 96) for place in ("last", "first"))]
    rows = [[f"`{name}`", *(shares[name, budget, family] for budget in (48, 96) for family in families)] for name in names]
    print(f"{file.stem.rsplit('-')[-1]} tokens:\n")
    print_table(head, [["`full`", *(shares["full", None, family] for _ in (48, 96) for family in families)], *rows])
    return {value: [shares[f"sablock {name}={value}", 48, family] for family in families]
            for name in ("lambda", "alpha", "coverage") for value in GRID.split(",")
            if (f"sablock {name}={value}", 48, families[0]) in shares}


def show_small(file):
    shares = load(file)
    budgets = sorted({budget for _, budget, _ in shares})
    print(f"{file.stem.rsplit('-')[-1]} tokens, window 8, question last / first:\n")
    print_table(["", *budgets],
                [[f"`{name}`", *(f"{shares[name, budget, 'multi_key']:.0f} / {shares[name, budget, 'multi_key_first']:.0f}"
                                 for budget in budgets)] for name in dict.fromkeys(name for name, *_ in shares)])


def show_fixed(file):
    shares = load(file)
    budgets = sorted({budget for _, budget, _ in shares})
    sizes = {"sablock": 1, **{name: int(name.rsplit("=")[-1]) for name, *_ in shares if "=" in name}}
    print(f"{file.stem.rsplit('-')[-1]} tokens, blocks of a fixed size, question last / first:\n")
    print_table(["block", *budgets],
                [[size, *(f"{shares[name, budget, 'multi_key']:.0f} / {shares[name, budget, 'multi_key_first']:.0f}"
                          for budget in budgets)] for name, size in sorted(sizes.items(), key=lambda item: item[1])])
    return {size: [(shares[name, budget, "multi_key"] + shares[name, budget, "multi_key_first"]) / 2 for budget in budgets]
            for name, size in sizes.items()}, budgets


def show(given):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    folder = pathlib.Path(given.folder)
    for file in sorted(folder.glob("parts-*.json")):
        show_parts(file)
    for file in sorted(folder.glob("small-*.json")):
        show_small(file)
    fixed = {file: show_fixed(file) for file in sorted(folder.glob("fixed-*.json"))}
    maps = load(folder / "map.json") if (folder / "map.json").is_file() else {}
    figure, axes = pyplot.subplots(1, len(fixed) + (2 if maps else 0), squeeze=False, layout="constrained",
                                   figsize=(4 * (len(fixed) + (2 if maps else 0)), 3.4))
    for axis, (file, (lines, budgets)) in zip(axes[0], fixed.items()):
        for size, line in sorted(lines.items()):
            axis.plot(budgets, line, marker="o", label=f"block {size}")
        axis.set(title=f"fixed blocks, {file.stem.rsplit('-')[-1]} tokens", xlabel="budget", ylabel="% right", ylim=(-3, 103))
        axis.legend(fontsize=7)
    for axis, method in zip(axes[0][len(fixed):], ("snapkv", "sablock")):
        lengths = sorted({int(family.split()[0]) for _, _, family in maps})
        grid = [[maps[method, 48, f"{length} tokens, depth {depth}"] for length in lengths] for depth in DEPTHS]
        axis.imshow(grid, cmap="YlGn", vmin=0, vmax=130, aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8)
        axis.set(title=f"{method}, budget 48: one needle", xlabel="tokens", ylabel="depth %")
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(DEPTHS)), DEPTHS)
    figure.savefig(given.picture)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("tool")
    asking.add_argument("folder")
    asking.add_argument("--contexts", default="4096,8192")
    asking.add_argument("--count", type=int, default=20)
    asking.add_argument("--map-count", type=int, default=4)
    asking.set_defaults(run=ask)
    showing = commands.add_parser("show")
    showing.add_argument("folder")
    showing.add_argument("picture")
    showing.set_defaults(run=show)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
