"""Steps that read a part of what is stored: the modes `read` and `compact_and_read`.

The index has the smallest and the largest keys of every block, by the block's number, for each kv_head. A block is
indexed in the step that fills it, whoever fills it: a prompt's chunk, a decoded token, a request that comes again. So
blocks that another request finds in the prefix cache are indexed already. Where a prompt is compacted, the blocks that
get what is kept are indexed anew. The newest block is read in any case; it is no candidate, and needs no index.

Every (token, kv_head) is a sequence of one head for vLLM's kernel: its table has the virtual pages of the chosen
blocks and, last, of the newest block. A request that was preempted computes its answer's tokens in one step; each of
them is such a sequence, and so reads what it had read before.

Tables here begin with the first block that is stored, and numbers of tokens are without those that were dropped.
"""
import torch

from ..operators import package
from . import layout, virtual


class Index:
    """Of one layer. pages: k and v, as layout.pages has them; keys: the index, as PageOperations.empty_index has it"""

    def __init__(self, operations, kv_cache):
        self.operations, self.address, self.pages = operations, kv_cache.data_ptr(), layout.pages(kv_cache)
        self.keys = operations.empty_index(self.layer(None, None))

    def layer(self, tables, lengths):
        return package().PagedLayer(*self.pages, tables, lengths)

    def fill(self, filled):
        self.operations.index_pages(self.layer(filled.tables, filled.lengths), self.keys, filled.first,
                                    filled.max_tokens)

    def renew(self, stored):
        """Rows of a request have moved. stored: layout.RequestLayer behind `compact`."""
        full = stored.tokens // stored.block * stored.block
        self.operations.index_pages(
            self.layer(stored.paged.tables, torch.full_like(stored.paged.lengths, full)), self.keys,
            torch.tensor([stored.begin], dtype=torch.int32), full - stored.begin)


class Filled:
    """The rows of a step that fill a block.

    tables [rows, blocks], lengths [rows, kv_heads], first [rows]: the slot of the first new token
    """

    def __init__(self, rows, starts, ends, table, kv_heads):
        self.tables, self.max_tokens = table[rows].contiguous(), int((ends - starts)[rows].max())
        self.lengths = ends[rows].to(torch.int32)[:, None].expand(-1, kv_heads).contiguous()
        self.first = starts[rows].to(torch.int32)


class Reading:
    """The tokens of a step that read a part.

    tables [tokens, blocks]; slots [tokens]: of the tokens; candidates [tokens, kv_heads]: stored tokens in front of
    the newest block; newest [tokens, kv_heads, 1]: the column of that block; reads [tokens]: how many tokens each
    chooses; last [tokens, kv_heads, 1]: how many blocks; channels [tokens]: by which, or None; lengths [tokens *
    kv_heads]: how many tokens the kernel attends; tokens: their rows in the step's queries
    """

    def __init__(self, tokens, table, builder):
        """tokens: (row, query of the step's, slot, schedule)"""
        rows, queries, slots, schedules = zip(*tokens)
        heads, block = builder.num_kv_heads, builder.block_size
        number = lambda values: torch.tensor(values, dtype=torch.int32)
        of_heads = lambda values: values[:, None].expand(-1, heads).contiguous()
        self.slots, blocks = number(slots), [schedule.read_blocks - 1 for schedule in schedules]
        newest = self.slots // block
        self.tables = table[torch.tensor(rows), :int(newest.max()) + 1].contiguous()
        self.candidates, self.newest = of_heads(newest * block), of_heads(newest)[..., None].long()
        self.reads, self.max_blocks = number(blocks) * block, max(blocks)
        self.last = of_heads(number(blocks))[..., None].long()
        self.channels = number([schedule.channels for schedule in schedules]) if schedules[0].channels else None
        self.lengths = (self.reads + self.slots % block + 1).repeat_interleave(heads)
        self.queries = virtual.Queries([(query, 1) for query in queries], heads)
        together = queries[-1] - queries[0] + 1 == len(queries)
        self.tokens = slice(queries[0], queries[-1] + 1) if together else torch.tensor(queries)
        self.plan = virtual.launch_plan(builder, self.queries.begins, self.lengths)
        self.block = block
        self.head_tables = self.tables[:, None] * heads + torch.arange(heads, dtype=torch.int32)[:, None]

    def pages(self, slots):
        """Tables of the kernel [tokens * kv_heads, pages], from slots [tokens, kv_heads, slots]."""
        # Chosen slots are those of whole blocks, in order.
        columns = slots[:, :, :self.max_blocks * self.block:self.block].long().clamp_(min=0).floor_divide_(self.block)
        columns = torch.nn.functional.pad(columns, (0, 1)).scatter_(2, self.last, self.newest)
        return self.head_tables.gather(2, columns).flatten(0, 1)


class Step:
    """What the layers of one step index and read. alone: every row of the step is read by choice.

    lengths: of the step's rows for vLLM's own path: rows that are read by choice have their own tokens alone
    """

    def __init__(self, requests, metadata, known, skipped, builder):
        """requests: worker.Requests; known: the runner's requests, and skipped: the blocks that each has given up, by
        row"""
        block, table = builder.block_size, metadata.block_table_tensor
        begins, ends = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens.tolist()
        starts = [end - (after - begin) for end, begin, after in zip(ends, begins, begins[1:])]
        filled = [row for row, (start, end) in enumerate(zip(starts, ends)) if end // block > start // block]
        self.filled = Filled(filled, torch.tensor(starts), metadata.seq_lens, table, builder.num_kv_heads) \
            if filled else None
        self.lengths, tokens, apart = metadata.seq_lens.clone(), [], 0
        for row, request in enumerate(known):
            schedule, start, gone = requests.schedule(request, block), starts[row], skipped[row] * block
            first = schedule.first_reading(start + gone) - gone if schedule.read_blocks else ends[row]
            tokens += [(row, begins[row] + slot - start, slot, schedule) for slot in range(first, ends[row])]
            if first == start:
                self.lengths[row] = ends[row] - start
                apart += 1
        self.alone = apart == len(known)
        self.reading = Reading(tokens, table, builder) if tokens else None

    def attend(self, number, layer, attention, query, kv_cache, output):
        """Behind vLLM's own path. number: the layer's; attention: backend.Attention"""
        reading = self.reading
        if reading is None and self.filled is None:
            return
        index = attention.index_of(layer, kv_cache)
        if self.filled is not None:
            index.fill(self.filled)
        if reading is None:
            return
        by_head = query.view(-1, attention.num_heads, attention.head_size)
        slots, _ = attention.operations_of_reading(reading.max_blocks * reading.block).choose_to_read(
            number, index.layer(reading.tables, reading.candidates), index.keys, by_head[reading.tokens][:, None],
            reading.slots, reading.reads, reading.channels)
        virtual.attend(attention, layer, reading.queries, reading.pages(slots), reading.lengths, reading.plan, query,
                       kv_cache, output)
