"""What plot_experiments.py reads and draws with: cells of reports, tables of them, panels of a picture."""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
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
            family = "conversation_9" if "-conversation_9" in file.stem else cell["family"]
            key = cell["method"], cell.get("differs", ""), cell["budget"], family, cell["turn"]
            to = groups.setdefault(name, {}).setdefault(key, {"questions": 0, "right": 0, "held": 0, "full": 0, "read": 0})
            for field, add in (("questions", cell["questions"]), ("right", cell["right"]),
                               ("held", cell["bytes_held"] * cell["questions"]), ("full", cell["bytes_full"] * cell["questions"]),
                               ("read", (cell["bytes_read_per_step"] or 0) * cell["questions"])):
                to[field] += add
    merged = {name: rows for name, rows in json.loads(record.read_text()).items() if name} if record.is_file() else {}
    for name, cells in groups.items():
        merged[name] = [[*key, cell["questions"], cell["right"], round(cell["held"] / max(cell["full"], 1), 4),
                         round(cell["read"] / cell["questions"])] for key, cell in cells.items()]
    lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in sorted(merged.items())]
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


def documents(*groups):
    counts = sorted({cell[5] for group in groups if group for cell in group.cells})
    return f"{counts[0]} to {counts[-1]} documents a cell" if counts and counts[0] != counts[-1] else f"{counts[0]} documents a cell"


def verdict(bar, judged):
    """What a bar asks, and what misses it: of pairs (holds, what was measured)."""
    judged = list(judged)
    if not judged:
        return
    misses = [measured for holds, measured in judged if not holds]
    print(f"**Bar: {bar}.** " + (f"Holds in {len(judged)} of {len(judged)} comparisons." if not misses else f"Missed in {len(misses)} of {len(judged)} comparisons: " + "; ".join(misses) + ".") + "\n")


def link(file, about):
    print(f"![{about}](images/{file.name})\n")


def picture(figure, file, about):
    """Panels that have nothing to show yet are left out, and a picture of none."""
    for axis in figure.axes:
        if not (axis.has_data() and any(len(line.get_xdata()) for line in axis.lines) or axis.images or axis.patches):
            axis.remove()
    file.unlink(missing_ok=True)
    if figure.axes:
        figure.savefig(file)
        link(file, about)


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
    if axis.lines:
        axis.legend(fontsize=7)


def value_of(differs):
    return float(differs.split("=")[1])
