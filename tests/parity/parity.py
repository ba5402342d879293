#!/usr/bin/env python3
"""Keep sets of kvpress 0.5.5 and of this library over the same keys, values and queries of the example model.

    parity.py TOOL [--tokens 1500] [--budgets 160,400] [--methods "NAME;NAME;..."]

Each press of kvpress runs inside transformers (fp32, CPU). What a layer's attention saw is dumped once and given to
`tessera compress`, with parameters that mean the same. `duo_attention` and `kvzip` choose over the whole model, and `compress`
sees one layer: they run as caches of examples/integrations/pytorch in the same model, over the same tokens.

Prints, for each method, of how many (layer, kv_head) lists the indices are identical, and how far apart the others are: tokens
that only one side keeps, and the largest distance of their scores from the cut, relative to it (rounding: below 1e-4). Exits
with 1 where a method that should be identical is not.
"""
import argparse
import json
import logging
import pathlib
import struct
import subprocess
import sys
import tempfile

import kvpress
import numpy
import sentencepiece
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples" / "integrations" / "pytorch"))
from tessera_torch import TesseraCache, model_facts  # noqa: E402  registers the attention "tessera"

MODEL = ROOT / "examples" / "model"
TOKENIZER = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))
WINDOW, SINKS, THETA = 64, 4, 1e6
LAYERS, KV_HEADS = 6, 4
GATES = numpy.random.default_rng(1).random((LAYERS, KV_HEADS))  # any numbers: both sides get the same


class Undivided(kvpress.ObservedAttentionPress):
    """The sum over queries: kvpress divides it by how many queries saw the token."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        tokens = keys.shape[2]
        return super().score(module, hidden_states, keys, values, attentions, kwargs) * torch.arange(tokens, 0, -1)


class Gated(kvpress.DuoAttentionPress):
    """DuoAttention by GATES, where kvpress loads those of a few models."""

    def __init__(self, streaming, budget):
        super().__init__(head_compression_ratio=streaming)
        self.pattern = SINKS, budget - SINKS, GATES

    def load_attention_pattern(self, model):
        return self.pattern


class Rereading(kvpress.KVzipPress):
    """KVzip, which chooses once the text has been read again; what it kept is written down then."""

    def __init__(self, budget, tokens, chunk_size):
        # kvpress drops int(heads * tokens * ratio) tokens of the model; half a token more, so that rounding does not count.
        super().__init__(1 - (budget - 0.5 / (LAYERS * KV_HEADS)) / tokens, n_sink=SINKS, chunk_size=chunk_size)

    def prepare(self, model, tokenizer):
        return super().prepare(model, self)

    def encode(self, text, **_):
        """Of the words around a part, by the model's own tokenizer."""
        return torch.tensor([TOKENIZER.encode(text)])

    def compress_post(self, model):
        super().compress_post(model)
        self.scores = list(self.score_val[:, 0])
        self.kept = [unmasked(layer.self_attn, KV_HEADS, self.context_length) for layer in model.model.layers]


