"""The mode `uneven`: heads of a layer keep unequal numbers of tokens of a prompt, in whole virtual pages.

What a layer keeps of a prompt fits into the virtual pages (virtual.py) of the prompt's last kept_blocks full blocks,
and a head gets as many of these pages as it keeps. The worker alone knows which page belongs to which head. In a step
every (request, kv_head) is a sequence of one head: it reads the pages that the head has kept, and then its own pages of
the blocks behind the prompt.
"""
import dataclasses

import torch

from ..operators import package
from . import virtual


def shared_out(blocks, kv_heads, counts):
    """The virtual pages of these blocks, counts[head] for each head: its own first, then those that others spare."""
    own = [[block * kv_heads + head for block in blocks] for head in range(kv_heads)]
    spare = [page for head, count in enumerate(counts) for page in own[head][count:]]
    pages = []
    for head, count in enumerate(counts):
        pages.append(own[head][:count])
        while len(pages[head]) < count:
            pages[head].append(spare.pop())
    return pages


class KeptPages:
    """Of one request whose prompt is compacted: by layer and head, which virtual pages have what was kept.

    tables: [layers, kv_heads, kept_blocks * kv_heads]; counts: [layers, kv_heads] of them that a head has
    full:   full blocks of the prompt: the request's table from this column on has what came behind them
    """

    def __init__(self, layers, kv_heads, kept_blocks, full):
        self.tables = torch.zeros(layers, kv_heads, kept_blocks * kv_heads, dtype=torch.int32)
        self.counts = torch.zeros(layers, kv_heads, dtype=torch.int32)
        self.full = full

    def compact(self, index, stored, operations, queries, schedule):
        """Chooses among the rows in full blocks, and moves what is kept. stored: layout.RequestLayer of the prompt."""
        block, kept_blocks = stored.block, schedule.kept_blocks
        candidates, slots, counts = stored.choose(operations, index, queries, kept_blocks,
                                                  tail=-(-schedule.window // block) * block, granularity=block)
        pages = (counts[0] // block).tolist()
        kv_heads = len(pages)
        if bool((counts % block).any()) or sum(pages) > kv_heads * kept_blocks:
            raise RuntimeError(f"tessera: counts of layer {index} are {counts.tolist()[0]}; expected whole blocks of "
                               f"{block}, {kv_heads * kept_blocks} in all; this is an error of tessera_vllm: please "
                               "report it")
        blocks = candidates.tables[0, self.full - kept_blocks:self.full].tolist()
        for head, own in enumerate(shared_out(blocks, kv_heads, pages)):
            self.tables[index, head, :len(own)] = torch.tensor(own, dtype=torch.int32)
        self.counts[index] = counts[0] // block
        virtual = package().virtual_pages
        virtual.move(virtual.by_head(candidates), slots, counts, self.tables[index][None])


@dataclasses.dataclass(frozen=True)
class Row:
    """A request of a step that attends kept pages.

    kept:   KeptPages
    begin:  its first query of the step's
    tokens: its queries in the step
    end:    its tokens, as if none had been dropped
    table:  its blocks, by position
    """
    kept: KeptPages
    begin: int
    tokens: int
    end: int
    table: torch.Tensor


class Tables:
    """Tables [layers, rows * kv_heads, pages] of requests that decode together, kept while none gets another block."""

    def __init__(self, rows, block):
        self.of = self.key(rows, block)
        self.kept = torch.stack([row.kept.counts for row in rows], 1)  # [layers, rows, kv_heads]
        layers, count, kv_heads = self.kept.shape
        behind = [self.blocks_behind(row, block) for row in rows]
        self.tables = torch.zeros(layers, count, kv_heads, int(self.kept.max()) + max(behind), dtype=torch.int32)
        head = torch.arange(kv_heads, dtype=torch.int32)[:, None]
        for number, row in enumerate(rows):
            width = min(row.kept.tables.size(2), self.tables.size(3))
            self.tables[:, number, :, :width] = row.kept.tables[:, :, :width]
            own = row.table[row.kept.full:row.kept.full + behind[number]] * kv_heads + head  # [kv_heads, blocks]
            columns = self.kept[:, number, :, None].long() + torch.arange(behind[number])
            self.tables[:, number].scatter_(2, columns, own.to(torch.int32).expand(layers, -1, -1))
        self.tables = self.tables.view(layers, count * kv_heads, -1)

    @staticmethod
    def blocks_behind(row, block):
        return -(-row.end // block) - row.kept.full

    @classmethod
    def key(cls, rows, block):
        return [(row.kept, cls.blocks_behind(row, block)) for row in rows]

    def lengths(self, rows, block):
        """[layers, rows * kv_heads]: tokens that a head attends."""
        behind = torch.tensor([row.end - row.kept.full * block for row in rows], dtype=torch.int32)
        return (self.kept * block + behind[:, None]).flatten(1)


class Step:
    """What the layers of one step need.

    builder: backend.MetadataBuilder, for the facts of vLLM's kernels; alone: the step has no other rows
    """

    def __init__(self, rows, tables, builder, alone):
        self.builder, self.alone = builder, alone
        self.tables, self.lengths = tables.tables, tables.lengths(rows, builder.block_size)
        self.queries = virtual.Queries([(row.begin, row.tokens) for row in rows], builder.num_kv_heads)

    def attend(self, index, layer, attention, query, kv_cache, output):
        """attention: backend.Attention. Writes the rows of output [tokens, q_heads, dim]."""
        lengths = self.lengths[index]
        virtual.attend(attention, layer, self.queries, self.tables[index], lengths,
                       virtual.launch_plan(self.builder, self.queries.begins, lengths), query, kv_cache, output)
