"""Bars of the GPU record that belong to one system each: SABlock's, and LoopServe's."""

LINES = ((10, "32K", 3), (10, "64K", 4), (10, "128K", 5), (5, "128K", 8))  # per cent of the causal pairs
CONTENTS = (("knorm", 1), ("keydiff", 2), ("criticalkv", 1), ("lagkv", 2))  # reads of K, or V, that the scorer must do


def time_of(figures, name):
    return figures.get(name, {}).get("us")


def best_peer(figures, name):
    """(microseconds, peer), or None."""
    peers = figures.get(name, {}).get("peers", {})
    return min(((p["us"], peer) for peer, p in peers.items() if "us" in p), default=None)


def judge_choosing(figures, add, ratio):
    """Bars of SABlock's choice and of scorers that read what is stored; one read is of K, 128K tokens of 8 kv_heads."""
    ours, simple = (time_of(figures, "choose/128K/" + method) for method in ("sablock", "snapkv"))
    beside = f" ({ours:.4g} us, {simple:.4g} us)" if ours and simple else ""
    add("SABlock 3", f"choosing 1,024 of 128K tokens, a layer, `sablock` against `snapkv`{beside}", ratio(ours, simple), 1.25,
        "at most 1.25", "x")
    one_read = time_of(figures, "read/256MiB")
    for method, reads in CONTENTS:
        value = ratio(time_of(figures, "contents/128K/" + method), one_read)
        add("SABlock 5", f"scoring 128K tokens by contents, `{method}`", value and value / reads, 1.3,
            f"at most 1.3 of {reads} read{'s' if reads > 1 else ''}", "x")
    add("SABlock 5", "scoring and choosing 128K tokens, `expected_attention` with covariance",
        ratio(time_of(figures, "choose/128K/expected_attention"), one_read), 8, "at most 8 reads of K", "reads")


def judge_following(figures, add, ratio):
    """Bars of LoopServe's steps: against the faster of our dense attention and the best peer's; a choice every 16 steps."""
    for batch, least in (("B1", 5.5), ("B8", 9)):
        step, choosing = (time_of(figures, f"loopserve/{batch}/128K/{kind}") for kind in ("step", "choosing"))
        peer = best_peer(figures, f"decode/{batch}/128K")
        dense = min((t for t in (time_of(figures, f"decode/{batch}/128K"), peer and peer[0]) if t), default=None)
        amortised = (15 * step + choosing) / 16 if step and choosing else None
        beside = f" ({amortised:.4g} us, dense {dense:.4g} us)" if amortised and dense else ""
        add("LoopServe 5", f"a step and its share of choosing, B = 1,024, {batch} 128K{beside}", ratio(dense, amortised), least,
            f"at least {least} times faster than dense", "x", below=False)
        beside = f" ({choosing:.4g} us)" if choosing else ""
        add("LoopServe 5", f"the step that chooses, {batch} 128K{beside}", ratio(choosing, dense), 3, "at most 3 dense steps", "x")


def judge_lines(figures, add, ratio):
    """Bars of prompts along lines: the best peer's dense prefill over ours, the choice of lines included."""
    for density, size, least in LINES:
        name = f"lines/{density}/{size}"
        ours, peer = time_of(figures, name), best_peer(figures, "prefill/" + size)
        beside = f" ({ours / 1000:.4g} ms, {peer[1]} {peer[0] / 1000:.4g} ms)" if ours and peer else ""
        add("LoopServe 2", f"prompt of {size}, {density} % on lines{beside}", ratio(peer[0], ours) if peer else None, least,
            f"at least {least} times faster than the best peer's dense prefill", "x", below=False)
    for size, most in (("32K", 25), ("128K", 10)):
        share = ratio(time_of(figures, "lines/choice/" + size), time_of(figures, "lines/10/" + size))
        add("LoopServe 2", f"prompt of {size}, the choice alone", None if share is None else 100 * share, most,
            f"at most {most} % of the time along lines of 10 %", "%")
    for size in ("32K", "64K", "128K"):
        add("LoopServe 2", f"prompt of {size}, 100 % on lines",
            ratio(time_of(figures, "lines/100/" + size), time_of(figures, "prefill/" + size)), 1.3, "at most 1.3 of our dense prefill", "x")
        add("LoopServe 2", f"prompt of {size}, heads of 1 to 60 %",
            ratio(time_of(figures, "lines/uneven/" + size), time_of(figures, "lines/evened/" + size)), 1.15,
            "at most 1.15 of the same work evened", "x")
    for size in ("16K", "64K"):
        peer = best_peer(figures, "prefill/" + size)
        add("LoopServe 2", f"dense prompt of {size}", ratio(time_of(figures, "prefill/" + size), peer[0]) if peer else None, 1.2,
            "at most 1.2 of the best peer", "x")
