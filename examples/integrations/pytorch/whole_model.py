"""Two promises that a whole model shows: drafts change no answer, and a long prompt's peak of memory.

    whole_model.py drafts [--gguf FILE --text FILE]   greedy answers with drafts of 4 tokens and without, of every method named
    whole_model.py peak [--tokens 65536]              peak memory of a prompt in one call, against the same call without a cache

Without --gguf the model has Llama-3.1-8B's shapes and random weights, and prompts repeat a random passage. `drafts` ends with 1 if
an answer differs where the two best logits are further apart than rounding of bf16; `peak` if the prompt takes more than 1.05 of weights,
the model's own activations, one layer's rows and what stays.
"""
import argparse
import gc
import pathlib
import sys
import time

import torch
import transformers
from benchmark import model_of
from tessera_torch import TesseraCache, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = "full,snapkv,rocketkv,quest,h2o"
BUDGET, DRAFT = 256, 4
NEAR = 2.0**-6  # of the largest logit: two units in the last place of bf16


class Calls:
    """Counts a model's calls, and those of several tokens: drafts that are checked."""

    def __init__(self, model):
        self.steps = self.checked = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and ids.shape[1] <= DRAFT + 1:
            self.steps += 1
            self.checked += ids.shape[1] > 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()


def loaded(given):
    """(model, prompts)"""
    torch.manual_seed(7)
    if not given.gguf:
        model = model_of(given.layers)
        passage = torch.randint(3, model.config.vocab_size, (given.prompts, 1, 96), device="cuda")
        prompts = [one.repeat(1, 20)[:, :1900 + 7 * index] for index, one in enumerate(passage)]
        return model, prompts
    path = pathlib.Path(given.gguf)
    arguments = dict(gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **arguments).to(DEVICE).eval()
    text = pathlib.Path(given.text).read_text(encoding="utf-8")
    prompts = []
    for index in range(given.prompts):
        part = text[20000 * index + 5000:][:6000]
        asked = [{"role": "user", "content": part + "\n\nRepeat the first paragraphs of this text."}]
        said = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(said + part[:120], return_tensors="pt", add_special_tokens=False).input_ids.to(DEVICE))
    return model, prompts


def answer(model, method, prompt, given, **options):
    cache = TesseraCache(model.config, method, *([] if method == "full" else [BUDGET]), max_length=prompt.shape[1] + given.new + 16,
                         draft_tokens=DRAFT)
    began = time.monotonic()
    with Calls(model) as calls:
        out = model.generate(prompt, past_key_values=cache, do_sample=False, max_new_tokens=given.new, pad_token_id=0,
                             return_dict_in_generate=True, output_logits=True, **options)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return out, calls, time.monotonic() - began


def drafts(given):
    model, prompts = loaded(given)
    model.set_attn_implementation("tessera")
    wrong = 0
    print("| method | prompts | tokens | steps without | steps with drafts | drafts checked | seconds without | with | answers that differ at a near tie | wrongly |")
    print("|" + " --- |" * 10)
    for method in given.methods.split(","):
        counts, near, bad = [0] * 6, 0, 0
        answer(model, method, prompts[0], argparse.Namespace(new=8), prompt_lookup_num_tokens=DRAFT)  # warm
        for prompt in prompts:
            plain, plain_calls, plain_time = answer(model, method, prompt, given)
            drafted, draft_calls, draft_time = answer(model, method, prompt, given, prompt_lookup_num_tokens=DRAFT)
            a, b = (out.sequences[0, prompt.shape[1]:] for out in (plain, drafted))
            count = min(len(a), len(b))
            differ = (a[:count] != b[:count]).nonzero()
            if len(differ):
                first = int(differ[0])
                logits = plain.logits[first][0].float()
                gap = float(logits[a[first]] - logits[b[first]])
                is_near = gap <= NEAR * float(logits.abs().max())
                near, bad = near + is_near, bad + (not is_near)
                print(f"{method}: token {first} differs, logits {gap:.4f} apart of {float(logits.abs().max()):.2f}", file=sys.stderr)
            elif len(a) != len(b):
                bad += 1
                print(f"{method}: {len(a)} tokens without drafts, {len(b)} with", file=sys.stderr)
            for place, value in enumerate((count, plain_calls.steps, draft_calls.steps, draft_calls.checked, plain_time, draft_time)):
                counts[place] += value
        wrong += bad
        print(f"| `{method}` | {len(prompts)} | {counts[0]} | {counts[1]} | {counts[2]} | {counts[3]} | {counts[4]:.2f} | {counts[5]:.2f} | {near} | {bad} |",
              flush=True)
    return 1 if wrong else 0


def peak(given):
    model = model_of(given.layers)
    weights = torch.cuda.memory_allocated()
    prompt = torch.randint(3, model.config.vocab_size, (1, given.tokens), device="cuda")

    def peak_of(call):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - weights

    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        activations = peak_of(lambda: model(prompt, use_cache=False, logits_to_keep=1))
        model.set_attn_implementation("tessera")
        cache = TesseraCache(model.config, "snapkv", 1024, max_length=given.tokens + 64)

        def take():
            with cache.prompt(given.tokens):
                model(prompt, past_key_values=cache, logits_to_keep=1)
            cache.end_prompt()

        ours = peak_of(take)
    config = model.config
    layer = 2 * 2 * given.tokens * config.num_key_value_heads * config.head_dim
    kept = 2 * 2 * 1024 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    allowed = weights + activations + layer + kept
    share = (weights + ours) / allowed
    mib = 1 << 20
    print(f"{given.tokens} tokens in one call, snapkv at 1,024, {given.layers} layers: weights {weights // mib} MiB, activations without a "
          f"cache {activations // mib}, one layer's rows {layer // mib}, what stays {kept // mib}; the prompt took {(weights + ours) // mib}: "
          f"{share:.3f} of their sum, {(weights + ours - allowed) / mib:.0f} MiB more")
    return 0 if share <= 1.05 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("drafts", "peak"))
    parser.add_argument("--gguf", help="a model's file, as transformers reads it")
    parser.add_argument("--text", help="what its prompts quote", default="examples/data/opticks.txt")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    if DEVICE == "cpu" and not (given.what == "drafts" and given.gguf):
        sys.exit("no CUDA device; expected one; without it, drafts --gguf FILE alone runs, slowly")
    methods = given.methods.split(",") if given.what == "drafts" else ["snapkv"]
    build.operators()
    build.build_all([(method, torch.bfloat16, 64 if given.gguf else 128, DEVICE) for method in methods])
    return drafts(given) if given.what == "drafts" else peak(given)


if __name__ == "__main__":
    sys.exit(main())
