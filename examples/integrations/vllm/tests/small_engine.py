"""A small engine without vLLM and without a model: a pool of blocks in the layouts of vLLM's GPU pages, a scheduler that
takes prompts in chunks and preempts, and Tessera's operators over its pages.

A request's rows come from a bank, by its seed and a token's position. So they can be looked up again, and a request that
was preempted writes the same rows once more. Steps of a batch are recorded as one CUDA graph over tables, lengths and
positions that stay where they are. Blocks that nobody holds are full of NaN.
"""
import collections
import dataclasses

import torch
from tessera_vllm import operators, plan

PagedLayer, PageOperations = operators.package().PagedLayer, operators.package().PageOperations
LAYERS, Q_HEADS, KV_HEADS, DIM, BLOCK, WINDOW = 2, 8, 2, 64, 16, 16
ROWS = 4099  # of the bank


@dataclasses.dataclass
class Request:
    seed: int
    prompt: int
    answer: int             # tokens after which it ends
    schedule: plan.Schedule
    budget: int
    aborted_after: int      # tokens of the answer after which it is aborted; more than `answer`: it is not
    answered: int = 0
    computed: int = 0       # tokens that are stored or were dropped
    blocks: list = dataclasses.field(default_factory=list)  # by position; those that were given up are -1
    chosen: dict = dataclasses.field(default_factory=dict)  # by layer and end: positions that stayed

    def tokens(self):
        return self.prompt + self.answered

    def dropped(self):
        return self.schedule.dropped(self.computed)

    def held(self):
        return [block for block in self.blocks if block >= 0]