def methods(budget, tokens):
    """name -> (press, settings of ours, the reason where lists need not be identical)"""
    ratio = 1 - (budget + 0.5) / tokens
    snap = {"window": WINDOW, "pool": 5, "pool_kind": "average"}
    snapkv = lambda: kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=5)
    expected = lambda: kvpress.ExpectedAttentionPress(ratio)
    scale = WINDOW * 2  # ours adds up window and group, kvpress takes means
    return {
        "snapkv": (snapkv(), snap, ""),
        "ada_snapkv": (kvpress.AdaKVPress(snapkv(), alpha_safeguard=0), {**snap, "floor": 0}, ""),
        "streaming_llm": (kvpress.StreamingLLMPress(ratio, n_sink=SINKS), {}, ""),
        "h2o": (Undivided(ratio), {"recent": 0}, ""),
        "tova": (kvpress.TOVAPress(ratio), {}, ""),
        "knorm": (kvpress.KnormPress(ratio), {}, ""),
        "keydiff": (kvpress.KeyDiffPress(ratio), {}, ""),
        "lagkv": (kvpress.LagKVPress(ratio, n_sink=SINKS, lag_size=32), {"sinks": SINKS, "lag": 32},
                  "ties inside a partition, and the protected tail where it has no room"),
        "criticalkv": (kvpress.CriticalKVPress(snapkv()), {**snap, "epsilon": 1e-4 * scale}, ""),
        "expected_attention": (expected(), {"rope_theta": THETA}, ""),
        "expected_attention, means": (kvpress.ExpectedAttentionPress(ratio, use_covariance=False, epsilon=0.02),
                                      {"rope_theta": THETA, "covariance": 0, "epsilon": 0.02}, ""),
        "expected_attention, adaptive": (kvpress.AdaKVPress(expected(), alpha_safeguard=0),
                                         {"rope_theta": THETA, "floor": 0}, ""),
        "chunkkv": (kvpress.ChunkKVPress(kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=1), chunk_length=20),
                    {"window": WINDOW, "pool": 1, "block": 20},
                    "kvpress keeps whole chunks by their mean, the window's among them; ours meets the budget exactly"),
        "pyramidkv": (kvpress.PyramidKVPress(ratio, window_size=WINDOW, kernel_size=5), snap,
                      "kvpress counts the window into a layer's share; ours adds it, as the authors' code does"),
        "duo_attention": (Gated(0.5, budget), {"sinks": SINKS, "streaming": 0.5, "profile": GATES.tolist()}, ""),
        "kvzip": (Rereading(budget, tokens, 2048), {"sinks": SINKS}, ""),
        "kvzip, parts of 256": (Rereading(budget, tokens, 256), {"sinks": SINKS, "part": 256}, ""),
    }


def write_layer(path, tensors):
    """A safetensors file of fp32 tensors."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        data = tensor.detach().float().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def read_kept(path):
    """One set a head."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])

    def numbers(name, letter, size):
        begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
        return struct.unpack(f"<{(end - begin) // size}{letter}", content[begin:end])

    indptr, indices = numbers("keep.indptr", "q", 8), numbers("keep.indices", "i", 4)
    return [set(indices[begin:end]) for begin, end in zip(indptr, indptr[1:])]


def encode(text, count):
    """The text's first tokens, behind the token that begins a text."""
    pieces = TOKENIZER.encode(text)
    assert len(pieces) >= count - 1, "the text is too short"
    return torch.tensor([[1, *pieces[:count - 1]]])


def unmasked(module, heads, tokens):
    """What kvpress keeps of a layer by masking the others, one set a head; None where it does not mask."""
    masked = getattr(module, "masked_key_indices", None)
    if masked is None:
        return None
    module.masked_key_indices = None
    gone = set(zip(masked[1].tolist(), masked[2].tolist()))
    return [{t for t in range(tokens) if (h, t) not in gone} for h in range(heads)]


class Recorder:
    """Runs a press and writes down what each layer kept."""

    def __init__(self, press, dumps=None):
        self.press, self.kept, self.dumps, self.scores = press, [], dumps, []
        self.inner = press.compress
        press.compress = self.compress

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if self.dumps is not None:
            cosine, sine = kwargs["position_embeddings"]
            queries = module.q_proj(hidden_states).view(1, hidden_states.shape[1], -1, module.head_dim).transpose(1, 2)
            queries, _ = apply_rotary_pos_emb(queries, queries, cosine, sine)
            weight = module.o_proj.weight.transpose(0, 1).view(queries.shape[1], module.head_dim, -1)
            self.dumps.append({"k": keys[0], "v": values[0], "q": queries[0].transpose(0, 1), "output_projection": weight})
        scored = getattr(self.press, "press", self.press)
        self.scores.append(scored.score(module, hidden_states, keys, values, attentions, kwargs)[0]
                           if isinstance(scored, kvpress.ScorerPress) else None)
        module.masked_key_indices = None
        pruned, rest = self.inner(module, hidden_states, keys, values, attentions, kwargs)
        heads, tokens = keys.shape[1], keys.shape[2]
        self.kept.append(unmasked(module, heads, tokens) or [self.places(keys[0, h], pruned[0, h]) for h in range(heads)])
        return keys, values  # later layers see what an uncompressed model computes

    @staticmethod
    def places(keys, pruned):
        """Rows of `keys` that `pruned` has; keys of a text differ by their rotation."""
        known = {row.numpy().tobytes(): place for place, row in enumerate(keys)}
        return {known[row.numpy().tobytes()] for row in pruned}


