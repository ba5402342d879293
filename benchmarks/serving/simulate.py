#!/usr/bin/env python3
"""Serves requests with a fixed memory, by step times that were measured: throughput, time to first token, preemptions.

    benchmarks/serving/simulate.py [--costs FILE] [--memory 48] [--share 0.25] [--requests 200] [--profile FILE]
                                   [--heads 4] [--out RESULT.json] [--pictures FOLDER] [--seed 1]

The systems, each with one part more than the one before it:

    full            every token of every head, pages of 16
    uniform         the same share of a prompt for every head, chunk by chunk
    dynamic         heads of unequal shares that are known only when a chunk has been judged: a chunk is judged and its pages
                    given back while the prompt waits; heads of a layer share pages; a fixed split of each head
    reserved        shares are calibrated: no judging across heads, memory is set aside before a prompt runs
    ragged          heads of like shares share pages, `--heads` of them (4)
    balanced        the decode step is cut evenly, whatever the lengths: all of TANGRAM

An iteration decodes one token of every running request, and takes in one chunk of 2,048 tokens of the first prompt that waits
for it, as vLLM's chunked prefill does. A prompt begins when its pages fit, `dynamic`'s when one raw chunk does. Answers take
pages as they grow; when there are none, the request that came last is put back and starts again (its answer so far becomes
part of its prompt). Python's own library is enough; pictures need matplotlib.
"""
import argparse
import json
import math
import pathlib
import random

PAGE, CHUNK = 16, 2048
SYSTEMS = ("full", "uniform", "dynamic", "reserved", "ragged", "balanced")
# Tokens of prompts and answers: least and most, drawn evenly.
MIXES = {"short": ((2_000, 8_000), (100, 400)), "mid": ((16_000, 32_000), (200, 600)),
         "long": ((64_000, 120_000), (200, 600)), "long answers": ((32_000, 64_000), (1_500, 2_500))}


def made_up_shares(layers, heads, mean, seed=12):
    """Like those of the paper: log-normal, of deviation 0.7 in a layer; the mean is `mean`, and none is above 1."""
    draw = random.Random(seed)
    shares = []
    for _ in range(layers):
        of_layer = 0.25 * draw.gauss(0, 1)
        shares.append([math.exp(of_layer + 0.7 * draw.gauss(0, 1)) for _ in range(heads)])
    for _ in range(20):
        total = sum(map(sum, shares)) / (layers * heads)
        shares = [[min(1.0, max(0.005, share * mean / total)) for share in row] for row in shares]
    return shares