class SmallEngine:
    def __init__(self, device, dtype, order, method, blocks, batch=12, longest=640):
        self.device, self.dtype, self.batch = torch.device(device), dtype, batch
        self.columns = longest // BLOCK
        random = torch.Generator().manual_seed(9)
        draw = lambda heads: torch.randn(LAYERS, ROWS, heads, DIM, generator=random).to(device, dtype)
        self.bank_q, self.bank_k, self.bank_v = draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS)
        shape = (LAYERS, blocks, BLOCK, KV_HEADS, 2 * DIM) if order == "nhd" else (LAYERS, blocks, KV_HEADS, BLOCK, 2 * DIM)
        pool = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.pools = [(one if order == "nhd" else one.transpose(1, 2)).split(DIM, -1) for one in pool]
        self.positions = torch.full((LAYERS, blocks, KV_HEADS, BLOCK), -1, dtype=torch.int32, device=device)
        self.free = collections.deque(range(blocks))
        self.all_blocks = blocks
        self.waiting, self.running = collections.deque(), []
        self.operations = PageOperations(method, layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=dtype,
                                         device=device, budget=4 * BLOCK, **({"window": WINDOW} if method == "snapkv" else {}))
        self.preempted = self.compacted = 0
        # What a recorded step reads and writes.
        numbers = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=device)
        self.tables, self.lengths = numbers(batch, self.columns), numbers(LAYERS, batch, KV_HEADS)
        self.column = numbers(LAYERS, batch, KV_HEADS, longest)
        self.first, self.counts = numbers(batch), numbers(batch)
        rows = lambda heads: torch.zeros(LAYERS, batch, 1, heads, DIM, dtype=dtype, device=device)
        self.q, self.k, self.v = rows(Q_HEADS), rows(KV_HEADS), rows(KV_HEADS)
        self.graph = None
        if self.device.type == "cuda":
            self._record()

    # A step of a batch.

    def _layers(self, tables=None):
        return [PagedLayer(*pool, self.tables if tables is None else tables, self.lengths[i], self.column[i])
                for i, pool in enumerate(self.pools)]

    def _step(self):
        made = []
        for i, layer in enumerate(self._layers()):
            self.operations.append(layer, self.k[i], self.v[i], self.first, self.counts)
            made.append(self.operations.attend(i, layer, self.q[i], self.first))
        return made

    def _record(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._step()  # rows of no tokens: nothing is written
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.recorded = self._step()
        torch.cuda.synchronize()

    def _rows(self, bank, request, first, count):
        at = (request.seed + torch.arange(first, first + count, device=self.device)) % ROWS
        return bank[:, at]

    def decode(self, requests):
        """One token of each request -> by layer (out, lse)."""
        dropped = [request.dropped() for request in requests]
        read = [request.blocks[n:] for request, n in zip(requests, dropped)]
        table = torch.tensor([row + [0] * (self.columns - len(row)) for row in read], dtype=torch.int32)
        self.counts.zero_()
        self.lengths.zero_()
        used = len(requests)
        self.tables[:used] = table.to(self.device)
        stored = torch.tensor([request.computed - BLOCK * n for request, n in zip(requests, dropped)], dtype=torch.int32)
        self.lengths[:, :used] = stored.to(self.device)[:, None]
        self.counts[:used] = 1
        self.first[:used] = torch.tensor([request.computed for request in requests], dtype=torch.int32).to(self.device)
        by_block = self.positions[:, self.tables[:used].long()]  # [layers, used, columns, heads, block]
        self.column[:, :used] = by_block.transpose(2, 3).flatten(3)
        at = torch.tensor([(request.seed + request.computed) % ROWS for request in requests]).to(self.device)
        for bank, rows in ((self.bank_q, self.q), (self.bank_k, self.k), (self.bank_v, self.v)):
            rows[:, :used, 0] = bank[:, at]
        if self.graph is not None:
            self.graph.replay()
        else:
            self.recorded = self._step()
        self._note([request.blocks[request.computed // BLOCK] for request in requests],
                   [request.computed for request in requests])
        for request in requests:
            request.computed += 1
        return self.recorded

    def _note(self, blocks, positions):
        """Positions of new tokens, by block."""
        block, position = torch.tensor([blocks, positions]).to(self.device)
        self.positions[:, block, :, position % BLOCK] = position.to(torch.int32)[:, None, None]

    # Prompts.

    def write(self, request, count):
        """A chunk of a prompt is written into its slots, as an engine writes it. Where its schedule says so, what is
        stored is compacted."""
        first = request.computed
        slot = torch.arange(first, first + count, device=self.device)
        block = torch.tensor(request.blocks, device=self.device)[slot // BLOCK]
        for i, (k, v) in enumerate(self.pools):
            k[block, slot % BLOCK] = self._rows(self.bank_k, request, first, count)[i]
            v[block, slot % BLOCK] = self._rows(self.bank_v, request, first, count)[i]
        self._note([request.blocks[one // BLOCK] for one in range(first, first + count)], range(first, first + count))
        before = request.dropped()
        request.computed += count
        if request.schedule.compacts(request.computed):
            self._compact(request, before)

    def of_request(self, request, layer, dropped):
        """What a request stores in a layer behind `dropped` blocks; positions as a copy."""
        blocks = torch.tensor([request.blocks[dropped:]], dtype=torch.int32, device=self.device)
        held = self.positions[layer][blocks[0].long()].transpose(0, 1).flatten(1)[None].contiguous()
        lengths = torch.full((1, KV_HEADS), request.computed - dropped * BLOCK, dtype=torch.int32, device=self.device)
        return PagedLayer(*self.pools[layer], blocks, lengths, held)

    def _compact(self, request, before):
        number = lambda value: torch.tensor([value], dtype=torch.int32, device=self.device)
        full = request.computed // BLOCK * BLOCK - before * BLOCK
        begin = max(0, request.computed - WINDOW)
        for i in range(LAYERS):
            layer = self.of_request(request, i, before)
            candidates = layer._replace(lengths=torch.full_like(layer.lengths, full))
            q = self._rows(self.bank_q, request, begin, request.computed - begin)[i][None].contiguous()
            kept = request.schedule.kept_blocks * BLOCK
            slots, counts = self.operations.choose(i, candidates, q, number(begin), budgets=number(kept))
            assert counts.tolist() == [[kept] * KV_HEADS]
            self.check_choice(i, request, candidates, q, slots[:, :, :kept])
            self.operations.pack(candidates, slots, counts, number(full))
            blocks = layer.tables[0].long()
            self.positions[i, blocks] = layer.positions[0].unflatten(1, (-1, BLOCK)).transpose(0, 1)
        self.compacted += 1
        for column in range(request.dropped()):
            if request.blocks[column] >= 0:
                self._release([request.blocks[column]])
                request.blocks[column] = -1

    def check_choice(self, index, request, candidates, q, slots):
        """A test may look at what has been chosen before rows move."""

    # Blocks.

    def _release(self, blocks):
        for k, v in self.pools:
            k[blocks] = torch.nan
            v[blocks] = torch.nan
        self.positions[:, blocks] = -1
        self.free.extend(blocks)

    def _end(self, request):
        self._release(request.held())
        request.blocks, request.computed = [], 0

    def _has_blocks(self, request, tokens):
        """Whether the request has blocks for so many tokens; the newest of the others is preempted until it has."""
        needed = plan.blocks_for(tokens, BLOCK) - len(request.blocks)
        while len(self.free) < needed:
            newest = self.running[-1]
            if newest is request:
                return False
            self._preempt(newest)
        request.blocks += [self.free.popleft() for _ in range(needed)]
        return True

    def _preempt(self, request):
        self._end(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.preempted += 1

    def schedule(self, chunk=128):
        """One turn of the engine: a chunk of every prompt that is not stored yet, then a step of all others.
        Returns  the step's requests and what it made; None where no request could take a step."""
        while self.waiting and len(self.running) < self.batch:
            if len(self.free) <= plan.blocks_for(min(chunk, self.waiting[0].prompt), BLOCK):
                break
            self.running.append(self.waiting.popleft())
        ready = []
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for an earlier one
            behind = request.tokens() - request.computed  # tokens that are not stored
            if behind == 0:
                if not self._has_blocks(request, request.computed + 1):
                    self._preempt(request)
                    continue
                ready.append(request)
                continue
            end = request.computed + min(behind, chunk)
            following = request.schedule.next_compaction(request.computed)
            end = end if following is None else min(end, following)
            if not self._has_blocks(request, end):
                self._preempt(request)
                continue
            self.write(request, end - request.computed)
        ready = [request for request in ready if request in self.running]
        if not ready:
            return None
        made = self.decode(ready)
        return ready, made

    def finish(self, requests):
        """Requests whose answer is complete, or that are aborted, end."""
        for request in requests:
            request.answered += 1
            if request.answered >= min(request.answer, request.aborted_after):
                self._end(request)
                self.running.remove(request)

    def attention(self, request, layer, positions):
        """By definition, in double: out and log-sum-exp of the newest query over the bank's rows at `positions` [kv_heads, tokens]."""
        at, heads = (request.seed + positions.long()) % ROWS, torch.arange(KV_HEADS, device=self.device)[:, None]
        k, v = self.bank_k[layer][at, heads].double(), self.bank_v[layer][at, heads].double()
        query = self.bank_q[layer, (request.seed + request.computed - 1) % ROWS].double().view(KV_HEADS, -1, DIM)
        logits = query @ k.transpose(1, 2) / DIM**0.5
        return (logits.softmax(-1) @ v).view(Q_HEADS, DIM), logits.logsumexp(-1).view(Q_HEADS)
