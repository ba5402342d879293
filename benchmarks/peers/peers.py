#!/usr/bin/env python3
"""Times what PyTorch has for the shapes of bench_cuda: attention (flash and cuDNN) and top-k, through CUDA graphs.

    benchmarks/peers/peers.py --out FILE [--only decode,latent,prefill,ragged,top_k]

Counted as bench_cuda counts: inputs rotated through at least 256 MiB, events around the replay of a graph behind a
kernel that keeps the GPU busy until the graph is queued, the median of 11 times the mean of 3 replays. FlashInfer joins
where it can be imported; its wheel (0.7.2: 59 MiB) has sources that it compiles at first use, and the wheel of compiled
kernels is not on PyPI, so it is not brought along. A peer that fails is written down with its error.
"""
import argparse
import json
import math
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as missing:
    sys.exit(f"peers.py needs PyTorch with CUDA: {missing}")

KV_HEADS, Q_HEADS, HEAD_DIM = 8, 32, 128
SPIN_CYCLES = 100_000
DECODE = [("B1/8K", 1, 8192), ("B1/32K", 1, 32768), ("B1/128K", 1, 131072), ("B1/256K", 1, 262144),
          ("B4/128K", 4, 131072), ("B4/256K", 4, 262144), ("B8/128K", 8, 131072), ("B64/8K", 64, 8192)]
RAGGED = {"calibrated": [0.05, 0.09, 0.13, 0.18, 0.24, 0.32, 0.42, 0.57],
          "log_normal": [0.0361, 0.0689, 0.1026, 0.1429, 0.1957, 0.2727, 0.4060, 0.7754],
          "one_long": [0.0625, 0.0625, 0.0625, 1.0, 0.0625, 0.0625, 0.0625, 0.0625]}
PREFILL = [("4K", 4096), ("16K", 16384), ("32K", 32768), ("64K", 65536), ("128K", 131072)]
TOP_K = [(32, 8192, 512), (256, 8192, 512), (32, 32768, 2048), (8, 131072, 2048), (64, 131072, 2048),
         (256, 131072, 2048), (8, 1048576, 2048)]
LATENT = [("B1/32K", 1, 32768), ("B8/32K", 8, 32768), ("B64/8K", 64, 8192)]
BACKENDS = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]


def input_sets(size):
    return max(2, min(256, math.ceil((256 << 20) / size)))


def launches(size, sets):
    least = 32 if size < (64 << 20) else 4
    return math.ceil(least / sets) * sets


