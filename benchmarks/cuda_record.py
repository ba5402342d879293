#!/usr/bin/env python3
"""Writes the record of a run of benchmarks/gpu.sh: DATE-GPU.md for people, DATE-GPU.json for benchmarks/plots/plot_cuda.py.

    benchmarks/cuda_record.py --logs FOLDER --out FOLDER

FOLDER holds what there is of machine.json, steps.tsv (name, exit status, seconds), bench_cuda*.json, peers.json,
tool.json, turns.json, serving_short.json, serving_shared.json, decode_step.json and those of decode_step_rocketkv, _batch, _packed, _prompts and _long_prompt,
and one NAME.log a step. What is missing is written down as not measured.
"""
import argparse
import glob
import json
import os
import re

import mosaickv_bars
from cuda_bars import best_peer, judge_choosing, judge_following, judge_lines, time_of

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
DECODE = ("B1/8K", "B1/32K", "B1/128K", "B1/256K", "B4/128K", "B8/128K", "B64/8K")
RAGGED = (("calibrated", 1.05), ("log_normal", 1.05), ("one_long", 1.1))
GATHERED = (("B16/singles", 0.55), ("B16/runs_of_16", 0.75))
ROCKETKV = (("B1", "32K", 2.5), ("B1", "128K", 8), ("B8", "128K", 35))  # a step with t = 1,024 against dense
PAPER = "RocketKV's paper, H100"  # arXiv:2502.14051, Fig. 7
TOP_K = (("32x8192/k512", 9), ("8x131072/k2048", 22), ("256x131072/k2048", 95))


def read_json(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):  # not there, or cut off by a time limit
        return None


