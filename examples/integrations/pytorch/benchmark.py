"""Decoding with a long context on one GPU: transformers' own cache, kvpress and Tessera's caches, side by side.

A model of Llama-3.1-8B's shapes with random weights in bf16, made on the GPU; prompts of random tokens. Of each cell:
tokens a second of decoding, the prompt's time, PyTorch's memory, and what the cache holds. `python benchmark.py --help`.
"""
import argparse
import contextlib
import gc
import json
import os
import pathlib
import time

import torch
import transformers
from tessera_torch import CapturedStep, TesseraCache, build
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128,
             num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
             rope_theta=500000.0, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                    high_freq_factor=4.0, original_max_position_embeddings=8192))
OURS = {"full": None, "snapkv": "share", "ada_snapkv": "share", "rocketkv": 1024, "mosaickv": "share"}  # None: no budget
PEERS = ("transformers", "kvpress_snapkv", "kvpress_ada_snapkv")
AT_ONCE = 131072  # tokens of all sequences that a peer, which takes a prompt in one call, is given at a time


def words():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmark.json", help="where the figures go (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further cell begins")
    parser.add_argument("--cells", default="32768x1,131072x1,32768x4,131072x4", help="TOKENSxBATCH,... in this order")
    parser.add_argument("--methods", default=",".join([*PEERS[:1], *OURS, *PEERS[1:]]), help="in this order")
    parser.add_argument("--share", type=float, default=0.1, help="of the prompt, for methods with that budget")
    parser.add_argument("--steps", type=int, default=50, help="that are timed, after 5 others")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prompt that ours take in a call")
    parser.add_argument("--whole-pool", action="store_true", help="ours keep the memory that the prompt needed")
    parser.add_argument("--layers", type=int, default=32, help="fewer for a quick look")
    return parser.parse_args()


def model_of(layers):
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": layers})
    torch.manual_seed(1)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16,
                                                             attn_implementation="sdpa").eval()


class Clock:
    """Milliseconds of the GPU's stream, and of the wall."""

    def __enter__(self):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        self.began = time.perf_counter()
        self.events[0].record()
        return self

    def __exit__(self, *_):
        self.events[1].record()
        torch.cuda.synchronize()
        self.wall_ms = 1e3 * (time.perf_counter() - self.began)
        self.ms = self.events[0].elapsed_time(self.events[1])


def decode(step, first, position, steps):
    """Milliseconds of a step: greedy tokens, chosen on the GPU."""
    token = first
    for i in range(5):
        token = step(token, position + i)[:, -1:].argmax(-1)
    with Clock() as clock:
        for i in range(5, 5 + steps):
            token = step(token, position + i)[:, -1:].argmax(-1)
    return clock.ms / steps


@contextlib.contextmanager
def kvpress_attention(model):
    """kvpress wraps every attention function of transformers when it is imported: only while it is measured."""
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        import kvpress.attention_patch
        if dict(ALL_ATTENTION_FUNCTIONS.items()) == before:
            kvpress.attention_patch.patch_attention_functions()
        yield
    finally:
        for name, function in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = function
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None


