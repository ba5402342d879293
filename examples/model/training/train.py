#!/usr/bin/env python3
"""Train the example model on retrieval tasks hidden in text; resumable.

From scratch, the curriculum follows the share of the planned minutes that has been trained: contexts grow
from 512 to 16,384 tokens, and short ones stay in the mixture. The first stage is left only after the
model tells eight keys apart. With --init, training continues from given weights on one mixture of
contexts. Every batch holds about 65,536 tokens.
"""

import argparse
import collections
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import sentencepiece as spm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import tasks

CONFIG = json.loads((Path(__file__).resolve().parents[1] / "config.json").read_text())

# Share of the planned time at which the stage ends, and how often each context length is drawn.
STAGES = [
    (0.38, {512: 1.0}),
    (0.50, {1024: 0.7, 512: 0.3}),
    (0.62, {2048: 0.6, 1024: 0.2, 512: 0.2}),
    (0.78, {4608: 0.6, 2048: 0.2, 1024: 0.1, 512: 0.1}),
    (0.94, {9216: 0.6, 4608: 0.2, 2048: 0.1, 512: 0.1}),
    (1.00, {16384: 0.25, 9216: 0.4, 4608: 0.25, 1024: 0.1}),
]
FINE_TUNING = [(1.00, {512: 0.05, 1024: 0.10, 2048: 0.25, 4608: 0.30, 9216: 0.30})]
GATE_ACCURACY, GATE_LIMIT = 0.90, 0.60


