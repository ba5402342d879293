#!/usr/bin/env python3
"""What serving costs on a GPU, from a record of benchmarks/gpu.sh; what the record lacks stays as it is in --base, with its source.

    benchmarks/serving/costs.py benchmarks/results/DATE-GPU.json --out benchmarks/serving/costs_GPU.json [--base FILE]
"""
import argparse
import json
import pathlib
import statistics


def entries(record, part):
    """{"full/1024": ms} of what bench_decode_step wrote."""
    return {entry["name"]: entry["real_time"] for entry in record.get(part, {}).get("benchmarks", ())
            if not entry.get("extrapolated")}


def costs_of(record, base, name):
    made = json.loads(json.dumps(base))
    model, sources = made["model"], made["sources"]
    time = lambda figure: record["figures"].get(figure, {}).get("us")

    def settle(key, value, where):
        if value:
            made[key], sources[key] = value, f"{name}, {where}"

    layers, row = model["layers"], made["token_bytes_of_head"] * model["kv_heads"]
    dense = time("decode/B4/128K")
    settle("attention_gbs", dense and round(4 * 131072 * row / dense / 1e3, 1), "decode/B4/128K")
    # A step without its attention, by batch.
    step, attention = {}, {}
    for part in ("decode_step", "decode_step_batch", "decode_step_batches"):
        for entry, ms in entries(record, part).items():
            method, context, *batch = entry.split("/")
            batch = batch[0] if batch else "B1"
            attended = time(f"decode/{batch}/{int(context) // 1024}K")
            if method == "full" and attended:
                step.setdefault(batch[1:], []).append(ms - layers * attended / 1e3)
    step = {batch: round(statistics.median(found), 3) for batch, found in step.items()}
    settle("step_ms", step if len(step) > 1 else None, "full/CONTEXT/BATCH less the layers' decode/BATCH/CONTEXT")
    # 2 products of 2 operations, half of the pairs, where tokens attend what came before them.
    prefill = [tokens * tokens * 2 * model["q_heads"] * model["head_dim"] / time(f"prefill/{label}") / 1e6
               for label, tokens in (("16K", 16384), ("64K", 65536)) if time(f"prefill/{label}")]
    settle("prefill_attention_tflops", prefill and round(statistics.mean(prefill)), "prefill/16K and prefill/64K")
    prompts = entries(record, "decode_step_prompts")
    whole = prompts.get("prompt/full/2048")
    if whole:
        attention_ms = layers * 2048 * 2048 * 2 * model["q_heads"] * model["head_dim"] / (
            made["prefill_attention_tflops"] * 1e9)
        settle("product_tflops", round(2 * model["parameters"] * 2048 / (whole - attention_ms) / 1e9), "prompt/full/2048")
    ratio = lambda a, b: time(a) and time(b) and round(time(a) / time(b), 4)
    # What judging adds to a whole prompt: the layers' chunks have no products.
    judged, given, prompt = time("chunks/32K/tangram"), time("chunks/32K/given"), prompts.get("prompt/full/32768")
    settle("chunk_static", judged and given and prompt and round(1 + layers * (judged - given) / 1e3 / prompt, 4),
           "the layers' chunks/32K/tangram less chunks/32K/given, beside prompt/full/32768")
    settle("split_even", ratio("ragged/calibrated/B16", "ragged/calibrated/B16_evened"),
           "ragged/calibrated/B16 over ragged/calibrated/B16_evened")
    settle("split_fixed", ratio("ragged/log_normal/B16/fixed_split", "ragged/log_normal/B16_evened"),
           "ragged/log_normal/B16/fixed_split over ragged/log_normal/B16_evened")
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--base", type=pathlib.Path, default=pathlib.Path(__file__).parent / "costs_h200.json")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    given = parser.parse_args()
    made = costs_of(json.loads(given.record.read_text()), json.loads(given.base.read_text()), f"results/{given.record.name}")
    given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