def run_press(model, press, ids, dumps=None):
    recorder = press if isinstance(press, Rereading) else Recorder(press, dumps)
    with torch.no_grad(), press(model):
        model(ids, past_key_values=transformers.DynamicCache())
    return recorder


def distance(values):
    """How far the scores of tokens that one side alone keeps are from each other, relative to the largest."""
    return (max(values) - min(values)) / max(max(map(abs, values)), 1e-30) if values else 0.0


def run_compress(tool, folder, method, budget, settings):
    """What `tessera compress` keeps of each layer's file: by layer and kv_head one set."""
    kept = []
    for layer in range(LAYERS):
        own = settings | ({"layer": layer, "layers": LAYERS} if method == "pyramidkv" else {})
        arguments = [part for item in own.items() for part in ("--set", f"{item[0]}={item[1]}")]
        subprocess.run([tool, "compress", "--method", method, "--budget", str(budget), "--in", folder / str(layer),
                        "--out", folder / "kept", *arguments], check=True, capture_output=True)
        kept.append(read_kept(folder / "kept"))
    return kept


def run_cache(model, ids, method, budget, settings):
    """What a cache in the model holds when the prompt has ended: by layer and kv_head one set."""
    settings = dict(settings)
    model_facts.Repeated.PART = settings.pop("part", 2048)
    cache = TesseraCache(model.config, method, budget=budget, **settings).read_text(model, TOKENIZER)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.end_prompt()
    return [[set(head.tolist()) for head in cache.kept_positions(layer)[0]] for layer in range(LAYERS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--budgets", default="160,400")
    parser.add_argument("--methods")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    text = (ROOT / "examples/data/opticks.txt").read_text()[20000:20000 + 8 * given.tokens]
    ids = encode(text, given.tokens)
    models = {kind: transformers.LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation=kind).eval()
              for kind in ("sdpa", "eager", "tessera")}
    dumps = []
    run_press(models["sdpa"], kvpress.KnormPress(0.5), ids, dumps)
    assert (len(dumps), dumps[0]["k"].shape[0]) == (LAYERS, KV_HEADS), "another model"
    lists = LAYERS * KV_HEADS
    failed = False
    print(f"{given.tokens} tokens, {LAYERS} layers of {KV_HEADS} KV heads; kvpress "
          f"0.5.5, transformers {transformers.__version__}, torch {torch.__version__}\n")
    print("| method | budget | identical lists | others: tokens on one side only, at most | spread of their scores | reason |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for layer, tensors in enumerate(dumps):
            write_layer(folder / str(layer), tensors)
        for budget in map(int, given.budgets.split(",")):
            for name, (press, settings, reason) in methods(budget, given.tokens).items():
                if given.methods and name not in given.methods.split(";"):
                    continue
                method = name.split(",")[0]
                theirs = run_press(models["eager" if method == "h2o" else "sdpa"], press, ids)
                if method in ("duo_attention", "kvzip"):
                    ours = run_cache(models["tessera"], ids, method, budget, settings)
                else:
                    ours = run_compress(given.tool, folder, method, budget, settings)
                same, apart, spread, of_model = 0, 0, 0.0, []
                for mine, other, scores in zip(ours, theirs.kept, theirs.scores):
                    for head in range(KV_HEADS):
                        only = mine[head] ^ other[head]
                        same += not only
                        apart = max(apart, len(only))
                        values = [] if scores is None else [scores[head][token].item() for token in only]
                        of_model += values
                        spread = max(spread, distance(values))
                if method == "kvzip":  # one cut for all heads
                    spread = distance(of_model)
                close = same == lists or (0 < spread < 1e-4)
                failed |= not close and not reason
                print(f"| `{name}` | {budget} | {same} of {lists} | {apart if same < lists else ''} | "
                      f"{f'{spread:.1e}' if same < lists else ''} | "
                      f"{reason if not close else ('rounding' if same < lists else '')} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
