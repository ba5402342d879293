"""The mode `read`: nothing is dropped, and a token behind a prompt reads the blocks that it chooses by an index.

The index has the smallest and the largest keys of every block, by the block's number, for each kv_head. A block is
indexed in the step that fills it, whoever fills it: a prompt's chunk, a decoded token, a request that comes again. So
blocks that another request finds in the prefix cache are indexed already. The newest block is always read, so that it
needs no index until it is full.

Every (token, kv_head) is a sequence of one head for vLLM's kernel: its table has the virtual pages of the chosen
blocks and, last, of the newest block. A request that was preempted computes its answer's tokens in one step; each of
them is such a sequence, and so reads what it had read before.
"""
import torch

from ..operators import package
from . import layout, virtual


class Index:
    """Of one layer. pages: k and v, as layout.pages has them; keys: the index, as PageOperations.empty_index has it"""

    def __init__(self, operations, kv_cache):
        self.address, self.pages = kv_cache.data_ptr(), layout.pages(kv_cache)
        self.keys = operations.empty_index(package().PagedLayer(*self.pages, None, None))

    @classmethod
    def of(cls, indices, name, operations, kv_cache):
        """A layer's index; a new one where the engine has taken other memory for its cache."""
        known = indices.get(name)
        if known is None or known.address != kv_cache.data_ptr():
            known = indices[name] = cls(operations, kv_cache)
        return known

    def layer(self, tables, lengths):
        return package().PagedLayer(*self.pages, tables, lengths)


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

    tables [tokens, blocks], stored [tokens, kv_heads], positions [tokens]; reads [tokens]: how many tokens it may read;
    lengths [tokens * kv_heads]: how many the kernel attends; tokens: their rows in the step's queries
    """

    def __init__(self, tokens, table, builder):
        """tokens: (row, query of the step's, position, schedule)"""
        rows, queries, positions, schedules = zip(*tokens)
        heads, block = builder.num_kv_heads, builder.block_size
        number = lambda values: torch.tensor(values, dtype=torch.int32)
        blocks = max(positions) // block + 1
        self.tables, self.positions = table[torch.tensor(rows), :blocks].contiguous(), number(positions)
        self.stored = (self.positions + 1)[:, None].expand(-1, heads).contiguous()
        reads = [schedule.read_blocks * block for schedule in schedules]
        self.reads, self.max_reads = number(reads), max(reads)
        self.lengths = number([schedule.tokens_read(position) for position, schedule in zip(positions, schedules)])
        self.lengths = self.lengths.repeat_interleave(heads)
        self.queries = virtual.Queries([(query, 1) for query in queries], heads)
        together = queries[-1] - queries[0] + 1 == len(queries)
        self.tokens = slice(queries[0], queries[-1] + 1) if together else torch.tensor(queries)
        self.plan = virtual.launch_plan(builder, self.queries.begins, self.lengths)
        self.block = block
        self.head_tables = self.tables[:, None] * heads + torch.arange(heads, dtype=torch.int32)[:, None]

    def pages(self, slots):
        """Tables of the kernel [tokens * kv_heads, pages], from slots [tokens, kv_heads, slots]."""
        # Chosen slots are those of whole blocks, in order; only the last, the newest, is partly filled.
        columns = slots[:, :, :self.max_reads:self.block].long().clamp_(min=0)
        return self.head_tables.gather(2, columns.floor_divide_(self.block)).flatten(0, 1)


class Step:
    """What the layers of one step index and read. alone: every row of the step is read by choice.

    lengths: of the step's rows for vLLM's own path: rows that are read by choice have their own tokens alone
    """

    def __init__(self, requests, metadata, known, builder):
        """requests: worker.Requests; known: the runner's requests, by row"""
        block, table = builder.block_size, metadata.block_table_tensor
        begins, ends = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens.tolist()
        starts = [end - (after - begin) for end, begin, after in zip(ends, begins, begins[1:])]
        filled = [row for row, (start, end) in enumerate(zip(starts, ends)) if end // block > start // block]
        self.filled = Filled(filled, torch.tensor(starts), metadata.seq_lens, table, builder.num_kv_heads) \
            if filled else None
        self.lengths, tokens, apart = metadata.seq_lens.clone(), [], 0
        for row, request in enumerate(known):
            schedule, start = requests.schedule(request, block), starts[row]
            first = schedule.first_reading(start) if schedule.read_blocks else ends[row]
            tokens += [(row, begins[row] + position - start, position, schedule)
                       for position in range(first, ends[row])]
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
        operations = attention.operations_of_reading(1 if reading is None else reading.max_reads)
        index = Index.of(attention.requests.indices, layer.layer_name, operations, kv_cache)
        if self.filled is not None:
            operations.index_pages(index.layer(self.filled.tables, self.filled.lengths), index.keys, self.filled.first,
                                   self.filled.max_tokens)
        if reading is None:
            return
        by_head = query.view(-1, attention.num_heads, attention.head_size)
        slots, _ = operations.choose_to_read(number, index.layer(reading.tables, reading.stored), index.keys,
                                             by_head[reading.tokens][:, None], reading.positions, reading.reads)
        virtual.attend(attention, layer, reading.queries, reading.pages(slots), reading.lengths, reading.plan, query,
                       kv_cache, output)
