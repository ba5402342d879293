#!/usr/bin/env python3
"""Where a vector's largest elements lie after MosaicKV's rotation, on the example model (the paper's figure 4).

    benchmarks/mosaickv_channels.py OUT.json [--context 4096] [--documents 2]

Needs numpy and sentencepiece. Keys after RoPE and values of a document with needles are computed here in fp32; of each layer and
kv_head they are rotated by the eigenvectors of their uncentred second moment, by falling eigenvalue. For every channel: how often it
is among a vector's largest quarter, and how much of the energy is in it, before and after the rotation. And how much of the energy a
quarter of the elements holds: the first of all vectors, or each vector's own, given or rotated.
"""
import argparse
import json
import pathlib

import numpy
import sentencepiece

import sablock_blocks

KINDS = ("given", "rotated")


def rotation(rows):
    """Eigenvectors by falling eigenvalue, one a column."""
    _, vectors = numpy.linalg.eigh(rows.astype(numpy.float64).T @ rows)
    return vectors[:, ::-1].astype(numpy.float32)


def shares_of(rows):
    """How often a channel is among the largest quarter; its energy; the energy of the quarter all share, and of each one's own."""
    energy, kept = rows * rows, rows.shape[1] // 4
    own = numpy.argpartition(-energy, kept - 1, axis=1)[:, :kept]
    often = numpy.bincount(own.ravel(), minlength=rows.shape[1]) / len(rows)
    mean = energy.mean(0)
    order = numpy.argsort(-mean)
    total = mean.sum()
    return {"often": often[order], "energy": mean[order] / total, "same": mean[order[:kept]].sum() / total,
            "own": numpy.take_along_axis(energy, own, 1).sum() / energy.sum()}


def measure(context, documents):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(sablock_blocks.MODEL / "tokenizer.model"))
    found = {side: {kind: [] for kind in KINDS} for side in "kv"}
    for document in range(documents):
        for layer in sablock_blocks.layers_of(sablock_blocks.make_document(pieces, context, document)):
            for side in "kv":
                for rows in layer[side]:
                    found[side]["given"].append(shares_of(rows))
                    found[side]["rotated"].append(shares_of(rows @ rotation(rows)))
    mean = lambda lists, name: numpy.mean([one[name] for one in lists], axis=0).round(5).tolist()
    return {"context": context, "documents": documents,
            **{side: {kind: {name: mean(lists, name) for name in lists[0]} for kind, lists in kinds.items()}
               for side, kinds in found.items()}}


def show(found):
    print("| | energy in the first quarter of the channels | in each vector's own largest quarter | of those elements, in the first quarter "
          "| in the last quarter |\n| --- | --- | --- | --- | --- |")
    for side, name in (("k", "keys"), ("v", "values")):
        for kind in KINDS:
            one = found[side][kind]
            often, quarter = numpy.array(one["often"]), len(one["often"]) // 4
            print(f"| {name}, {kind} | {100 * one['same']:.1f} % | {100 * one['own']:.1f} % | "
                  f"{100 * often[:quarter].sum() / often.sum():.1f} % | {100 * often[-quarter:].sum() / often.sum():.1f} % |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=2)
    given = parser.parse_args()
    found = measure(given.context, given.documents)
    given.out.write_text(json.dumps(found) + "\n")
    show(found)


if __name__ == "__main__":
    main()
