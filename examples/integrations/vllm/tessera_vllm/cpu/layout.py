"""vLLM's CPU pages: how K and V lie in them, and what is kept moves towards a prompt's end.

A layer's cache is [blocks, kv_heads, block, 2 * dim]. In it the CPU backend has of each block and kv_head first all
of K and then all of V, and K transposed: [dim, block] (isa vec and vec16).
"""
import torch

from ..operators import package


def pages(kv_cache):
    """K and V as [blocks, block, kv_heads, dim], views in the strides that they have."""
    blocks, heads, block, both = kv_cache.shape
    dim = both // 2
    halves = kv_cache.view(blocks, heads, 2, block * dim)
    k = halves[:, :, 0].unflatten(2, (dim, block)).permute(0, 3, 1, 2)
    v = halves[:, :, 1].unflatten(2, (block, dim)).transpose(1, 2)
    return k, v


def sequence(paged, row):
    """One sequence of a PagedLayer, as views."""
    own = slice(row, row + 1)
    return paged._replace(tables=paged.tables[own], lengths=paged.lengths[own], positions=paged.positions[own],
                          scores=paged.scores[own])


class RequestLayer:
    """What a request stores in a layer, as Tessera's operators take it.

    paged:  a PagedLayer of this one sequence, whose table has the blocks that attention reads, in the order of its
            tokens, the last of them partly filled
    block:  slots of a block
    tokens: how many are stored
    """

    def __init__(self, paged, block, tokens):
        self.paged, self.block, self.tokens = paged, block, tokens

    @classmethod
    def of(cls, kv_cache, blocks, tokens, positions, scores=None):
        """blocks [n]; positions [kv_heads, tokens], or [1, tokens] of all heads; scores [kv_heads, tokens], or None."""
        heads, block = kv_cache.size(1), kv_cache.size(2)
        room = lambda column: torch.nn.functional.pad(column, (0, blocks.numel() * block - tokens))[None].contiguous()
        return cls(package().PagedLayer(
            *pages(kv_cache), blocks.to(torch.int32)[None], torch.full((1, heads), tokens, dtype=torch.int32),
            room(positions.expand(heads, tokens)), None if scores is None else room(scores)), block, tokens)

    def observe(self, operations, index, queries, statistics=None):
        """queries [tokens, q_heads, dim], the newest ones; their keys are stored."""
        first = int(self.paged.positions[0, 0, self.tokens - 1]) + 1 - queries.size(0)
        operations.observe(index, self.paged, queries[None].contiguous(), torch.tensor([first], dtype=torch.int32),
                           statistics=statistics)

    def choose(self, operations, index, queries, kept_blocks, tail=None, granularity=1, statistics=None):
        """What of the tokens in full blocks stays: (the layer without the tail, slots, counts)."""
        full = self.tokens // self.block * self.block
        first = int(self.paged.positions[0, 0, self.tokens - 1]) + 1 - queries.size(0)
        candidates = self.paged._replace(lengths=torch.full_like(self.paged.lengths, full))
        number = lambda value: None if value is None else torch.tensor([value], dtype=torch.int32)
        slots, counts = operations.choose(
            index, candidates, queries[None].contiguous(), number(first), budgets=number(kept_blocks * self.block),
            tails=number(tail), granularity=granularity, statistics=statistics)
        return candidates, slots, counts

    def compact(self, operations, index, queries, kept_blocks, statistics=None):
        """Chooses among the tokens in full blocks, and moves what is kept into the last of these. Afterwards the layer
        is without the blocks before them."""
        full, kept = self.tokens // self.block * self.block, kept_blocks * self.block
        candidates, slots, counts = self.choose(operations, index, queries, kept_blocks, statistics=statistics)
        if not bool((counts == kept).all()):
            raise RuntimeError(f"tessera: counts of layer {index} are {counts.tolist()[0]}; expected {kept} of every "
                               "kv_head; take a method that gives all heads the same")
        operations.pack(candidates, slots, counts, torch.tensor([full], dtype=torch.int32))
        self.begin = full - kept

    begin = 0  # the first slot that is read

    def positions(self):
        return self.paged.positions[0, :, self.begin:self.tokens].clone()

    def scores(self):
        return self.paged.scores[0, :, self.begin:self.tokens].clone()