def timed(call, count, iterations=3, repetitions=11):
    """Microseconds of one of `count` calls `call(i)`: median, least and most."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(2):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once():
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / count

    for _ in range(2):
        once()
    times = [statistics.mean(once() for _ in range(iterations)) for _ in range(repetitions)]
    return {"us": statistics.median(times), "min": min(times), "max": max(times)}


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode(backend, sequences, tokens):
    size = sequences * KV_HEADS * tokens * HEAD_DIM * 4
    sets = input_sets(size)
    k = [random(sequences, KV_HEADS, tokens, HEAD_DIM) for _ in range(sets)]
    v = [random(sequences, KV_HEADS, tokens, HEAD_DIM) for _ in range(sets)]
    q = random(sequences, Q_HEADS, 1, HEAD_DIM)
    with sdpa_kernel(backend):
        return timed(lambda i: functional.scaled_dot_product_attention(q, k[i % sets], v[i % sets], enable_gqa=True),
                     launches(size, sets))


def decode_flashinfer(tokens):
    import flashinfer
    size = KV_HEADS * tokens * HEAD_DIM * 4
    sets = input_sets(size)
    k = [random(tokens, KV_HEADS, HEAD_DIM) for _ in range(sets)]
    v = [random(tokens, KV_HEADS, HEAD_DIM) for _ in range(sets)]
    q = random(Q_HEADS, HEAD_DIM)
    return timed(lambda i: flashinfer.single_decode_with_kv_cache(q, k[i % sets], v[i % sets], use_tensor_cores=True),
                 launches(size, sets))


def decode_paged_flashinfer(sequences, tokens):
    """Over pages as bench_cuda has them: [pages, kv_heads, 16, dim], in any order."""
    import flashinfer
    page, pages = 16, sequences * tokens // 16
    size = sequences * KV_HEADS * tokens * HEAD_DIM * 4
    sets = input_sets(size)
    k, v = ([random(pages, KV_HEADS, page, HEAD_DIM) for _ in range(sets)] for _ in range(2))
    q = random(sequences, Q_HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    ends = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * (tokens // page)
    table = torch.randperm(pages, device="cuda").to(torch.int32)
    last = torch.full((sequences,), page, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=table.clone(),
        paged_kv_last_page_len_buffer=last.clone())
    wrapper.plan(ends, table, last, Q_HEADS, KV_HEADS, HEAD_DIM, page, q_data_type=torch.bfloat16,
                 kv_data_type=torch.bfloat16)
    return timed(lambda i: wrapper.run(q, (k[i % sets], v[i % sets]), out=out), launches(size, sets))


def ragged_lengths(shares, sequences, tokens):
    """As bench_cuda_ragged.cu has them: each sequence has the shares of its heads turned."""
    return [int(shares[(row // KV_HEADS + row % KV_HEADS) % KV_HEADS] * tokens + 0.5)
            for row in range(sequences * KV_HEADS)]


def latent_flashinfer(heads, sequences, tokens):
    """FlashInfer's MLA over pages of 64 tokens, planned beforehand, with its kernel for Hopper."""
    import flashinfer
    size = sequences * tokens * 576 * 2
    sets = input_sets(size)
    pages = sequences * tokens // 64
    ckv, kpe = random(sets, pages, 64, 512), random(sets, pages, 64, 64)
    q, q_pe = random(sequences, heads, 512), random(sequences, heads, 64)
    numbers = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
    begin, ends = numbers(range(sequences + 1)), numbers([i * (tokens // 64) for i in range(sequences + 1)])
    order, lengths = torch.randperm(pages, device="cuda").to(torch.int32), numbers([tokens] * sequences)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=True, qo_indptr=begin,
        kv_indptr=ends, kv_indices=order, kv_len_arr=lengths, backend="fa3")
    wrapper.plan(begin, ends, order, lengths, heads, 512, 64, 64, False, 192 ** -0.5, torch.bfloat16, torch.bfloat16)
    out = torch.empty(sequences, heads, 512, device="cuda", dtype=torch.bfloat16)
    return timed(lambda i: wrapper.run(q, q_pe, ckv[i % sets], kpe[i % sets], out=out), launches(size, sets))


def decode_ragged_flashinfer(lengths, planned):
    """Every (sequence, kv_head) as a sequence of one head behind the flat table of ragged pages: pages of 16 tokens, in any
    order. `planned`: with the plan that a step makes anew for each layer, whose time is the host's and the device's."""
    import flashinfer
    page, group, rows = 16, Q_HEADS // KV_HEADS, len(lengths)
    held = [(length + page - 1) // page for length in lengths]
    size = sum(lengths) * HEAD_DIM * 4
    sets = input_sets(size)
    k, v = ([random(sum(held), 1, page, HEAD_DIM) for _ in range(sets)] for _ in range(2))
    q = random(rows, group, HEAD_DIM)
    out = torch.empty_like(q)
    ends = torch.tensor([0] + held, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.randperm(sum(held), device="cuda").to(torch.int32)
    last = torch.tensor([(length - 1) % page + 1 for length in lengths], dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=ends.cuda(), paged_kv_indices_buffer=table.clone(),
        paged_kv_last_page_len_buffer=last.cuda())

    def plan():
        wrapper.plan(ends, table, last, group, 1, HEAD_DIM, page, q_data_type=torch.bfloat16,
                     kv_data_type=torch.bfloat16)

    plan()
    alone = timed(lambda i: wrapper.run(q, (k[i % sets], v[i % sets]), out=out), launches(size, sets))
    if not planned:
        return alone
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return {key: value + statistics.median(times) for key, value in alone.items()}


def prefill(backend, tokens):
    q = random(1, Q_HEADS, tokens, HEAD_DIM)
    k, v = (random(1, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
    with sdpa_kernel(backend):
        return timed(lambda i: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                     4 if tokens <= 8192 else 1, iterations=1)


def top_k(rows, n, k):
    size = rows * n * 4
    sets = input_sets(size)
    scores = torch.randn(sets, rows, n, device="cuda")
    return timed(lambda i: torch.topk(scores[i % sets], k, dim=1, sorted=False), launches(size, sets))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="decode,top_k,prefill,ragged,latent")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peers.py needs a CUDA device, and PyTorch sees none")
    try:
        import flashinfer
        flashinfer_version = flashinfer.__version__
    except ImportError:
        flashinfer_version = None

    work = []
    for kind in given.only.split(","):
        if kind == "decode":
            for name, sequences, tokens in DECODE:
                for peer, backend in BACKENDS:
                    work.append((f"decode/{name}", peer, lambda b=backend, s=sequences, t=tokens: decode(b, s, t)))
                if flashinfer_version and sequences == 1:
                    work.append((f"decode/{name}", "flashinfer", lambda t=tokens: decode_flashinfer(t)))
                if flashinfer_version:
                    work.append((f"decode_paged/{name}", "flashinfer",
                                 lambda s=sequences, t=tokens: decode_paged_flashinfer(s, t)))
        elif kind == "ragged":
            for shares_name, shares in RAGGED.items():
                for sequences, tokens in ((1, 131072), (4, 131072), (16, 65536), (64, 32768)):
                    lengths = ragged_lengths(shares, sequences, tokens)
                    for peer, planned in (("flashinfer", False), ("flashinfer_planned", True)):
                        if flashinfer_version:
                            work.append((f"ragged/{shares_name}/B{sequences}", peer,
                                         lambda a=(lengths, planned): decode_ragged_flashinfer(*a)))
        elif kind == "prefill":
            for name, tokens in PREFILL:
                for peer, backend in BACKENDS:
                    work.append((f"prefill/{name}", peer, lambda b=backend, t=tokens: prefill(b, t)))
        elif kind == "top_k":
            for rows, n, k in TOP_K:
                work.append((f"top_k/{rows}x{n}/k{k}/normal", "torch.topk", lambda a=(rows, n, k): top_k(*a)))
        elif kind == "latent":
            for heads in (16, 128):
                for name, sequences, tokens in LATENT:
                    if flashinfer_version:
                        work.append((f"latent/H{heads}/{name}", "flashinfer",
                                     lambda a=(heads, sequences, tokens): latent_flashinfer(*a)))
        else:
            sys.exit(f"--only is {kind}; expected decode, latent, prefill, ragged or top_k")

    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
              "flashinfer": flashinfer_version, "figures": []}
    for name, peer, measure in work:
        figure = {"name": name, "peer": peer}
        try:
            figure.update(measure())
            print(f"{name:32} {peer:12} {figure['us']:10.2f} us", flush=True)
        except Exception as failure:  # one peer that fails must not lose the others
            figure["error"] = str(failure).splitlines()[0][:200] if str(failure) else type(failure).__name__
            print(f"{name:32} {peer:12} failed: {figure['error']}", flush=True)
        report["figures"].append(figure)
        torch.cuda.empty_cache()
        with open(given.out, "w") as file:  # after each, so that a time limit keeps what there is
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