class system:
    """What a kind of serving keeps, what its pages hold, and how long its steps take."""

    def __init__(self, kind, costs, shares, heads):
        self.kind, self.costs = kind, costs
        layers, kv_heads = len(shares), len(shares[0])
        self.unequal = kind not in ("full", "uniform")
        mean = sum(map(sum, shares)) / (layers * kv_heads)
        if not self.unequal:
            shares = [[1.0 if kind == "full" else mean] * kv_heads] * layers
        flat = [share for row in shares for share in row]
        self.mean = sum(flat) / len(flat)
        width = heads if kind in ("ragged", "balanced") else kv_heads
        # Groups are formed over all layers where pages are ragged; else a layer is one group.
        ordered = sorted(flat) if kind in ("ragged", "balanced") else None
        rows = [ordered[i:i + width] for i in range(0, len(flat), width)] if ordered else shares
        self.groups = [max(row) for row in rows]
        self.width = width
        self.token_bytes = costs["token_bytes_of_head"]
        self.heads_of_all = len(flat)

    def lengths(self, done, raw=0):
        """Of each group's longest head, when `done` tokens of a prompt have been judged and `raw` more are there."""
        if self.kind == "full":
            return [done + raw] * len(self.groups)
        return [math.ceil(round(share * done, 6)) + raw for share in self.groups]

    def pages(self, done, raw=0):
        return sum(-(-length // PAGE) for length in self.lengths(done, raw))

    def page_bytes(self):
        return PAGE * self.width * self.token_bytes

    def most_of_prompt(self, tokens):
        """At its peak: one raw chunk beside what stays of those before it."""
        before = (tokens - 1) // CHUNK * CHUNK
        earlier = max(0, before - CHUNK)
        return max(self.pages(before, tokens - before), self.pages(earlier, before - earlier))

    def kept_tokens(self, done):
        return done if self.kind == "full" else self.mean * done

    def chunk_ms(self, done, tokens):
        cost, model = self.costs, self.costs["model"]
        products = 2 * model["parameters"] * tokens / (cost["product_tflops"] * 1e9)
        attended = self.kept_tokens(done) + tokens / 2
        attention = 4 * model["layers"] * model["q_heads"] * model["head_dim"] * tokens * attended / (
            cost["prefill_attention_tflops"] * 1e9)
        judged = {"full": 1.0, "dynamic": cost["chunk_dynamic"]}.get(self.kind, cost["chunk_static"])
        return (products + attention) * judged

    def decode_ms(self, batch, tokens):
        """Of `batch` requests that hold so many tokens of each head, on average over the heads."""
        cost = self.costs
        if not batch:
            return 0.0
        sizes, times = zip(*sorted((int(size), time) for size, time in cost["step_ms"].items()))
        if batch >= sizes[-1]:
            last = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            weights = times[-1] + last * (batch - sizes[-1])
        else:
            above = next(i for i, size in enumerate(sizes) if size >= batch)
            low = max(0, above - 1)
            part = (batch - sizes[low]) / max(1, sizes[above] - sizes[low])
            weights = times[low] + part * (times[above] - times[low])
        slower = 1.0
        if self.unequal:
            slower = cost["split_even"] if self.kind == "balanced" else cost["split_fixed"]
        return weights + slower * tokens * self.heads_of_all * self.token_bytes / (cost["attention_gbs"] * 1e6)


class request:
    def __init__(self, arrival, prompt, answer):
        self.arrival, self.prompt, self.answer = arrival, prompt, answer
        self.done = self.raw = 0  # of the prompt; of the answer, since the prompt was taken in
        self.told = 0             # of the answer, before the request was put back
        self.held = self.reserved = 0  # pages
        self.ends = ()                 # by a length modulo a page: groups whose page is full then
        self.first = self.end = None

    def take(self, one, tokens):
        """A chunk of the prompt has been taken in, and judged."""
        self.done += tokens
        lengths = one.lengths(self.done)
        self.held = sum(-(-length // PAGE) for length in lengths)
        self.ends = [0] * PAGE
        for length in lengths:
            self.ends[-length % PAGE] += 1

    def growth(self):
        """Pages that the next token needs."""
        return self.ends[self.raw % PAGE]

    def put_back(self):
        self.told, self.prompt = self.told + self.raw, self.prompt + self.raw
        self.done = self.raw = self.held = self.reserved = 0


def serve(kind, costs, shares, requests, memory_bytes, heads=4):
    """Runs all requests through; returns figures."""
    one = system(kind, costs, shares, heads)
    pool = int(memory_bytes // one.page_bytes())
    reserves = kind != "dynamic"
    everyone = [request(*each) for each in requests]
    waiting = sorted(everyone, key=lambda each: each.arrival)
    running, filling = [], None
    now = 0.0
    preemptions = iterations = decoded = 0
    full_up = False  # somebody was put back, and nobody has left since
    while waiting or running or filling:
        used = sum(each.held for each in running) + (max(filling.held, filling.reserved) if filling else 0)
        if not filling and waiting and waiting[0].arrival <= now and not (full_up and running):
            first = waiting[0]
            need = one.most_of_prompt(first.prompt) if reserves else one.pages(0, min(CHUNK, first.prompt))
            if used + need <= pool:
                filling = waiting.pop(0)
                filling.reserved = need
                used += need
            elif not running:
                raise SystemExit(f"{kind}: a prompt of {first.prompt} tokens does not fit into {pool} pages")
        if not filling and not running:
            now = max(now, waiting[0].arrival)
            continue
        # A token of every running request, and the next chunk of a prompt that has reserved nothing.
        while True:
            needed = sum(each.growth() for each in running)
            if filling and not reserves:
                tokens = min(CHUNK, filling.prompt - filling.done)
                needed += max(0, one.pages(filling.done, tokens) - max(filling.held, filling.reserved))
            if used + needed <= pool:
                break
            victims = running + ([filling] if filling and not reserves else [])
            if len(victims) <= 1:
                raise SystemExit(f"{kind}: a request does not fit into {pool} pages")
            last = max(victims, key=lambda each: each.arrival)
            if last is filling:
                used -= max(filling.held, filling.reserved)
                filling = None
            else:
                used -= last.held
                running.remove(last)
            preemptions, full_up = preemptions + 1, True
            last.put_back()
            waiting.insert(0, last)
        time = one.decode_ms(len(running), sum(one.kept_tokens(each.done) + each.raw for each in running))
        if filling:
            tokens = min(CHUNK, filling.prompt - filling.done)
            time += one.chunk_ms(filling.done, tokens)
        now += time
        iterations += 1
        decoded += len(running)
        for each in running:
            each.held += each.growth()
            each.raw += 1
            if each.told + each.raw >= each.answer:
                each.end, full_up = now, False
        running = [each for each in running if each.end is None]
        if filling:
            filling.take(one, tokens)
            if not reserves:
                filling.reserved = 0
            if filling.done >= filling.prompt:
                filling.first = now if filling.first is None else filling.first
                running.append(filling)
                filling = None
    waits = sorted(each.first - each.arrival for each in everyone)
    answers = sum(each.answer for each in everyone)
    return {"system": kind, "tokens_per_s": 1e3 * answers / now, "first_token_ms": {"mean": sum(waits) / len(waits), "median": waits[len(waits) // 2],
                               "p99": waits[min(len(waits) - 1, len(waits) * 99 // 100)]},
            "preemptions": preemptions, "mean_batch": decoded / max(1, iterations), "seconds": now / 1e3}


def saturated(kind, costs, shares, requests, memory_bytes, heads=4):
    """Tokens per second of as many requests, half-way through their answers, as the memory holds; nothing but decoding."""
    one = system(kind, costs, shares, heads)
    pool, used, batch, tokens = int(memory_bytes // one.page_bytes()), 0, 0, 0
    while True:
        _, prompt, answer = requests[batch % len(requests)]
        pages = one.pages(prompt, answer // 2)
        if used + pages > pool:
            return {"batch": batch, "tokens_per_s": 1e3 * batch / one.decode_ms(batch, tokens) if batch else 0.0}
        used, batch, tokens = used + pages, batch + 1, tokens + one.kept_tokens(prompt) + answer // 2


def draw(mix, count, seed, per_second=0.0):
    """Requests (arrival in ms, prompt, answer): Poisson, or all at once."""
    rng = random.Random(seed)
    prompts, answers = MIXES[mix]
    now, all_of_them = 0.0, []
    for _ in range(count):
        if per_second:
            now += rng.expovariate(per_second) * 1e3
        all_of_them.append((now, rng.randint(*prompts), rng.randint(*answers)))
    return all_of_them


def pictures(result, folder):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "serving"})
    from matplotlib import pyplot
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, rate, title in ((axes[0], lambda row: row["saturated"]["tokens_per_s"], "decoding alone, memory full"),
                              (axes[1], lambda row: row["tokens_per_s"], "prompts included")):
        for i, kind in enumerate(SYSTEMS):
            rows = [next(row for row in result["mixes"][mix] if row["system"] == kind) for mix in MIXES]
            full = [next(row for row in result["mixes"][mix] if row["system"] == "full") for mix in MIXES]
            axis.bar([x + (i - 2.5) * 0.14 for x in range(len(MIXES))],
                     [rate(row) / rate(of) for row, of in zip(rows, full)], 0.14, label=kind)
        axis.axhline(2.6, color="0.5", linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(MIXES)), MIXES)
        axis.set_title(f"tokens per second, full = 1, {title}", fontsize=9)
    axes[0].legend(fontsize=7)
    figure.savefig(folder / "serving_parts.svg")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for share, rows in result["heads"].items():
        left.plot([row["heads"] for row in rows], [row["saturated"]["tokens_per_s"] for row in rows], "o-",
                  label=f"{share} kept")
    left.set_xscale("log", base=2)
    groups = [row["heads"] for row in next(iter(result["heads"].values()))]
    left.set_xticks(groups, groups)
    left.set_ylim(bottom=0)
    left.set_xlabel("heads per group")
    left.set_ylabel("tokens per second")
    left.set_title("decoding alone, memory full", fontsize=9)
    left.legend(fontsize=7)
    for kind in SYSTEMS:
        rows = [(rate, row) for rate, rows in result["rates"].items() for row in rows if row["system"] == kind]
        right.plot([float(rate) for rate, _ in rows], [row["first_token_ms"]["mean"] / 1e3 for _, row in rows], ".-",
                   label=kind)
    right.set_yscale("log")
    right.set_xlabel("requests per second")
    right.set_ylabel("time to first token, mean, s")
    right.legend(fontsize=7)
    figure.savefig(folder / "serving_sweeps.svg")


def table(rows):
    lines = ["| system | saturated, tokens/s | of full | batch | served, tokens/s | of full | first token, mean, s | preemptions | batch |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    full = next(row for row in rows if row["system"] == "full")
    for row in rows:
        best, best_full = row["saturated"], full["saturated"]
        lines.append("| {} | {:.0f} | {:.2f} | {} | {:.1f} | {:.2f} | {:.1f} | {} | {:.1f} |".format(
            row["system"], best["tokens_per_s"], best["tokens_per_s"] / best_full["tokens_per_s"], best["batch"],
            row["tokens_per_s"], row["tokens_per_s"] / full["tokens_per_s"], row["first_token_ms"]["mean"] / 1e3,
            row["preemptions"], row["mean_batch"]))
    return "\n".join(lines)


def main():
    here = pathlib.Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=pathlib.Path, default=here / "costs_h200.json")
    parser.add_argument("--memory", type=float, default=48.0, help="GiB for keys and values")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--profile", type=pathlib.Path, help="of `tessera calibrate`; made-up shares without it")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--pictures", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    costs = json.loads(given.costs.read_text())
    model, memory = costs["model"], given.memory * 2**30
    profile = json.loads(given.profile.read_text())["budget"] if given.profile else None
    shares_of = lambda share: profile or made_up_shares(model["layers"], model["kv_heads"], share)
    shares = shares_of(given.share)
    result = {"costs": costs, "memory_gib": given.memory, "share": given.share, "requests": given.requests, "mixes": {},
              "heads": {}, "rates": {}}
    for mix in MIXES:
        requests = draw(mix, given.requests, given.seed)
        result["mixes"][mix] = [
            dict(serve(kind, costs, shares, requests, memory, given.heads),
                 saturated=saturated(kind, costs, shares, requests, memory, given.heads)) for kind in SYSTEMS]
        prompts, answers = MIXES[mix]
        print(f"\n{mix}: prompts of {prompts[0]} to {prompts[1]} tokens, answers of {answers[0]} to {answers[1]}, "
              f"{given.requests} at once\n\n{table(result['mixes'][mix])}")
    if given.out or given.pictures:
        requests = draw("long", given.requests, given.seed)
        for share in (0.75, 0.5, 0.25):
            result["heads"][share] = [
                dict(serve("balanced", costs, shares_of(share), requests, memory, heads), heads=heads,
                     saturated=saturated("balanced", costs, shares_of(share), requests, memory, heads))
                for heads in (1, 2, 4, 8)]
        for rate in (0.1, 0.2, 0.4, 0.8, 1.6):
            requests = draw("mid", given.requests, given.seed, rate)
            result["rates"][rate] = [serve(kind, costs, shares, requests, memory, given.heads) for kind in SYSTEMS]
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.pictures:
        pictures(result, given.pictures)


if __name__ == "__main__":
    main()
