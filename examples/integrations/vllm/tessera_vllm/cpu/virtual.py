"""vLLM's own CPU kernel over virtual pages: every (row, kv_head) is a sequence of one head.

A block of a layer is [kv_heads, block, 2 * dim]. It has kv_heads virtual pages, of numbers block * kv_heads + head, so
that heads may have tables of their own over the memory that vLLM has.
"""
import torch
from vllm import _custom_ops as ops
from vllm import envs


class Queries:
    """Where the queries of some rows lie in a step, in the order that the kernel takes: [tokens, kv_heads, group, dim]
    of rows with one token each, [rows, kv_heads, tokens, group, dim] otherwise.

    rows: (first query of the step's, number of queries)
    """

    def __init__(self, rows, kv_heads):
        counts = torch.tensor([tokens for _, tokens in rows]).repeat_interleave(kv_heads)
        self.begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        first, last = rows[0][0], sum(rows[-1])
        self.of_step = slice(first * kv_heads, last * kv_heads)
        if last - first != len(rows):
            head = torch.arange(kv_heads)[:, None]
            self.of_step = torch.cat([((torch.arange(tokens) + begin) * kv_heads + head).flatten()
                                      for begin, tokens in rows])


def launch_plan(builder, begins, lengths):
    """What vLLM's kernel wants to know beforehand of sequences of one head. builder: backend.MetadataBuilder."""
    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=lengths.numel(), num_heads=builder.num_heads // builder.num_kv_heads, num_kv_heads=1,
        head_dim=builder.head_dim, seq_lens=lengths, dtype=builder.dtype, query_start_loc=begins, causal=True,
        sliding_window_size=-1, isa=builder.isa, enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV, dynamic_causal=None,
        kv_cache_dtype=builder.kv_cache_dtype)


def attend(attention, layer, queries, tables, lengths, plan, query, kv_cache, output):
    """Writes the queries' rows of output [tokens, q_heads, dim].

    attention: backend.Attention; queries: Queries; tables [sequences, pages], lengths [sequences], of virtual pages
    """
    dim, group = attention.head_size, attention.num_queries_per_kv
    k, v = kv_cache.view(-1, 1, kv_cache.size(2) * 2, dim).chunk(2, dim=2)
    own = query.reshape(-1, group, dim)[queries.of_step]
    to = output.view(-1, group, dim)
    direct = isinstance(queries.of_step, slice)
    out = to[queries.of_step] if direct else torch.empty_like(own)
    ops.cpu_attention_with_kv_cache(
        query=own, key_cache=k, value_cache=v, output=out, query_start_loc=queries.begins, seq_lens=lengths,
        scale=attention.scale, causal=True, alibi_slopes=None, sliding_window=-1, block_table=tables,
        softcap=attention.logits_soft_cap, scheduler_metadata=plan, s_aux=None, dynamic_causal=None,
        k_scale=layer._k_scale_float, v_scale=layer._v_scale_float, kv_cache_dtype=attention.kv_cache_dtype)
    if not direct:
        to[queries.of_step] = out
