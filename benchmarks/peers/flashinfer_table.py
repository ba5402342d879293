#!/usr/bin/env python3
"""Reads the flat page table of a cache of ragged pages with FlashInfer's paged decode, and compares with our attention.

    benchmarks/peers/flashinfer_table.py --bench build/gpu/bin/bench_cuda

Needs a GPU, PyTorch and FlashInfer. A TANGRAM cache reads a prompt of 3,001 tokens in chunks of 512; its eight heads keep 5 to
57 %. To FlashInfer every kv_head is a sequence of one head. Exit status 0: outputs agree but for rounding to bf16.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

import flashinfer
import numpy
import torch

PAGE, DIM, LIMIT = 16, 128, 1e-2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([given.bench, "--flat_table", name], check=True)
        read = lambda file, kind: torch.from_numpy(numpy.fromfile(pathlib.Path(name) / file, kind))
        k, v, q = (read(file, numpy.int16).view(torch.bfloat16).cuda() for file in "kvq")
        ours = read("out", numpy.float32).view(-1, DIM)
        ends, blocks, lengths = (read(file, numpy.int32) for file in ("indptr", "indices", "lengths"))
    heads, table = len(lengths), blocks.cuda()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND",
                                                            use_tensor_cores=True)
    wrapper.plan(ends, table, (lengths - 1) % PAGE + 1, len(ours) // heads, 1, DIM, PAGE, q_data_type=torch.bfloat16,
                 kv_data_type=torch.bfloat16)
    theirs = wrapper.run(q.view(heads, -1, DIM), (k.view(-1, 1, PAGE, DIM), v.view(-1, 1, PAGE, DIM))).float().cpu().view(-1, DIM)
    error = ((theirs - ours).norm(dim=1) / ours.norm(dim=1)).max().item()
    print(f"FlashInfer {flashinfer.__version__} over {len(table)} blocks of {heads} heads of {lengths.tolist()} tokens: relative error at "
          f"most {error:.1e}, {'as' if error < LIMIT else 'NOT as'} ours")
    return error >= LIMIT


if __name__ == "__main__":
    sys.exit(main())
