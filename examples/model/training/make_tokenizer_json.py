#!/usr/bin/env python3
"""Writes a model's tokenizer.model as tokenizer.json, which transformers 5 reads without losing spaces.

    make_tokenizer_json.py [MODEL_FOLDER]        needs sentencepiece and protobuf

Byte-pair encoding with bytes for what has no piece, no space put before a text, `<s>` before it: what the example engine does.
"""
import json
import pathlib
import sys

from sentencepiece import sentencepiece_model_pb2

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
SPACE = "\u2581"


def merges_of(pieces, numbers):
    """Pairs of pieces that make a piece, best pieces first."""
    normal = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    found = []
    for whole, score in normal.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in normal and right in normal:
                found.append((-score, numbers[left], numbers[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    numbers = {piece.piece: number for number, piece in enumerate(model.pieces)}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text, more = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = [{"id": numbers[piece.piece], "content": piece.piece, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, begin, more],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [numbers["<s>"]], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                                                     {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": numbers, "merges": merges_of(model.pieces, numbers)},
    }, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
