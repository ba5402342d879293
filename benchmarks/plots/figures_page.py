#!/usr/bin/env python3
"""Writes benchmarks/results/README.md: the newest value of every figure that a record holds, and where it comes from.

    benchmarks/plots/figures_page.py [--check] [REPOSITORY]

--check writes nothing and fails where the page would change. Read are:
- the JSON records under benchmarks/results: a run of gpu.sh (or two_trees.py) names its card, date and commit;
- diary/provenance.json, which names machine, command and commit of the records that do not;
- diary/figures.json: figures of the diary that no record holds. Each must stand on the page that it names.
A figure is the newest of its card; of one day, the one whose record comes first.
"""
import json
import pathlib
import re
import sys

HERE = "benchmarks/plots/figures_page.py"
MOST_BYTES = 30_000
RUN = "benchmarks/gpu.sh"
NOT_RECORDS = ("diary/provenance.json", "diary/figures.json")

HEAD = f"""# Figures of today

The script `{HERE}` makes this page from the records beside it; a check keeps it as they are. After a new record run
the script again. Each figure is the newest one of its card. The letter before a row names its source: card, date,
commit and command stand in the [table of sources](#sources). A row of an older source holds only what no newer one
measured on that card. Absolute times hold for the machine of their record only.

What a figure means, and what failed, stands in [docs/results.md](../../docs/results.md) and in the
[diary](#the-diary), one file a day. [Records and what made them](diary/README.md) has a line for each file.
"""


LINE = " (by a straight line)"  # through fewer layers: so many do not fit


def table(*columns):
    """The head of a table."""
    return "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)


class sources:
    """Letters for sources in the order of their first use."""

    def __init__(self):
        self.letters = {}

    def letter(self, source):
        if source not in self.letters:
            before, last = divmod(len(self.letters), 26)
            self.letters[source] = (chr(ord("A") + before - 1) if before else "") + chr(ord("A") + last)
        return self.letters[source]

    def table(self):
        yield from table("", "card or machine", "date", "commit", "command", "record")
        for (card, date, commit, command, page), letter in self.letters.items():
            yield f"| {letter} | {card} | {date} | {commit} | `{command}` | [{page.rsplit('/', 1)[-1]}]({page}) |"


def number(text):
    return float(text.replace(",", ""))


def shown(value):
    """Four digits, as records show them, without an exponent."""
    text = f"{value:.4g}"
    return f"{value:,.0f}" if "e" in text or value >= 10000 else text


def by_size(text):
    """8K before 32K, and B1 before B16."""
    scale = {"K": 1 << 10, "M": 1 << 20}
    parts = re.findall(r"(\d+(?:\.\d+)?)(?:([KM])(?![a-zA-Z]))?|([^\d]+)", text)
    return [(0, float(digits) * scale.get(unit, 1), "") if digits else (1, 0.0, word) for digits, unit, word in parts]


