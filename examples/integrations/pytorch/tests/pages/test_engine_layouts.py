"""What engines with tables by position need (vLLM): packing towards an end, keys in columns, requests that differ in a batch."""
import pytest
import torch
from paged_engine import (BLOCKS, BUDGET, DIM, GROUP, KV_HEADS, PAGE, PLACES, Q_HEADS, Engine, operations, tolerance)
from tessera_torch import PagedLayer


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_a_prompt_packed_towards_its_end_is_read_behind_free_pages(device, dtype, order):
    """Whole pages of each prompt compete, the tail stays: leading pages are free, and the table without them is a cache."""
    engine, kept = Engine(device, dtype, order), 64
    pages = operations(device, dtype, "snapkv", kept, window=16)
    prompts = [250, 96, 129]
    engine.append(pages, prompts)
    full = [n // PAGE * PAGE for n in prompts]
    first, ends = [n - 16 for n in prompts], engine.numbers(full)
    dropped = [(n - kept) // PAGE for n in full]
    for i, layer in enumerate(engine.layers):
        candidates = layer._replace(lengths=engine.numbers([[n] * KV_HEADS for n in full]))
        q = engine.rows(engine.q, i, first, [16] * 3)
        slots, counts = pages.choose(i, candidates, q, engine.numbers(first))
        assert counts.tolist() == [[kept] * KV_HEADS] * 3
        pages.pack(candidates, slots, counts, ends)
        for b, n in enumerate(full):
            for h in range(KV_HEADS):
                chosen = slots[b, h, :kept].long()
                assert torch.equal(engine.positions[i, b, h, n - kept:n].long(), chosen)
                for x, pool in ((engine.k, layer.k), (engine.v, layer.v)):
                    slot = torch.arange(n - kept, n, device=device)
                    rows = pool[engine.tables[b].long()[slot // PAGE], slot % PAGE, h]
                    assert torch.equal(rows, x[i, b, chosen, h])
        for b, n in enumerate(dropped):  # pages in front are nobody's
            for pool in (layer.k, layer.v):
                pool[engine.tables[b, :n].long()] = torch.nan
        # What a step reads: tables, positions and lengths without what lies in front.
        columns = torch.arange(BLOCKS, device=device) + engine.numbers(dropped)[:, None]
        slot = (torch.arange(BLOCKS * PAGE, device=device) + PAGE * engine.numbers(dropped)[:, None]).clamp(max=BLOCKS * PAGE - 1)
        behind = PagedLayer(
            layer.k, layer.v, engine.tables.gather(1, columns.clamp(max=BLOCKS - 1)),
            engine.numbers([[n - PAGE * d] * KV_HEADS for n, d in zip(prompts, dropped)]),
            engine.positions[i].gather(2, slot[:, None].expand(-1, KV_HEADS, -1)))
        newest = [n - 1 for n in prompts]
        out, lse = pages.attend(i, behind, engine.rows(engine.q, i, newest, [1] * 3), engine.numbers(newest))
        for b, n in enumerate(prompts):
            for head in range(Q_HEADS):
                positions = torch.cat([slots[b, head // GROUP, :kept].long(), torch.arange(full[b], n, device=device)])
                want, want_lse = engine.attention(i, b, head, positions, torch.tensor([n - 1], device=device))
                assert (out[b, :, head] - want).abs().max() < tolerance(device, dtype)
                assert (lse[b, :, head] - want_lse).abs().max() < tolerance(device, dtype)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_requests_of_a_batch_have_queries_budgets_and_tails_of_their_own(device, dtype):
    engine, window = Engine(device, dtype), 16
    prompts, budgets, tails = [250, 96, 129], [30, 200, 64], [16, 20, 48]
    pages = operations(device, dtype, "snapkv", BUDGET, window=window)
    engine.append(pages, prompts)
    counts, layer = [40, 5, 16], engine.layers[0]  # rows of the batch's one tensor
    first = [n - c for n, c in zip(prompts, counts)]
    packed = torch.cat([engine.q[0, b, f:f + c] for b, (f, c) in enumerate(zip(first, counts))])
    indptr = engine.numbers([0, 40, 45, 61])
    together = pages.choose(0, layer, packed, engine.numbers(first), indptr=indptr, tokens=window,
                            budgets=engine.numbers(budgets), tails=engine.numbers(tails))
    for b, budget in enumerate(budgets):
        taken = min(window, counts[b])
        alone = operations(device, dtype, "snapkv", budget, window=window)
        one = PagedLayer(layer.k, layer.v, layer.tables[b:b + 1], layer.lengths[b:b + 1], layer.positions[b:b + 1])
        start = prompts[b] - taken
        slots, count = alone.choose(0, one, engine.q[:1, b, start:start + taken].contiguous(), engine.numbers([start]),
                                    tails=engine.numbers([tails[b]]))
        assert torch.equal(count[0], together[1][b]) and count.tolist() == [[min(budget, prompts[b])] * KV_HEADS]
        for h in range(KV_HEADS):
            got = together[0][b, h, :int(count[0, h])]
            assert torch.equal(slots[0, h, :int(count[0, h])], got)
            newest = min(tails[b], budget)
            assert got[-newest:].tolist() == list(range(prompts[b] - newest, prompts[b]))


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_heads_that_compete_keep_whole_pages(device, dtype):
    """Every head's rows end where the tail begins, whole pages each: what a head keeps is a table of its own."""
    engine, pages = Engine(device, dtype), operations(device, dtype, "ada_snapkv", BUDGET, window=16)
    prompts = [250, 90, 129]
    engine.append(pages, prompts)
    full = [n // PAGE * PAGE for n in prompts]
    first = [n - 16 for n in prompts]
    for i, layer in enumerate(engine.layers):
        candidates = layer._replace(lengths=engine.numbers([[n] * KV_HEADS for n in full]))
        q = engine.rows(engine.q, i, first, [16] * 3)
        loose = pages.choose(i, candidates, q, engine.numbers(first))[1]
        slots, counts = pages.choose(i, candidates, q, engine.numbers(first), granularity=PAGE)
        assert (counts % PAGE == 0).all() and (counts >= 16).all()
        assert torch.equal(counts.sum(-1), loose.sum(-1) // PAGE * PAGE)  # the window of every head is one page
        pages.pack(candidates, slots, counts, engine.numbers(full))
        for b, n in enumerate(full):
            for h in range(KV_HEADS):
                count = int(counts[b, h])
                assert torch.equal(engine.positions[i, b, h, n - count:n], slots[b, h, :count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_in_columns_are_read_and_moved_where_they_lie(dtype):
    """vLLM's pages on the CPU: of each page and kv_head first the keys as [dim, page], then the values as [page, dim]."""
    made = []
    for columns in (False, True):
        engine, pages = Engine("cpu", dtype), operations("cpu", dtype)
        if columns:
            for i, layer in enumerate(engine.layers):
                keys = torch.zeros(layer.k.size(0), KV_HEADS, DIM, PAGE, dtype=dtype).permute(0, 3, 1, 2)
                assert keys.stride(3) == PAGE and keys.shape == layer.k.shape
                engine.layers[i] = layer._replace(k=keys)
        engine.append(pages, [250, 20, 129])
        engine.evict(pages, [16] * 3)
        newest = [n - 1 for n in engine.next]
        made.append([(layer.lengths.clone(), layer.positions.clone(),
                      *pages.attend(i, layer, engine.rows(engine.q, i, newest, [1] * 3), engine.numbers(newest)))
                     for i, layer in enumerate(engine.layers)])
    for plain, turned in zip(*made):
        assert torch.equal(plain[0], turned[0]) and torch.equal(plain[1], turned[1])
        for a, b in zip(plain[2:], turned[2:]):
            assert torch.allclose(a.double(), b.double(), atol=tolerance("cpu", dtype))


def test_what_requests_get_wrong_is_said():
    engine, pages = Engine("cpu", torch.float32), operations("cpu", torch.float32)
    engine.append(pages, [100, 50, 40])
    layer, first = engine.layers[0], engine.numbers([92, 42, 32])
    q = engine.rows(engine.q, 0, [92, 42, 32], [8] * 3)
    before = [x.clone() for x in layer[:5]]

    def refused(sentence, call, *arguments, **named):
        with pytest.raises(ValueError, match=sentence):
            call(*arguments, **named)
        assert all(torch.equal(a, b) for a, b in zip(before, layer))

    refused("^budgets of sequence 1 is 0; expected at least 1; ", pages.choose, 0, layer, q, first, budgets=engine.numbers([5, 0, 5]))
    refused("^tails of sequence 2 is -1; expected at least 0; ", pages.choose, 0, layer, q, first, tails=engine.numbers([5, 0, -1]))
    refused(r"^shape of budgets is \[2\]; expected \[3\]; ", pages.choose, 0, layer, q, first, budgets=engine.numbers([5, 5]))
    refused("^granularity is 0; expected at least 1; ", pages.choose, 0, layer, q, first, granularity=0)
    refused("^q with indptr is ", pages.choose, 0, layer, q[0], first, indptr=first)
    refused("^indptr is .*; expected numbers from 0 to the rows, which are 8, at least 1 row apart; ", pages.choose, 0, layer, q[0],
            first, indptr=engine.numbers([0, 3, 3, 8]), tokens=4)
    slots, counts = pages.choose(0, layer, q, first)
    refused(r"^end of packed rows \(sequence 0, kv_head 0\) is 90; expected at least 100, behind every chosen slot; ", pages.pack, layer,
            slots, counts, engine.numbers([90, 50, 40]))
    refused("^tokens of sequence 1, kv_head 0 is 400; expected at most 320", pages.pack, layer, slots, counts,
            engine.numbers([100, 400, 40]))
    with pytest.raises(ValueError, match="^dense_layers is 1; expected 0; "):
        operations("cpu", torch.float32, dense_layers=1)
