"""A small engine of the tests: pools, tables and pages, the model's rows beside them, and attention by definition."""
import torch
from tessera_torch import PagedLayer, PageOperations

PLACES = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
if torch.cuda.is_available():
    PLACES.append(("cuda", torch.bfloat16))
LAYERS, Q_HEADS, KV_HEADS, DIM, PAGE, PAGES, BLOCKS = 2, 8, 2, 64, 16, 60, 20
GROUP, WINDOW, BUDGET = Q_HEADS // KV_HEADS, 32, 48
LONGEST = BLOCKS * PAGE


class Engine:
    """Pools, tables and who owns a page; and beside them the model's rows by position, to compare with."""

    def __init__(self, device, dtype, order="nhd", batch=3):
        self.device, self.batch = device, batch
        random = torch.Generator().manual_seed(4)
        draw = lambda heads: torch.randn(LAYERS, batch, LONGEST, heads, DIM, generator=random).to(device, dtype)
        self.q, self.k, self.v = draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS)
        if order == "nhd":  # as vLLM has it
            pool = torch.zeros(LAYERS, 2, PAGES, PAGE, KV_HEADS, DIM, device=device, dtype=dtype)
            pools = [(one[0], one[1]) for one in pool]
        else:  # as FlashInfer has it
            pool = torch.zeros(LAYERS, PAGES, 2, KV_HEADS, PAGE, DIM, device=device, dtype=dtype)
            pools = [(one[:, 0].transpose(1, 2), one[:, 1].transpose(1, 2)) for one in pool]
        self.unused = [i * 7 % PAGES for i in range(PAGES)]
        self.tables = self.numbers(torch.full((batch, BLOCKS), -1))
        self.held = self.numbers([0] * batch)
        self.lengths = self.numbers(torch.zeros(LAYERS, batch, KV_HEADS))
        self.positions = self.numbers(torch.full((LAYERS, batch, KV_HEADS, LONGEST), -1))
        self.layers = [PagedLayer(k, v, self.tables, self.lengths[i], self.positions[i]) for i, (k, v) in enumerate(pools)]
        self.next = [0] * batch

    def numbers(self, values):
        return torch.as_tensor(values).to(self.device, torch.int32)

    def rows(self, x, index, first, count):
        """Of each sequence, tokens [first, first + count) of a layer, padded to the most."""
        rows = torch.zeros(self.batch, max(count), *x.shape[3:], device=x.device, dtype=x.dtype)
        for b in range(self.batch):
            rows[b, :count[b]] = x[index, b, first[b]:first[b] + count[b]]
        return rows

    def append(self, pages, count):
        for b in range(self.batch):
            longest = int(self.lengths[:, b].max()) + count[b]
            while int(self.held[b]) * PAGE < longest:
                self.tables[b, int(self.held[b])] = self.unused.pop()
                self.held[b] += 1
        for i, layer in enumerate(self.layers):
            pages.append(layer, self.rows(self.k, i, self.next, count), self.rows(self.v, i, self.next, count),
                         self.numbers(self.next), self.numbers(count))
        self.next = [a + b for a, b in zip(self.next, count)]

    def evict(self, pages, seen, room=0):
        """Every layer keeps what the method chooses by the newest `seen` queries; returns how many pages are free again."""
        first = [a - b for a, b in zip(self.next, seen)]
        for i, layer in enumerate(self.layers):
            slots, counts = pages.choose(i, layer, self.rows(self.q, i, first, seen), self.numbers(first), self.numbers(seen))
            pages.pack(layer, slots, counts)
            assert torch.equal(layer.lengths, counts)
        freed, count = pages.free(self.tables, self.lengths, self.held, PAGE, room)
        back = [page for row, n in zip(freed.tolist(), count.tolist()) for page in row[:n]]
        self.unused += back
        return len(back)

    def kept(self, i, b, h):
        return self.positions[i, b, h, :int(self.lengths[i, b, h])].long()

    def attention(self, i, b, head, positions, queries):
        """By definition, in double: out and log-sum-exp of queries at `queries` over the model's rows at `positions`."""
        h = head // GROUP
        k, v = self.k[i, b, positions, h].double(), self.v[i, b, positions, h].double()
        logits = self.q[i, b, queries, head].double() @ k.T / DIM**0.5
        logits = logits.masked_fill(positions[None] > queries[:, None], -torch.inf)
        return logits.softmax(-1) @ v, logits.logsumexp(-1)

    def step(self, pages, count=1):
        """A step over what is left; the largest difference from attention by definition over the positions that are left."""
        newest = list(self.next)
        self.append(pages, [count] * self.batch)
        worst = 0.0
        for i, layer in enumerate(self.layers):
            q = self.rows(self.q, i, newest, [count] * self.batch)
            out, lse = pages.attend(i, layer, q, self.numbers(newest))
            assert out.dtype == q.dtype and lse.dtype == torch.float32
            for b in range(self.batch):
                queries = torch.arange(newest[b], newest[b] + count, device=self.device)
                for head in range(Q_HEADS):
                    want, want_lse = self.attention(i, b, head, self.kept(i, b, head // GROUP), queries)
                    worst = max(worst, float((out[b, :, head] - want).abs().max()),
                                float((lse[b, :, head] - want_lse).abs().max()))
        return worst


def operations(device, dtype, method="ada_snapkv", budget=BUDGET, **more):
    return PageOperations(method, layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=dtype, device=device,
                          budget=budget, **more)


def tolerance(device, dtype):
    return 1e-5 if dtype == torch.float32 else 2e-2  # outputs are rounded to bf16