def context_name(name):
    """full/131072/B4 -> full/128K/B4, as other benchmarks are named."""
    def short(match):
        tokens = int(match[1])
        return "/" + (f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K")
    return re.sub(r"/(\d{4,})\b", short, name)


def read(root):
    """What lies there: [(date, source, {kernel: us}, {model: ms})] newest first, and {path: record} of the others."""
    results = root / "benchmarks" / "results"
    provenance = json.loads((results / "diary" / "provenance.json").read_text(encoding="utf-8"))
    runs, others, problems = [], {}, []
    for path in sorted(results.rglob("*.json")):
        name = path.relative_to(results).as_posix()
        if name in NOT_RECORDS:
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        machine = record.get("machine") if isinstance(record, dict) else None
        if isinstance(machine, dict):
            kernels = {figure: (value["us"], "") for figure, value in record["figures"].items() if "us" in value}
            entries = [entry for part in record if part.startswith("decode_step")
                       for entry in (record[part] or {}).get("benchmarks", [])]
            models = {context_name(entry["name"]): (entry["real_time"], LINE if entry.get("extrapolated") else "")
                      for entry in entries}
            source = (machine["gpu"], machine["date"], machine["commit"], record.get("command", RUN), name)
            runs.append((machine["date"], source, kernels, models))
        elif name in provenance:
            others[name] = (record, provenance[name])
        else:
            problems.append(f"{name} names no machine: say in diary/provenance.json what made it")
    problems += [f"diary/provenance.json names {name}, which is not there" for name in provenance
                 if not (results / name).is_file()]
    for run in json.loads((results / "diary" / "figures.json").read_text(encoding="utf-8")):
        page = root / run["page"]
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        parts = []
        for key, scale in (("kernels", {"us": 1, "ms": 1000}), ("models", {"ms": 1})):
            parts.append({})
            for figure, value in run.get(key, {}).items():
                digits, unit, *remark = value.split(" ", 2)
                if not re.search(rf"(?<![\d.,]){re.escape(digits)}(?!\d|[.,]\d)", text):
                    problems.append(f"diary/figures.json: {run['page']} does not say {digits} ({figure})")
                parts[-1][figure] = (number(digits) * scale[unit], f" ({remark[0]})" if remark else "")
        link = pathlib.PurePosixPath(run["page"])
        link = link.relative_to("benchmarks/results") if link.is_relative_to("benchmarks/results") else "../.." / link
        runs.append((run["date"], (run["card"], run["date"], run["commit"], run["command"], link.as_posix()), *parts))
    runs.sort(key=lambda run: run[0], reverse=True)
    return runs, others, problems


def newest(runs, part):
    """{(card, figure): (value, remark, source)}."""
    found = {}
    for _, source, *parts in runs:
        for figure, (value, remark) in parts[part].items():
            found.setdefault((source[0], figure), (value, remark, source))
    return found


def family_rows(found, letters):
    """One row a family, card and source."""
    rows = {}
    for (card, figure), (value, remark, source) in found.items():
        family, _, rest = figure.partition("/")
        rows.setdefault((family, "H100" in card, source), []).append((rest, shown(value) + remark))
    for family, _, source in sorted(rows, key=lambda row: (row[0], row[1], row[2][1])):
        row = sorted(rows[family, "H100" in source[0], source], key=lambda figure: by_size(figure[0]))
        values = ", ".join(f"{rest} {value}".strip() for rest, value in row)
        yield f"| {letters.letter(source)} | {source[0].removeprefix('NVIDIA ').split()[0]} | `{family}` | {values} |"


def eval_rows(others, letters):
    """Right answers in per cent over families and turns, of the newest record that has a method and budget."""
    suites = {}
    for name, (record, made) in sorted(others.items(), reverse=True):
        match = re.fullmatch(r"accuracy/(\d{4}-\d\d-\d\d)-eval(-multiturn|)(?:-[a-z0-9-]*?)?-(\d+|default)\.json", name)
        if not match or "fp8" in name:
            continue
        date, suite, context = match.groups()
        totals = {}
        for cell in record:
            right, asked = totals.get((cell["method"], cell["budget"]), (0, 0))
            totals[cell["method"], cell["budget"]] = (right + cell["right"], asked + cell["questions"])
        source = (made["machine"], date, made["commit"], made["command"], name)
        for key, (right, asked) in totals.items():
            cells = suites.setdefault((suite.strip("-") or "all families", context), {})
            cells.setdefault(key, (100 * right / asked, source))
    for (suite, context), cells in sorted(suites.items(), key=lambda item: (item[0][0], len(item[0][1]), item[0][1])):
        rows = {}
        for (method, budget), (share, source) in cells.items():
            rows.setdefault(source, {}).setdefault(method, []).append((budget or 0, share))
        for source, methods in rows.items():
            values = []
            for method, budgets in sorted(methods.items()):
                shares = [f"{budget}: {share:.0f}" if budget else f"{share:.0f}" for budget, share in sorted(budgets)]
                values.append(f"{method} {', '.join(shares)}")
            values = "; ".join(values)
            yield f"| {letters.letter(source)} | {suite}, {context} | {values} |"


def torch_rows(others, letters):
    for name, (record, made) in others.items():
        if not name.endswith("-torch.json"):
            continue
        card = record["machine"].split(",")[0]
        letter = letters.letter((card, record["date"], made["commit"], made["command"], name))
        for run in record["runs"]:
            for cell in run["cells"]:
                captured = shown(cell["captured_step_ms"]) if "captured_step_ms" in cell else ""
                yield (f"| {letter} | `{cell['method']}` | {cell['tokens'] >> 10}K, {cell['batch']} "
                       f"| {shown(cell['step_ms'])} | {captured} | {cell['cache_bytes'] / 1e9:.2f} |")


def tool_rows(others, letters):
    for name, (record, made) in others.items():
        if name.endswith("-tool.json"):
            letter = letters.letter((record["machine"], record["date"], made["commit"], record["command"], name))
            yield (f"{letter}: of {record['asked']:,} answers {record['different']} are right on one backend alone "
                   f"({100 * record['different'] / record['asked']:.2f} %; 1 % is allowed), "
                   f"over {len(record['methods'])} methods and {len(record['families'])} families.")


def cpu_rows(others, letters):
    for name, (record, made) in others.items():
        if not name.endswith("-cpu-decode.json"):
            continue
        date = record["context"]["date"][:10]
        letter = letters.letter((made["machine"], date, made["commit"], made["command"], name))
        values = ", ".join(f"{run['run_name'].split('/')[0]} {shown(run['real_time'])}"
                           for run in record["benchmarks"] if run["aggregate_name"] == "median")
        yield f"| {letter} | {values} |"


def diary_rows(results):
    for page in sorted((results / "diary").glob("2*.md"), reverse=True):
        titles = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
        titles = [re.sub(r"^[^:]*\d{4}-\d\d-\d\d[^:]*: |,? ?(on )?\d{4}-\d\d-\d\d", "", title) for title in titles]
        yield f"- [{page.stem}](diary/{page.name}): {'; '.join(titles)}."


def page_of(root):
    runs, others, problems = read(root)
    letters, results = sources(), root / "benchmarks" / "results"
    lines = HEAD.split("\n")
    lines += ["## Kernels, microseconds", "", "Names are those of `bench_cuda`; medians of 11.", "",
              *table("", "card", "benchmark", ""), *family_rows(newest(runs, 0), letters),
              "", "## Whole models, milliseconds", "",
              "Time between tokens of Llama-3.1-8B's shapes with random weights (`bench_decode_step`); `prompt` is a whole "
              "prompt, `B4` a batch of 4.", "",
              *table("", "card", "method", "context, value"), *family_rows(newest(runs, 1), letters),
              "", "## PyTorch", "",
              *table("", "cache", "context, batch", "step, ms", "captured step, ms", "cache, GB"),
              *torch_rows(others, letters),
              "", "## The CPU backend", "", "Decode attention over 32,768 tokens, milliseconds.", "",
              *table("", ""), *cpu_rows(others, letters),
              "", "## Both backends compared", "", *tool_rows(others, letters),
              "", "## Right answers, per cent", "",
              "`tessera eval` on the example model, over all families and turns together; behind a method stand budgets in "
              "tokens and their shares.", "",
              *table("", "suite, context", ""), *eval_rows(others, letters)]
    shown_above = {source[-1] for source in letters.letters}
    lines += ["", "## Sources", "", *letters.table(),
              "", "Records that other pages draw or that newer ones replace:", "",
              *table("record", "machine", "commit", "command")]
    for name, (_, made) in others.items():
        if name not in shown_above:
            file = name.rsplit("/", 1)[-1]
            lines.append(f"| [{file}]({name}) | {made['machine']} | {made['commit']} | {made['command']} |")
    lines += ["", "## The diary", "", *diary_rows(results), ""]
    text = "\n".join(lines)
    if len(text.encode()) > MOST_BYTES:
        problems.append(f"README.md would have {len(text.encode()):,} bytes; at most {MOST_BYTES:,}")
    return text, problems


def main(words):
    check = "--check" in words
    folders = [word for word in words if word != "--check"]
    root = pathlib.Path(folders[0] if folders else pathlib.Path(__file__).parents[2]).resolve()
    text, problems = page_of(root)
    page = root / "benchmarks" / "results" / "README.md"
    if check and (not page.is_file() or page.read_text(encoding="utf-8") != text):
        problems.append(f"benchmarks/results/README.md is not what the records say: run {HERE}")
    if not check:
        page.write_text(text, encoding="utf-8")
    for problem in problems:
        print(problem)
    print(f"benchmarks/results/README.md: {len(text.encode()):,} bytes, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