class Block(nn.Module):
    """One Llama layer."""

    def __init__(self, c):
        super().__init__()
        width, inner = c["hidden_size"], c["intermediate_size"]
        self.heads, self.kv_heads, self.head_dim = (c["num_attention_heads"], c["num_key_value_heads"],
                                                    c["head_dim"])
        self.eps = c["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(width, self.eps)
        self.post_attention_layernorm = nn.RMSNorm(width, self.eps)
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(width, self.heads * self.head_dim, bias=False),
            "k_proj": nn.Linear(width, self.kv_heads * self.head_dim, bias=False),
            "v_proj": nn.Linear(width, self.kv_heads * self.head_dim, bias=False),
            "o_proj": nn.Linear(self.heads * self.head_dim, width, bias=False)})
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(width, inner, bias=False),
                                  "up_proj": nn.Linear(width, inner, bias=False),
                                  "down_proj": nn.Linear(inner, width, bias=False)})

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        h = self.input_layernorm(x)
        q = self.self_attn["q_proj"](h).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.self_attn["k_proj"](h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.self_attn["v_proj"](h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn["o_proj"](h.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        h = F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h)
        return x + self.mlp["down_proj"](h)


def rotate(x, cos, sin):
    """Rotary embedding, halves paired as in Llama."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(torch.bfloat16)


class Model(nn.Module):
    """Llama with tied embeddings; parameter names are those of the published format."""

    def __init__(self, c):
        super().__init__()
        self.eps = c["rms_norm_eps"]
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c["vocab_size"], c["hidden_size"]),
            "layers": nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"])),
            "norm": nn.RMSNorm(c["hidden_size"], self.eps)})
        self.inverse = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2).double() / c["head_dim"])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 / math.sqrt(2 * c["num_hidden_layers"]) if name.endswith(
                    ("o_proj.weight", "down_proj.weight")) else 0.02
                nn.init.normal_(weight, std=scale)

    def angles(self, length, device):
        angles = torch.outer(torch.arange(length).double(), self.inverse)
        return angles.cos().float().to(device), angles.sin().float().to(device)

    def forward(self, tokens, cos, sin):
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        return self.model["norm"](x)


def head_loss(x, embedding, targets, weights):
    """Weighted cross-entropy and, for every position, whether the likeliest token is the target."""
    logits = F.linear(x, embedding).flatten(0, 1).float()
    loss = F.cross_entropy(logits, targets.flatten(), reduction="none")
    weights = weights.flatten()
    return (loss * weights).sum() / weights.sum(), logits.argmax(-1).view_as(targets) == targets


class Batches(IterableDataset):
    """Endless batches of training rows, made by the loader's workers."""

    def __init__(self, args, lengths, seed):
        self.args, self.lengths, self.seed = args, lengths, seed
        self.tokens = np.load(args.tokens)["tokens"]

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        processor = spm.SentencePieceProcessor(model_file=str(self.args.tokenizer))
        renderer = tasks.Renderer(processor, self.tokens)
        lengths, shares = list(self.lengths), list(self.lengths.values())
        while True:
            length = rng.choices(lengths, shares)[0]
            rows = max(1, self.args.batch_tokens // length)
            tokens = np.full((rows, length + 1), renderer.newline, np.int32)
            weights = np.zeros((rows, length), np.float32)
            spans = []
            for row in range(rows):
                sequence, answers = tasks.training_row(rng, renderer, length, self.args.numbers)
                tokens[row, :len(sequence)] = sequence
                weights[row, :len(sequence) - 1] = self.args.text_weight
                for start, end, family in answers:
                    weights[row, start - 1:end - 1] = self.args.answer_weight
                    spans.append((row, start - 1, end - 1, family))
            yield torch.from_numpy(tokens), torch.from_numpy(weights), torch.tensor(spans)


class Curves:
    """Share of training answers with every token right, by family and context length."""

    def __init__(self):
        self.counts = collections.defaultdict(lambda: [0, 0])

    def add(self, hits, spans, length):
        sums = np.pad(np.cumsum(hits, 1), ((0, 0), (1, 0)))
        right = sums[spans[:, 0], spans[:, 2]] - sums[spans[:, 0], spans[:, 1]] == spans[:, 2] - spans[:, 1]
        for family in np.unique(spans[:, 3]):
            chosen = right[spans[:, 3] == family]
            count = self.counts[length, tasks.FAMILIES[family]]
            count[0] += int(chosen.sum())
            count[1] += len(chosen)

    def accuracy(self, family, length):
        right, total = self.counts.get((length, family), (0, 0))
        return right / total if total else 0.0

    def table(self):
        """{length: {family: per cent}} and a fresh start."""
        table = collections.defaultdict(dict)
        for (length, family), (right, total) in sorted(self.counts.items()):
            table[length][family] = round(100 * right / total, 1)
        self.counts.clear()
        return dict(table)


def save_model(model, path):
    """bf16 weights under the published names."""
    state = {name: weight.detach().to(torch.bfloat16).contiguous().cpu()
             for name, weight in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def learning_rate(args, step, progress):
    """Linear warm-up, then a cosine over the planned time down to a hundredth."""
    decay = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return args.rate * min(1.0, (step + 1) / args.warmup) * decay


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True, help="tokens.npz of prepare_data.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.model")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.safetensors and the log")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to resume from and to save to")
    parser.add_argument("--init", type=Path,
                        help="fine-tune the weights in this folder (needed with --resume too)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--minutes", type=float, default=18.0, help="planned training time in all")
    parser.add_argument("--session-minutes", type=float, help="stop this run after so many minutes")
    parser.add_argument("--steps", type=int, help="stop this run after so many steps")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--answer-weight", type=float, default=2.0)
    parser.add_argument("--text-weight", type=float, default=0.1)
    parser.add_argument("--numbers", type=float, default=0.2,
                        help="share of documents whose needles hold numbers")
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--stage", type=int, help="stay in this stage (for trials)")
    args = parser.parse_args()
    begun = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 32

    stages = FINE_TUNING if args.init else STAGES
    model = Model(CONFIG).cuda()
    if args.init:
        model.load_state_dict(load_file(args.init / "model.safetensors"))
    decayed = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    optimiser = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05},
                                   {"params": others, "weight_decay": 0.0}],
                                  lr=args.rate, betas=(0.9, 0.95), fused=True)
    step, trained, stage = 0, 0.0, 0
    if args.resume:
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        step, trained, stage = saved["step"], saved["trained"], saved["stage"]
    if args.stage is not None:
        stage = args.stage
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters", flush=True)

    for layer in model.model["layers"]:
        layer.compile(dynamic=False)
    loss_function = torch.compile(head_loss, dynamic=False)
    embedding = model.model["embed_tokens"].weight
    angles = {}
    curves = Curves()
    first_step, seen, loss_sum, lapse = step, 0, torch.zeros((), device="cuda"), time.time()
    gate_passed, running, now = stage > 0, True, time.time()
    log = (args.out / "log.jsonl").open("a")
    while running:
        loader = DataLoader(Batches(args, stages[stage][1], seed=step + 1), batch_size=None, pin_memory=True,
                            num_workers=args.workers, prefetch_factor=4)
        for tokens, weights, spans in loader:
            length = tokens.shape[1] - 1
            tokens = tokens.cuda(non_blocking=True).long()
            weights = weights.cuda(non_blocking=True)
            if length not in angles:
                angles[length] = model.angles(length, "cuda")
            progress = trained / (60 * args.minutes)
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(args, step, progress)
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model(tokens[:, :-1], *angles[length])
                loss, hits = loss_function(hidden, embedding, tokens[:, 1:], weights)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            loss_sum += loss.detach()
            if step % 8 == 0:
                curves.add(hits.cpu().numpy(), spans.numpy(), length)
            step += 1
            seen += weights.numel()
            trained += min(time.time() - now, 0.5)
            now = time.time()
            if step % args.log_every == 0:
                keys = curves.accuracy("multi_key", min(stages[stage][1]))
                gate_passed = gate_passed or keys >= GATE_ACCURACY
                record = {"step": step, "stage": stage, "minutes": round(trained / 60, 2),
                          "loss": round(loss_sum.item() / args.log_every, 4),
                          "tokens_per_s": round(seen / (now - lapse)), "exact": curves.table()}
                print(json.dumps(record), flush=True)
                log.write(json.dumps(record) + "\n")
                log.flush()
                loss_sum.zero_()
                seen, lapse = 0, time.time()
            progress = trained / (60 * args.minutes)
            over = args.session_minutes and now - begun > 60 * args.session_minutes
            if progress >= 1 or over or (args.steps and step - first_step >= args.steps):
                running = False
                break
            held = stage == 0 and not gate_passed and progress < GATE_LIMIT
            if args.stage is None and progress >= stages[stage][0] and not held and stage + 1 < len(stages):
                stage += 1
                break
        del loader
    save_model(model, args.out / "model.safetensors")
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step,
                "trained": trained, "stage": stage}, args.checkpoint)
    print(f"stopped at step {step} after {trained / 60:.2f} of {args.minutes} minutes", flush=True)


if __name__ == "__main__":
    main()
