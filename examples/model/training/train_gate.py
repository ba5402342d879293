#!/usr/bin/env python3
"""Train FastKVzip's gate for the example model.

First the model reads documents: plain text, text with hidden tasks, and such text with its questions and answers.
Hidden states and KVzip scores of each are stored in a folder of its own; a document that is there is not read again.
Then the gate learns to give a token its KVzip score, by binary cross-entropy, from random tokens of all documents.
Equal arguments give equal documents, and an equal gate on one machine.
"""

import argparse
import hashlib
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

import tasks
from gate import Gate
from reader import Reader

LENGTHS = {512: 0.2, 1024: 0.25, 2048: 0.3, 4096: 0.25}  # tokens of a document, and how often
KINDS = ("text", "document", "conversation")
VALIDATION = 16  # the last documents, on which the gate does not learn


def document(rng, renderer, number, numbers):
    """Tokens of a training document; the three kinds take turns."""
    kind = KINDS[number % len(KINDS)]
    length = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
    if kind == "text":
        return [tasks.BOS] + renderer.slice(rng, length - 1).tolist()
    row = None
    while row is None:
        task = tasks.training_task(rng, numbers)
        if kind == "document":
            task.place = "last"
        row = renderer.render(rng, task, total=length, lines_only=rng.random() < 0.6, vary=True)
    tokens, spans = row
    if kind == "document":
        question = renderer.encode(tasks.SPEC["question"].format(question=task.turns[0][1]))
        tokens = tokens[:spans[0][0] - len(question) - len(renderer.encode(tasks.SPEC["answer"]))]
    return [int(token) for token in tokens]


def require_same_documents(args):
    """Notes in the folder what its documents come from. Errors: documents of other arguments lie there."""
    made_of = {"seed": args.seed, "numbers": args.numbers,
               "model": hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest(),
               "tokens": hashlib.sha256(args.tokens.read_bytes()).hexdigest()}
    noted = args.data / "documents.json"
    if noted.exists():
        found = json.loads(noted.read_text())
        others = [name for name, value in made_of.items() if found.get(name) != value]
        if others:
            raise SystemExit(f"documents in {args.data} are of another {' and '.join(others)}; expected the same; "
                             "pass another folder as --data, or remove this one")
    elif any(args.data.glob("*.safetensors")):
        raise SystemExit(f"documents in {args.data} have no documents.json; expected it, as it says what they come from; "
                         "pass another folder as --data, or remove this one")
    noted.write_text(json.dumps(made_of))


def read_documents(args):
    """Reads what is not there yet."""
    args.data.mkdir(parents=True, exist_ok=True)
    require_same_documents(args)
    files = [args.data / f"{number:05}.safetensors" for number in range(args.documents)]
    missing = [number for number, path in enumerate(files) if not path.exists()]
    if not missing:
        return files
    processor = spm.SentencePieceProcessor(model_file=str(args.model / "tokenizer.model"))
    renderer = tasks.Renderer(processor, np.load(args.tokens)["tokens"])
    reader = Reader(args.model, processor, args.device)
    begun, seen = time.time(), 0
    for done, number in enumerate(missing, 1):
        tokens = document(random.Random(f"{args.seed} {number}"), renderer, number, args.numbers)
        hidden, cache = reader.read(tokens)
        scores = reader.kvzip_scores(tokens, cache)
        half = files[number].with_suffix(".part")
        save_file({"hidden": hidden.to(torch.float16).cpu(), "scores": scores,
                   "tokens": torch.tensor(tokens, dtype=torch.int32)}, half)
        half.rename(files[number])
        seen += len(tokens)
        if done % 10 == 0 or done == len(missing):
            print(f"{done} of {len(missing)} documents, {seen} tokens, {(time.time() - begun) / 60:.1f} minutes",
                  flush=True)
    return files


def load_documents(files, args):
    """Hidden states [layers, tokens, hidden] and targets [layers, kv_heads, tokens] of all files, one after another."""
    parts = [load_file(path) for path in files]
    scores = torch.cat([part["scores"] for part in parts], 2).clamp(0, 1)
    return torch.cat([part["hidden"] for part in parts], 1).to(args.device), (scores ** args.power).to(args.device)


def loss_of(gate, hidden, scores):
    """Binary cross-entropy over all layers' heads; targets are numbers in [0, 1]."""
    return F.binary_cross_entropy(gate(hidden.float()), scores)


@torch.no_grad()
def validate(gate, hidden, scores):
    parts = torch.arange(hidden.shape[1]).split(4096)
    return sum(loss_of(gate, hidden[:, at], scores[:, :, at]).item() * len(at) for at in parts) / hidden.shape[1]


def train(args, learn, others):
    """The gate after all steps."""
    torch.manual_seed(args.seed)
    hidden, scores = learn
    gate = Gate(len(hidden), hidden.shape[2], scores.shape[1], args.heads).to(args.device)
    if args.optimiser == "sgd":
        optimiser = torch.optim.SGD(gate.parameters(), args.rate, momentum=0.9)
    else:
        optimiser = torch.optim.AdamW(gate.parameters(), args.rate, weight_decay=0.01)
    begun, lapse = time.time(), 0.0
    for step in range(1, args.steps + 1):
        rate = args.rate * min(1.0, step / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        at = torch.randint(hidden.shape[1], (args.batch,))
        loss = loss_of(gate, hidden[:, at], scores[:, :, at])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        lapse += loss.item()
        if step % 250 == 0 or step == args.steps:
            print(f"step {step}: loss {lapse / ((step - 1) % 250 + 1):.5f}, validation {validate(gate, *others):.5f}, "
                  f"{time.time() - begun:.0f} s", flush=True)
            lapse = 0.0
    return gate


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True, help="tokens.npz of prepare_data.py")
    parser.add_argument("--data", type=Path, required=True, help="folder for what was read; reading resumes there")
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--out", type=Path, help="file to write (default: gate/gate.safetensors in the model's folder)")
    parser.add_argument("--documents", type=int, default=240)
    parser.add_argument("--numbers", type=float, default=0.2, help="share of documents whose needles hold numbers")
    parser.add_argument("--power", type=float, default=0.5,
                        help="targets are KVzip scores to this power: 1 as in the paper")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=1000, help="tokens of a step")
    parser.add_argument("--optimiser", choices=("adamw", "sgd"), default="adamw",
                        help="sgd: with momentum 0.9, as in the paper")
    parser.add_argument("--rate", type=float, default=4e-3, help="0.2 goes with sgd")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--read-only", action="store_true", help="read the documents and stop")
    args = parser.parse_args()
    if args.documents <= VALIDATION:
        parser.error(f"--documents is {args.documents}; expected more than {VALIDATION}, which are left out for "
                     "validation; pass a few hundred")
    if args.threads:
        torch.set_num_threads(args.threads)
    files = read_documents(args)
    if args.read_only:
        return

    args.heads = json.loads((args.model / "config.json").read_text())["num_attention_heads"]
    learn, others = (load_documents(part, args) for part in (files[:-VALIDATION], files[-VALIDATION:]))
    print(f"{learn[0].shape[1]} tokens to learn from, {others[0].shape[1]} to validate", flush=True)
    gate = train(args, learn, others)
    out = args.out or args.model / "gate" / "gate.safetensors"
    out.parent.mkdir(parents=True, exist_ok=True)
    gate.save(out)
    print(f"{out}: {sum(weight.numel() for weight in gate.parameters())} numbers, "
          f"validation {validate(gate.restore(out), *others):.5f} in bf16")


if __name__ == "__main__":
    main()
