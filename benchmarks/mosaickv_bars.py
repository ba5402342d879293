"""Bars of MosaicKV on the device, for cuda_record.py."""

# One layer's step at a share of the tokens, elements and group: how many times faster than the best dense peer.
STEPS = (("B4/256K", "6.25/bf16", 13), ("B4/256K", "6.25/bf16_group4", 14), ("B4/256K", "6.25/fp8", 16), ("B4/256K", "12.5/bf16", 9),
         ("B8/128K", "6.25/bf16", 13), ("B1/256K", "6.25/bf16", 7))


def judge(figures, add, ratio, time_of, best_peer, ceiling):
    """Steps, by stages; a prompt's packing, of one layer times 32; a full tail. The functions are cuda_record.py's."""
    for shape, kind, least in STEPS:
        name = f"mosaickv/{shape}/{kind}"
        ours, peer = time_of(figures, name + "/step"), best_peer(figures, "decode/" + shape)
        beside = f" ({ours:.4g} us, {peer[1]} {peer[0]:.4g} us)" if ours and peer else ""
        add("MosaicKV 3", f"step, {shape}, {kind.replace('/', ' % of tokens, ')}{beside}", ratio(peer[0], ours) if peer else None,
            least, f"at least {least} times faster than the best dense peer; the paper, H800: up to 16", "x", below=False)
        for stage in ("rotate", "choose", "attend"):
            add("MosaicKV 3", f"{stage}, {shape}, {kind.replace('/', ' % of tokens, ')}", time_of(figures, f"{name}/{stage}"), None,
                "a stage of it; choose begins with rotate", "us")
        share = ratio(figures.get(name + "/step", {}).get("GB/s"), ceiling)
        add("MosaicKV 3", f"step, {shape}, {kind.replace('/', ' % of tokens, ')}, share of the read ceiling",
            None if share is None else 100 * share, None, "bytes that it must read over its time", "%")
    stages = [time_of(figures, "mosaickv/encode/64K/" + stage) for stage in ("moments", "bases", "rows")]
    for stage, time in zip(("moments", "bases", "rows"), stages):
        add("MosaicKV 4", f"64K tokens of a layer, {stage}", time, None, "a stage of it", "us")
    together = time_of(figures, "mosaickv/encode/64K/bases_of_32_layers")
    add("MosaicKV 4", "64K tokens, bases of 32 layers at once", together, None, "512 matrices in one launch", "us")
    add("MosaicKV 4", "64K tokens, 32 layers, their bases at once",
        None if None in (stages[0], together, stages[2]) else (32 * (stages[0] + stages[2]) + together) / 1000, 50,
        "at most 50 ms; the paper: 1.0 s", "ms")
    add("MosaicKV 4", "64K tokens, 32 layers one after another", None if None in stages else 32 * sum(stages) / 1000, 50,
        "at most 50 ms; the paper: 1.0 s", "ms")
    add("MosaicKV 4", "a full tail of a layer", time_of(figures, "mosaickv/encode/tail"), 15, "at most 15 us; the paper: 40.6", "us")


def judge_model(steps, add, ratio):
    """Time between tokens of a whole model at a tenth of the tokens, four conversations."""
    for context in (131072, 1048576):
        full, quest, ours = (steps.get(f"{name}/{context}/B4", {}).get("real_time") for name in ("full", "quest_10%", "mosaickv_10%"))
        for name, peer, paper in (("full", full, "4.8"), ("quest", quest, "1.8")):
            bar = 8 if context == 1048576 and name == "full" else None
            beside = f" ({ours:.4g} ms against {peer:.4g})" if ours and peer else ""
            add("MosaicKV 5", f"whole model, batch 4, {context // 1024}K, faster than `{name}`{beside}", ratio(peer, ours),
                bar, f"{'at least 8; ' if bar else ''}the paper, H800, 1M: {paper}", "x", below=False)