def run_peer(model, name, prompt, words):
    """transformers' DynamicCache, compressed by a press of kvpress or not. The prompt comes in one call, which is the only
    way that kvpress takes it and the fastest for SDPA; of a batch that is too large for it, one sequence that is copied."""
    model.set_attn_implementation("sdpa")
    batch, length = prompt.shape
    copied = prompt.numel() > AT_ONCE and batch > 1
    if copied and name == "kvpress_ada_snapkv":
        raise NotImplementedError("kvpress notes what AdaKV drops by sequence, so that a prompt cannot be copied")
    press, patched = contextlib.nullcontext(), contextlib.nullcontext()
    if name != "transformers":
        patched = kvpress_attention(model)
    with patched:
        if name != "transformers":
            import kvpress
            press = kvpress.SnapKVPress(compression_ratio=1 - words.share)
            press = (kvpress.AdaKVPress(press) if name == "kvpress_ada_snapkv" else press)(model)
        cache = transformers.DynamicCache()
        with Clock() as clock, press:
            last = model(prompt[:1] if copied else prompt, past_key_values=cache, logits_to_keep=1).logits
        if copied:
            cache.batch_repeat_interleave(batch)
            last = last.expand(batch, -1, -1)
        result = {"prompt_ms": clock.ms, "prompt_is": f"{1 if copied else batch} sequences in one call",
                  "peak_bytes_of_prompt": torch.cuda.max_memory_allocated()}
        torch.cuda.reset_peak_memory_stats()
        positions = torch.arange(length, length + 5 + words.steps, device="cuda").reshape(-1, 1, 1).expand(-1, batch, 1)

        def step(token, position):
            return model(token, position_ids=positions[position - length], past_key_values=cache).logits

        result["step_ms"] = decode(step, last.argmax(-1), length, words.steps)
        result["cache_bytes"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        result["peak_bytes_of_steps"] = torch.cuda.max_memory_allocated()
        result["memory_held"] = torch.cuda.memory_allocated()
        return result


def run_ours(model, method, prompt, words):
    model.set_attn_implementation("tessera")
    batch, length = prompt.shape
    budget = int(round(words.share * length, 6)) if OURS[method] == "share" else OURS[method]
    cache = TesseraCache(model.config, method, budget, max_length=length + 2 * (words.steps + 5) + 8)
    with Clock() as clock:
        with cache.prompt(length):
            for chunk in prompt.split(words.chunk, 1):
                last = model(chunk, past_key_values=cache, logits_to_keep=1).logits
        cache.end_prompt()
        if method != "full" and not words.whole_pool:
            cache.fit_memory(2 * (words.steps + 5) + 8)
    result = {"prompt_ms": clock.ms, "prompt_is": f"{batch} sequences in chunks of {words.chunk}",
              "peak_bytes_of_prompt": torch.cuda.max_memory_allocated(), "budget": budget}
    torch.cuda.reset_peak_memory_stats()
    result["step_ms"] = decode(lambda token, _: model(token, past_key_values=cache).logits, last.argmax(-1), 0, words.steps)
    result.update(cache_bytes=cache.bytes(), bytes_read=cache.bytes_read(), full_bytes=cache.full_bytes(),
                  peak_bytes_of_steps=torch.cuda.max_memory_allocated(), memory_held=torch.cuda.memory_allocated())
    try:
        one = CapturedStep(model, cache)
        result["captured_step_ms"] = decode(lambda token, _: one.step(token), last.argmax(-1), 0, words.steps)
        result["overhead_of_python_ms"] = result["step_ms"] - result["captured_step_ms"]
    except Exception as problem:  # a figure less; the cell's others stand
        result["captured_step"] = f"{type(problem).__name__}: {problem}"[:400]
    return result


def run_cell(model, method, length, batch, words):
    torch.manual_seed(length)
    prompt = torch.randint(3, model.config.vocab_size, (1, length), device="cuda").expand(batch, -1).contiguous()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = {"method": method, "tokens": length, "batch": batch}
    try:
        with torch.no_grad():
            result.update((run_ours if method in OURS else run_peer)(model, method, prompt, words))
        result["memory_held"] -= before
        result["tokens_a_second"] = 1e3 * batch / result["step_ms"]
    except torch.OutOfMemoryError as problem:
        result["failed"] = "out of memory: " + str(problem).splitlines()[0][:200]
    except Exception as problem:  # the other cells go on
        result["failed"] = f"{type(problem).__name__}: {problem}"[:400]
    return result


COLUMNS = [("tokens/s", "tokens_a_second", 1, ".1f"), ("step ms", "step_ms", 1, ".2f"),
           ("captured ms", "captured_step_ms", 1, ".2f"), ("prompt s", "prompt_ms", 1e-3, ".2f"),
           ("cache GB", "cache_bytes", 1e-9, ".3f"), ("held GB", "memory_held", 1e-9, ".2f"),
           ("peak prompt GB", "peak_bytes_of_prompt", 1e-9, ".1f"), ("peak steps GB", "peak_bytes_of_steps", 1e-9, ".1f")]


def line(result):
    if "failed" in result:
        return result["failed"]
    figures = [f"{name} {result[key] * scale:{form}}" for name, key, scale, form in COLUMNS if key in result]
    if "captured_step" in result:
        figures.append(f"captured step: {result['captured_step']}")
    return ", ".join(figures)


def table(results):
    rows = [["tokens", "batch", "cache", *(name for name, *_ in COLUMNS)]]
    for one in results:
        rows.append([str(one["tokens"]), str(one["batch"]), one["method"]] +
                    [f"{one[key] * scale:{form}}" if key in one else "-" for _, key, scale, form in COLUMNS])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main():
    given, began = words(), time.monotonic()
    device = torch.cuda.get_device_properties(0)
    about = {"device": device.name, "memory": device.total_memory, "torch": torch.__version__,
             "transformers": transformers.__version__, "words": vars(given)}
    print(about, flush=True)
    names = given.methods.split(",")
    build.operators()
    build.build_all([(name, torch.bfloat16, 128, "cuda") for name in names if name in OURS])
    model, results, skipped = model_of(given.layers), [], []
    about["weights_bytes"] = torch.cuda.memory_allocated()
    for cell in given.cells.split(","):
        length, batch = map(int, cell.split("x"))
        for name in names:
            if time.monotonic() - began > given.limit:
                skipped.append(f"{cell} {name}")
                continue
            start = time.monotonic()
            results.append(run_cell(model, name, length, batch, given))
            print(f"{cell} {name}: {line(results[-1])} ({time.monotonic() - start:.0f} s)", flush=True)
            text = json.dumps({**about, "cells": results, "skipped": skipped}, indent=1)
            pathlib.Path(given.out + ".part").write_text(text)
            os.replace(given.out + ".part", given.out)
    print(table(results))
    if skipped:
        print("Skipped, for want of time:", "; ".join(skipped))
        pathlib.Path(given.out).write_text(json.dumps({**about, "cells": results, "skipped": skipped}, indent=1))


if __name__ == "__main__":
    main()