def read_text(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_figures(logs):
    """{name: {us, min, max, bytes, GB/s, peers: {peer: {us, min, max}}}}; error in place of us where one failed."""
    figures = {}
    reports = [read_json(path) or {} for path in sorted(glob.glob(f"{logs}/bench_cuda*.json"))]
    for run in (run for report in reports for run in report.get("benchmarks", [])):
        figure = figures.setdefault(re.sub("/iterations:.*", "", run["run_name"]), {})
        if run.get("error_occurred"):
            figure["error"] = run["error_message"]
        elif run.get("aggregate_name") == "median":
            figure["us"] = run["real_time"]
            figure.update({key: run[key] for key in ("bytes", "GB/s", "TFLOP/s") if key in run})
        elif run.get("aggregate_name") in ("min", "max"):
            figure[run["aggregate_name"]] = run["real_time"]
    for peer in (read_json(f"{logs}/peers.json") or {}).get("figures", []):
        peers = figures.setdefault(peer["name"], {}).setdefault("peers", {})
        peers[peer["peer"]] = {key: peer[key] for key in ("us", "min", "max", "error") if key in peer}
    return figures


def read_ceiling(figures):
    return figures.get("read/4GiB", {}).get("GB/s")


def copy_ceiling(figures):
    """The fastest copy of any size, by a kernel or by cudaMemcpyAsync."""
    copies = (f for name, f in figures.items() if re.match("(copy|memcpy)/", name))
    return max((f["GB/s"] for f in copies if "GB/s" in f), default=None)


def model_steps(record):
    """{"rocketkv_1024/131072": entry}, from what bench_decode_step wrote."""
    return {entry["name"]: entry for entry in (record or {}).get("benchmarks", [])}


def judge_whole_prompt(steps, tokens, chosen, given, add, ratio):
    """TANGRAM's bar on prompts. `chosen` and `given`: a layer's attention of such a prompt in chunks, in microseconds, its
    tokens chosen or the newest ones kept: what lies between is what choosing adds to the whole prompt."""
    whole = steps.get(f"prompt/tangram/{tokens}", {})
    added = (chosen - given) / 1000 * whole["layers"] if chosen and given and whole else None
    beside = f" ({added:.4g} ms of {whole['real_time']:.4g})" if added is not None else ""
    add("TANGRAM 4", f"what choosing chunk by chunk adds to a whole prompt of {tokens // 1024}K, 32 layers{beside}",
        None if added is None else 100 * ratio(added, whole["real_time"] - added), 3, "at most 3 %", "%")


def judge_model(steps, add, ratio):
    """Bars and comparisons over whole decode steps with RocketKV, t = 1,024."""
    def of(method, context, key):
        return steps.get(f"{method}/{context}", {}).get(key)

    def beside(a, b, unit, scale):
        return f" ({a / scale:.4g} {unit} against {b / scale:.4g})" if a and b else ""

    ours, short = (of("rocketkv_1024", context, "real_time") for context in (131072, 1024))
    add("RocketKV", f"whole model, time between tokens at 128K against 1K{beside(ours, short, 'ms', 1)}",
        ratio(ours, short), 1.08, "at most 1.08", "x")
    add("RocketKV", "end of a prompt of 128K tokens, 32 layers", of("rocketkv_1024", 131072, "end_of_prompt_ms"), 20,
        "at most 20 ms", "ms")
    for context, most in ((131072, 5.15), (32768, 5.05)):
        add("second storey 4", f"whole model, time between tokens at {context // 1024}K", of("rocketkv_1024", context, "real_time"),
            most, f"at most {most} ms", "ms")
    full, ours = (of(method, "131072/B4", "real_time") for method in ("full", "rocketkv_1024"))
    add("second storey 4", f"whole model, batch 4, 128K, faster than `full`{beside(full, ours, 'ms', 1)}", ratio(full, ours), 3.3,
        f"at least 3.3 ({PAPER})", "x", below=False)
    for context in (98304, 131072):
        what = f"whole model, {context // 1024}K"
        full, ours = (of(method, context, "real_time") for method in ("full", "rocketkv_1024"))
        add("RocketKV", f"{what}, faster than `full`{beside(ours, full, 'ms', 1)}", ratio(full, ours), None,
            f"{PAPER}: up to 3.3", "x")
        # Steps need the weights and what the cache holds; the prompt's own peak is that of the uncompressed cache.
        peak, ours_peak = (of(method, context, "peak_bytes") for method in ("full", "rocketkv_1024"))
        cache, ours_cache = (of(method, context, "cache_bytes") for method in ("full", "rocketkv_1024"))
        held = None if None in (peak, cache, ours_cache) else peak - cache + ours_cache
        for name, value in (("memory while decoding, computed: the peak with the other cache", held), ("peak memory, the prompt's included", ours_peak)):
            share = ratio(value, peak)
            add("RocketKV", f"{what}, {name}, against `full`{beside(value, peak, 'GiB', 2**30)}",
                None if share is None else 100 * (share - 1), None, f"{PAPER}: -32.6 % while decoding", "%")


def judge(figures, steps):
    """[{bar, what, measured, limit, verdict}]: every bar that a time decides, and what is only set beside a paper's
    figure. `measured` and `limit` are text."""
    rows = []

    def add(bar, what, value, limit, text, unit, below=True):
        if value is None and limit is None:
            return
        if value is None:
            rows.append({"bar": bar, "what": what, "measured": "", "limit": text, "verdict": "not measured"})
            return
        good = limit is None or (value <= limit if below else value >= limit)
        rows.append({"bar": bar, "what": what, "measured": f"{value:.4g} {unit}".strip(), "limit": text, "value": value,
                     "verdict": "for comparison" if limit is None else "pass" if good else "missed"})

    def ratio(a, b):
        return a / b if a is not None and b else None

    for shape in DECODE:
        name = "decode/" + shape
        ours, peer = time_of(figures, name), best_peer(figures, name)
        beside = f" ({ours:.4g} us, {peer[1]} {peer[0]:.4g} us)" if ours and peer else ""
        value = ratio(ours, peer[0]) if peer else None
        faster = shape in ("B1/8K", "B1/32K")
        add(1, f"decode {shape}{beside}", value, 0.99999 if faster else 1.03,
            "faster than the best peer" if faster else "at most 1.03 of the best peer", "x")
    for shape in DECODE:
        value = ratio(time_of(figures, "decode_paged/" + shape), time_of(figures, "decode/" + shape))
        add(1, f"decode {shape}, pages of 16", value, 1.05, "at most 1.05 of contiguous", "x")
        add("second storey 3", f"decode {shape}, pages of 16", value, 1.01, "at most 1.01 of contiguous", "x")
        ours, peer = time_of(figures, "decode_paged/" + shape), best_peer(figures, "decode_paged/" + shape)
        beside = f" ({ours:.4g} us, {peer[1]} {peer[0]:.4g} us)" if ours and peer else ""
        add("second storey 3", f"decode {shape}, pages of 16{beside}", ratio(ours, peer[0]) if peer else None, 1.01,
            "at most 1.01 of FlashInfer's on the same pages", "x")
    add("second storey 3", "a plain read of 4 GiB in shuffled pieces of 4 KiB",
        ratio(time_of(figures, "read_pieces/shuffled/4GiB"), time_of(figures, "read_pieces/in_order/4GiB")), None,
        "of the same pieces in order", "x")
    ceiling = read_ceiling(figures)
    for shape, least in GATHERED:
        share = ratio(figures.get("gathered/" + shape, {}).get("GB/s"), ceiling)
        add(2, f"2,048 of 128K tokens, {shape}", None if share is None else 100 * share, 100 * least,
            f"at least {100 * least:.0f} % of the read ceiling", "%", below=False)
    for shape in ("B1/singles", "B1/runs_of_16"):
        add(2, f"2,048 of 128K tokens, {shape}", time_of(figures, "gathered/" + shape), 9, "at most 9 us", "us")
    one_read = time_of(figures, "read/256MiB")
    for kind, most in (("lse_computed", 6), ("lse_given", 3.5)):
        add(3, f"window scoring of 128K keys, {kind.replace('_', ' ')}",
            ratio(time_of(figures, "score/128K/" + kind), one_read), most, f"at most {most} reads of K", "reads")
    for shape, most in TOP_K:
        for kind in ("normal", "softmax"):
            add(4, f"top-k {shape}, {kind} scores", time_of(figures, f"top_k/{shape}/{kind}"), most,
                f"at most {most} us", "us")
    copied = copy_ceiling(figures)
    for place, least in (("fresh", 0.75), ("in_place", 0.40)):
        for run in ("singles", "runs_of_16"):
            share = ratio(figures.get(f"pack_{place}/{run}", {}).get("GB/s"), copied)
            add(5, f"pack 128K to a quarter, {place.replace('_', ' ')}, {run}", None if share is None else 100 * share,
                100 * least, f"at least {100 * least:.0f} % of the copy ceiling", "%", below=False)
    for draw in ("drawn", "one_long"):
        value = ratio(time_of(figures, "uneven/" + draw), time_of(figures, f"uneven/{draw}_evened"))
        add(6, f"uneven lengths, {draw}", value, 1.15, "at most 1.15 of the same total evened", "x")
        if draw == "one_long":
            add("second storey 3", f"uneven lengths, {draw}", value, 1.1, "at most 1.10 of the same total evened", "x")
    for kind, limit in RAGGED:
        for batch in ("B1", "B4", "B16", "B64"):
            ours = time_of(figures, f"ragged/{kind}/{batch}")
            value = ratio(ours, time_of(figures, f"ragged/{kind}/{batch}_evened"))
            add("TANGRAM 2", f"ragged pages, {kind}, {batch}", value, limit, f"at most {limit:.2f} of the same total evened", "x")
            for peer, time in sorted(figures.get(f"ragged/{kind}/{batch}", {}).get("peers", {}).items()):
                beside = f" ({ours:.4g} us, {peer} {time['us']:.4g} us)" if ours and "us" in time else ""
                add("TANGRAM 2", f"ragged pages, {kind}, {batch}, faster than {peer}{beside}", ratio(time.get("us"), ours),
                    None, "the paper: 1.15 to 1.7", "x")
    for tokens in ("32K", "128K"):
        ours, given = (time_of(figures, f"chunks/{tokens}/{which}") for which in ("tangram", "given"))
        beside = f" ({ours:.4g} us against {given:.4g})" if ours and given else ""
        add("TANGRAM 4", f"a layer's attention of a prompt of {tokens} in chunks{beside}", ratio(ours, given), None,
            "of the same with the newest tokens kept", "x")
        judge_whole_prompt(steps, int(tokens[:-1]) * 1024, ours, given, add, ratio)
    for batch, context, least in ROCKETKV:
        ours = time_of(figures, f"rocketkv/{batch}/{context}/t1024/step")
        peer = best_peer(figures, f"decode/{batch}/{context}")
        beside = f" ({ours:.4g} us, {peer[1]} {peer[0]:.4g} us)" if ours and peer else ""
        add("RocketKV", f"step, t = 1,024, {batch} {context}{beside}", ratio(peer[0], ours) if peer else None, least,
            f"at least {least} times faster than the best dense peer", "x", below=False)
        if (batch, context) == ("B1", "32K"):
            add("second storey 3", f"step, t = 1,024, {batch} {context}", ratio(peer[0], ours) if peer else None, 2.65,
                "at least 2.65 times faster than the best dense peer", "x", below=False)
    judge_choosing(figures, add, ratio)
    judge_lines(figures, add, ratio)
    judge_following(figures, add, ratio)
    mosaickv_bars.judge(figures, add, ratio, time_of, best_peer, read_ceiling(figures))
    judge_model(steps, add, ratio)
    mosaickv_bars.judge_model(steps, add, ratio)
    return rows


def read_tests(log):
    """What Catch2, 2 or 3, says at the end: {passed, failed, cases, skipped}; None where it did not come to that."""
    skipped = "skipped: no CUDA device" in log
    whole = re.search(r"All tests passed \((\d+) assertions? in (\d+) test cases?\)", log)
    if whole:
        return {"passed": int(whole[1]), "failed": 0, "cases": int(whole[2]), "skipped": skipped}
    line = re.search(r"^assertions: *(.*)$", log, re.M)
    cases = re.search(r"^test cases: *(\d+)", log, re.M)
    if not line:
        return None

    def number(word):
        found = re.search(r"(\d+) " + word, line[1])
        return int(found[1]) if found else 0

    return {"passed": number("passed"), "failed": number("failed"), "cases": int(cases[1]) if cases else 0,
            "skipped": skipped}


def describe(test):
    if not test:
        return "no count: it did not come to its end"
    return (f"{test['passed']:,} assertions passed, {test['failed']} failed, in {test['cases']} cases"
            + ("; NO GPU, most of them skipped" if test["skipped"] else ""))


def describe_files(logs, steps):
    """One line over the tests' runs, of which there is one a file; those that failed are named."""
    total, passed, failed = {"passed": 0, "failed": 0, "cases": 0, "skipped": False}, 0, []
    for step in steps:
        for key, value in (read_tests(read_text(f"{logs}/{step['name']}.log")) or {}).items():
            total[key] += value
        if step["result"] == "passed":
            passed += 1
        else:
            failed.append(f"; {step['name'].split('.')[1]}: {step['result']}")
    return f"{passed} of {len(steps)} test files pass; {describe(total)}" + "".join(failed)


def describe_sanitizer(logs, tool, steps):
    """The same over a sanitizer's runs; what was found is named by file."""
    total, clean, findings = {"passed": 0, "failed": 0, "cases": 0, "skipped": False}, 0, []
    for step in steps:
        log = read_text(f"{logs}/{step['name']}.log")
        found = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", log)
        summary = found[-1] if found else "no summary"
        if re.search(r"SUMMARY: 0 (errors|hazards)", summary):
            clean += 1
        if step["result"] != "passed" or "SUMMARY: 0" not in summary:
            findings.append(f"{step['name'].split('.')[1]}: {step['result']}, {summary}")
        for key, value in (read_tests(log) or {}).items():
            total[key] += value
    return f"clean over {clean} of {len(steps)} test files; {describe(total)}" + "".join("; " + f for f in findings)


def read_steps(logs):
    steps = []
    for line in read_text(f"{logs}/steps.tsv").splitlines():
        name, status, seconds = line.split("\t")
        meaning = {"0": "passed", "124": "failed: time limit", "137": "failed: killed at the time limit",
                   "silent": "failed: it printed nothing for minutes",
                   "none": "not run"}.get(status, f"failed: exit status {status}")
        steps.append({"name": name, "result": meaning, "seconds": int(seconds)})
    return steps


def markdown(record):
    machine, figures = record["machine"], record["figures"]
    lines = [f"# CUDA backend on {machine.get('gpu', 'an unknown GPU')}, {machine.get('date', 'no date')}", "",
             "Written by `benchmarks/gpu.sh`. Absolute times hold for this machine only.", "", "| | |", "| --- | --- |"]
    lines += [f"| {key.replace('_', ' ')} | {value} |" for key, value in machine.items()]
    lines += ["", "## Steps", "", "Tests by file and the sanitizers' runs are under Tests.", "", "| step | result | seconds |",
              "| --- | --- | --- |"]
    lines += [f"| {s['name']} | {s['result']} | {s['seconds']} |" for s in record["steps"] if "." not in s["name"]]
    lines += ["", "## Tests", "", "| run | result |", "| --- | --- |"]
    for name, test in record["tests"].items():
        lines.append(f"| {name} | {test} |")
    lines += ["", "## Bars", ""]
    verdicts = [b["verdict"] for b in record["bars"]]
    lines += [f"{verdicts.count('pass')} passed, {verdicts.count('missed')} missed, "
              f"{verdicts.count('not measured')} not measured; {verdicts.count('for comparison')} for comparison.", "",
              "| bar | what | measured | limit | |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {b['bar']} | {b['what']} | {b['measured']} | {b['limit']} | {b['verdict']} |" for b in record["bars"]]
    lines += ["", "## Times", "",
              "Medians of 11, least and most in brackets; rates by the bytes that must be moved.", "",
              "| what | us | GB/s | of the read ceiling | peers, us |", "| --- | --- | --- | --- | --- |"]
    ceiling = read_ceiling(figures)
    for name, f in figures.items():
        rate = f.get("GB/s")
        peers = ", ".join(f"{peer} {p['us']:.4g}" if "us" in p else f"{peer} failed: {p.get('error', '')}"
                          for peer, p in f.get("peers", {}).items())
        if "us" in f:
            time = f"{f['us']:.4g} ({f.get('min', f['us']):.4g} to {f.get('max', f['us']):.4g})"
        else:
            time = "failed: " + f["error"] if "error" in f else "not measured"
        if "TFLOP/s" in f:
            time += f", {f['TFLOP/s']:.0f} TFLOP/s"
        lines.append(f"| {name} | {time} | {f'{rate:.0f}' if rate else ''} | "
                     f"{f'{100 * rate / ceiling:.0f} %' if rate and ceiling else ''} | {peers} |")
    return "\n".join(lines + record["notes"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", required=True)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()

    machine = read_json(f"{given.logs}/machine.json") or {}
    peers = read_json(f"{given.logs}/peers.json")
    if peers:
        machine["peers"] = (f"PyTorch {peers['torch']}, cuDNN {peers['cudnn']}, "
                            f"FlashInfer {peers['flashinfer'] or 'not there'}")
    steps, tests = read_steps(given.logs), {}
    runs_of = lambda name: [step for step in steps if step["name"].startswith(name + ".")]
    if runs_of("tests"):
        tests["tests"] = describe_files(given.logs, runs_of("tests"))
    log = read_text(f"{given.logs}/engine_tests.log")
    if log:
        tests["engine tests"] = describe(read_tests(log))
    for tool in SANITIZERS:
        mine = runs_of(tool)
        if mine:
            tests[tool] = describe_sanitizer(given.logs, tool, mine)
    tool = read_json(f"{given.logs}/tool.json")
    if tool:
        tests["`tessera eval` against the CPU"] = ("" if tool["passed"] else "FAILED: ") + tool["verdict"]
    figures = read_figures(given.logs)
    notes = []
    for part, title in (("decode_step", "Decode step of a whole model"),
                        ("decode_step_rocketkv", "The same with RocketKV, t = 1,024"),
                        ("decode_step_batch", "The same of four conversations at once"),
                        ("decode_step_packed", "Packed rows and a tenth of the tokens, four conversations"),
                        ("decode_step_prompts", "Whole prompts, not compressed and by TANGRAM's rule"),
                        ("decode_step_long_prompt", "A long prompt by TANGRAM's rule"),
                        ("turns", "Turns of a model whose attention lies along lines"),
                        ("serving_short", "Serving prompts of 2,000 to 8,000 tokens, all there at once"),
                        ("serving_shared", "Serving three turns over one of four documents")):
        text = read_text(f"{given.logs}/{part}.log").strip()
        if text:
            notes += ["", f"## {title}", "", "```", text, "```"]
    model = {name: read_json(f"{given.logs}/{name}.json") or {}
             for name in ("decode_step", "decode_step_rocketkv", "decode_step_batch", "decode_step_packed", "decode_step_prompts",
                          "decode_step_long_prompt", "turns")}
    of_bars = {key: value for name, part in model.items() if name != "decode_step" for key, value in model_steps(part).items()}
    model.update({name: read_json(f"{given.logs}/{name}.json") or {} for name in ("serving_short", "serving_shared")})
    record = {"machine": machine, "steps": steps, "tests": tests,
              "bars": judge(figures, of_bars) if figures or of_bars else [], "figures": figures, **model, "notes": notes}

    gpu = re.sub("[^a-z0-9]+", "-", machine.get("gpu", "gpu").lower().replace("nvidia ", "")).strip("-")
    name = f"{given.out}/{machine.get('date', 'undated')}-{gpu}"
    os.makedirs(given.out, exist_ok=True)
    with open(name + ".md", "w") as file:
        file.write(markdown(record))
    with open(name + ".json", "w") as file:  # one figure a line, so that records can be compared by eye
        parts = []
        for key, value in record.items():
            if isinstance(value, dict):
                inside = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
                parts.append(f'{json.dumps(key)}: {{\n{inside}\n}}')
            else:
                inside = ",\n".join("  " + json.dumps(v) for v in value)
                parts.append(f'{json.dumps(key)}: [\n{inside}\n]')
        file.write("{\n" + ",\n".join(parts) + "\n}\n")
    passed = sum(b["verdict"] == "pass" for b in record["bars"])
    bars = sum(b["verdict"] != "for comparison" for b in record["bars"])
    print(f"{name}.md: {passed} of {bars} bars passed")


if __name__ == "__main__":
    main()
