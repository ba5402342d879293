"""A second stage over an engine's pages: an index of keys by page, what a step reads by it, and attention over that."""
import pytest
import torch
from paged_engine import BLOCKS, DIM, GROUP, KV_HEADS, LAYERS, PAGE, PAGES, PLACES, Q_HEADS, Engine, operations, tolerance
from tessera_torch import PagedLayer

BUDGET = 128  # a step attends half: four pages
ORDERS = ["nhd", "hnd", "columns"]
CASES = [(device, dtype, order) for device, dtype in PLACES for order in ORDERS if device == "cpu" or order != "columns"]


def engine_of(device, dtype, order="nhd"):
    """Pages of nobody are NaN; "columns": keys as [dim, page], as vLLM's pages on the CPU have them."""
    engine = Engine(device, dtype, "nhd" if order == "columns" else order)
    for i, layer in enumerate(engine.layers):
        if order == "columns":
            keys = torch.empty(layer.k.size(0), KV_HEADS, DIM, PAGE, dtype=dtype).permute(0, 3, 1, 2)
            engine.layers[i] = layer = layer._replace(k=keys)
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    return engine


def bounds(engine, i, b, h, query, n, page):
    """Quest's score of each page by definition, in double: of every channel the larger product, summed over the group."""
    k = engine.k[i, b, :n, h].double()
    scores = []
    for first in range(0, n, page):
        low, high = k[first:first + page].amin(0), k[first:first + page].amax(0)
        q = engine.q[i, b, query, h * GROUP:(h + 1) * GROUP].double()
        scores.append(torch.maximum(q * low, q * high).sum())
    return torch.stack(scores)


def check_step(engine, pages, indices, page=PAGE, read=BUDGET // 2):
    """Reads with each sequence's newest query: Quest's pages by definition, and attention over exactly them."""
    newest = [max(0, n - 1) for n in engine.next]
    for i, layer in enumerate(engine.layers):
        q = engine.rows(engine.q, i, newest, [1] * engine.batch)
        slots, counts = pages.choose_to_read(i, layer, indices[i], q, engine.numbers(newest))
        out, lse = pages.attend(i, layer, q, engine.numbers(newest), slots, counts)
        for b, n in enumerate(engine.next):
            for h in range(KV_HEADS):
                chosen = slots[b, h, :int(counts[b, h])].long().tolist()
                if n <= read:
                    assert chosen == list(range(n))
                else:
                    taken = sorted({slot // page for slot in chosen})
                    assert chosen == [slot for p in taken for slot in range(p * page, min(n, (p + 1) * page))]
                    last = (n - 1) // page
                    assert len(taken) == -(-read // page) and taken[-1] == last
                    scores = bounds(engine, i, b, h, newest[b], n, page)
                    left = [float(scores[p]) for p in range(last) if p not in taken]
                    best = [float(scores[p]) for p in taken[:-1]]
                    assert not left or not best or min(best) >= max(left) - 1e-5 * abs(max(left))
                if n == 0:
                    continue
                positions = torch.tensor(chosen, device=engine.device)
                for head in range(h * GROUP, (h + 1) * GROUP):
                    want, want_lse = engine.attention(i, b, head, positions, torch.tensor([newest[b]], device=engine.device))
                    assert (out[b, :, head] - want).abs().max() < tolerance(engine.device, out.dtype)
                    assert (lse[b, :, head] - want_lse).abs().max() < tolerance(engine.device, out.dtype)


@pytest.mark.parametrize("page", [16, 4])
@pytest.mark.parametrize("device, dtype, order", CASES, ids=str)
def test_steps_read_the_pages_that_quest_reads(device, dtype, order, page):
    """Chunks, single tokens, a sequence that is empty at first: the index follows what the engine has written."""
    engine, pages = engine_of(device, dtype, order), operations(device, dtype, "quest", BUDGET, page=page)
    assert pages.index_page == page
    indices = [pages.empty_index(layer).fill_(torch.nan) for layer in engine.layers]
    for count in ([250, 0, 33], [1, 1, 70], [3, 64, 1], [1, 1, 1], [8, 0, 1]):
        first = engine.numbers(engine.next)
        engine.append(pages, count)
        for layer, index in zip(engine.layers, indices):
            pages.index_pages(layer, index, first, max(count))
        check_step(engine, pages, indices, page)
    for layer, index in zip(engine.layers, indices):  # the same as made at once
        whole = pages.empty_index(layer).fill_(torch.nan)
        pages.index_pages(layer, whole)
        assert torch.equal(whole.view(torch.uint8), index.view(torch.uint8))
        assert whole.shape == (PAGES * (PAGE // page), KV_HEADS, 2, DIM)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_sequences_share_the_index_of_a_common_prefix(device, dtype):
    """Four whole pages are written and indexed once; rows of a batch change places, and positions may be left out."""
    engine, pages = engine_of(device, dtype), operations(device, dtype, "quest", BUDGET)
    for x in (engine.k, engine.v):
        x[:, 1:, :64] = x[:, :1, :64]
    engine.append(pages, [100, 0, 0])
    shared = engine.tables[0, :4].clone()
    for b in (1, 2):  # as a prefix cache hands pages out
        engine.tables[b, :4] = shared
        engine.held[b], engine.next[b] = 4, 64
        engine.lengths[:, b] = 64
        engine.positions[:, b, :, :64] = torch.arange(64, device=device)
    first = engine.numbers([0, 64, 64])
    engine.append(pages, [0, 90, 40])
    indices = [pages.empty_index(layer).fill_(torch.nan) for layer in engine.layers]
    for layer, index in zip(engine.layers, indices):
        pages.index_pages(layer, index, first)
    check_step(engine, pages, indices)
    order, newest = torch.tensor([2, 0, 1], device=device), engine.numbers([n - 1 for n in engine.next])
    q = engine.rows(engine.q, 0, newest.tolist(), [1] * 3)
    straight = pages.choose_to_read(0, engine.layers[0], indices[0], q, newest)
    layer = engine.layers[0]
    turned = PagedLayer(layer.k, layer.v, layer.tables[order].contiguous(), layer.lengths[order].contiguous())
    for a, b in zip(straight, pages.choose_to_read(0, turned, indices[0], q[order].contiguous(), newest[order].contiguous())):
        assert torch.equal(a[order], b)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_heads_with_tables_of_their_own(device, dtype):
    """Pages of one head: the index has a row for each of them, and the choice is that of pages of all heads."""
    engine, pages = engine_of(device, dtype), operations(device, dtype, "quest", BUDGET)
    engine.append(pages, [250, 90, 129])
    layer, newest = engine.layers[0], engine.numbers([249, 89, 128])
    q = engine.rows(engine.q, 0, newest.tolist(), [1] * 3)
    index = pages.empty_index(layer).fill_(torch.nan)
    pages.index_pages(layer, index)
    want = pages.choose_to_read(0, layer, index, q, newest)
    split = [x.transpose(1, 2).reshape(PAGES * KV_HEADS, PAGE, 1, DIM).contiguous() for x in layer[:2]]
    heads = torch.arange(KV_HEADS, device=device, dtype=torch.int32)[None, :, None]
    own = PagedLayer(*split, (layer.tables[:, None] * KV_HEADS + heads).contiguous(), layer.lengths)
    by_head = pages.empty_index(own).fill_(torch.nan)
    pages.index_pages(own, by_head)
    assert torch.equal(by_head.reshape(index.shape).view(torch.uint8), index.view(torch.uint8))
    got = pages.choose_to_read(0, own, by_head, q, newest)
    assert torch.equal(got[1], want[1])
    for b in range(3):
        for h in range(KV_HEADS):
            assert torch.equal(got[0][b, h, :int(got[1][b, h])], want[0][b, h, :int(got[1][b, h])])


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_drafts_write_over_rejected_ones_and_steps_of_several_tokens(device, dtype):
    engine, pages = engine_of(device, dtype), operations(device, dtype, "quest", BUDGET)
    engine.append(pages, [250, 100, 40])
    indices = [pages.empty_index(layer) for layer in engine.layers]
    for layer, index in zip(engine.layers, indices):
        pages.index_pages(layer, index)
    first = list(engine.next)
    right = (engine.k.clone(), engine.v.clone())
    for b, n in enumerate(first):  # keys so large that their pages would be chosen
        engine.k[:, b, n:n + 4] = 50
    engine.append(pages, [4] * 3)
    for layer, index in zip(engine.layers, indices):
        pages.index_pages(layer, index, engine.numbers(first), 4)
    engine.k, engine.v = right
    engine.lengths -= 4
    engine.next = list(first)
    engine.append(pages, [3] * 3)
    for layer, index in zip(engine.layers, indices):
        pages.index_pages(layer, index, engine.numbers(first), 3)
    check_step(engine, pages, indices)
    for i, layer in enumerate(engine.layers):
        q = engine.rows(engine.q, i, first, [3] * 3)
        slots, counts = pages.choose_to_read(i, layer, indices[i], q, engine.numbers(first))
        out, _ = pages.attend(i, layer, q, engine.numbers(first), slots, counts)
        for b, n in enumerate(first):
            for head in range(Q_HEADS):
                chosen = slots[b, head // GROUP, :int(counts[b, head // GROUP])].long()
                assert set(range(n, n + 3)) <= set(chosen.tolist())  # a step's own tokens are read
                want, _ = engine.attention(i, b, head, chosen, torch.arange(n, n + 3, device=device))
                assert (out[b, :, head] - want).abs().max() < tolerance(device, dtype)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_requests_may_read_less_than_the_method(device, dtype):
    engine, pages = engine_of(device, dtype), operations(device, dtype, "quest", BUDGET)
    engine.append(pages, [250, 129, 300])
    layer, newest = engine.layers[0], engine.numbers([249, 128, 299])
    index = pages.empty_index(layer)
    pages.index_pages(layer, index)
    q = engine.rows(engine.q, 0, newest.tolist(), [1] * 3)
    reads = [16, 64, 33]
    slots, counts = pages.choose_to_read(0, layer, index, q, newest, reads=engine.numbers(reads))
    for b, read in enumerate(reads):
        alone = operations(device, dtype, "quest", 2 * read)
        want, want_counts = alone.choose_to_read(0, layer, index, q, newest)
        assert torch.equal(counts[b], want_counts[b])
        for h in range(KV_HEADS):
            assert torch.equal(slots[b, h, :int(counts[b, h])], want[b, h, :int(counts[b, h])])


@pytest.mark.parametrize("method, more", [("hsa", {"page": 8}), ("rocketkv", {"page": 4, "prompt": 250, "max_new": 16})])
@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_methods_that_choose_tokens_by_pages(device, dtype, method, more):
    """RocketKV's first stage packs each layer, after which every slot is indexed anew; then steps read half of the budget."""
    engine = engine_of(device, dtype)
    pages = operations(device, dtype, method, 64, **more)
    engine.append(pages, [250, 250, 250])
    if method == "rocketkv":
        engine.evict(pages, [32] * 3)
        assert int(engine.lengths.max()) < 250
    indices = [pages.empty_index(layer) for layer in engine.layers]
    for layer, index in zip(engine.layers, indices):
        pages.index_pages(layer, index)
    first = list(engine.next)
    engine.append(pages, [1] * 3)
    for i, (layer, index) in enumerate(zip(engine.layers, indices)):
        pages.index_pages(layer, index, layer.lengths[:, 0] - 1, 1)
        q = engine.rows(engine.q, i, first, [1] * 3)
        slots, counts = pages.choose_to_read(i, layer, index, q, engine.numbers(first))
        assert counts.tolist() == [[32] * KV_HEADS] * 3
        out, _ = pages.attend(i, layer, q, engine.numbers(first), slots, counts)
        for b in range(3):
            for head in range(Q_HEADS):
                chosen = slots[b, head // GROUP, :32].long()
                positions = engine.positions[i, b, head // GROUP][chosen].long()
                assert (chosen.diff() > 0).all()
                want, _ = engine.attention(i, b, head, positions, torch.tensor([first[b]], device=device))
                assert (out[b, :, head] - want).abs().max() < tolerance(device, dtype)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_requests_of_one_call_have_plans_of_their_own(device, dtype):
    """Three prompts and three budgets of RocketKV in one batch: what stays, and what steps read, is what each has alone."""
    more, prompts, budgets = {"page": 8, "max_new": 16, "newest": 0}, [250, 60, 300], [64, 32, 16]
    engine, pages = engine_of(device, dtype), operations(device, dtype, "rocketkv", 64, **more)
    engine.append(pages, prompts)
    plans = [pages.plan(prompt, budget) for prompt, budget in zip(prompts, budgets)]
    alone = [operations(device, dtype, "rocketkv", budget, prompt=prompt, window=16, **more)
             for prompt, budget in zip(prompts, budgets)]
    assert plans == [one.plan(prompt) for one, prompt in zip(alone, prompts)]
    assert [one.page for one in plans] == [8] * 3 and [one.read for one in plans] == [32, 16, 8]
    assert len({one.channels for one in plans}) == 3 or len({one.kept for one in plans}) == 3
    pages = operations(device, dtype, "rocketkv", 64, window=16, **more)
    first, numbers = [prompt - 16 for prompt in prompts], engine.numbers
    channels = [64, 9, 31]  # of a plan in which keys are estimated by fewer of them
    layer, newest = engine.layers[0], numbers([prompt - 1 for prompt in prompts])
    q, step = engine.rows(engine.q, 0, first, [16] * 3), engine.rows(engine.q, 0, newest.tolist(), [1] * 3)
    kept = pages.choose(0, layer, q, numbers(first), budgets=numbers([one.kept for one in plans]))
    index = pages.empty_index(layer)
    pages.index_pages(layer, index)
    read = pages.choose_to_read(0, layer, index, step, newest, numbers([one.read for one in plans]), numbers(channels))
    for b, one in enumerate(alone):
        few = operations(device, dtype, "rocketkv", budgets[b], prompt=prompts[b], channels=channels[b], **more)
        for (slots, counts), (want, want_counts) in [
                (kept, one.choose(0, layer, q, numbers(first))), (read, few.choose_to_read(0, layer, index, step, newest))]:
            assert torch.equal(counts[b], want_counts[b])
            for h in range(KV_HEADS):
                assert torch.equal(slots[b, h, :int(counts[b, h])], want[b, h, :int(counts[b, h])])
        assert kept[1][b].tolist() == [plans[b].kept] * KV_HEADS and read[1][b].tolist() == [plans[b].read] * KV_HEADS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_a_cuda_graph_of_a_step_follows_tables_and_lengths(order):
    engine, pages = engine_of("cuda", torch.bfloat16, order), operations("cuda", torch.bfloat16, "quest", BUDGET)
    engine.append(pages, [250, 20, 129])
    layer = engine.layers[0]
    index = pages.empty_index(layer)
    first, newest = engine.numbers([0, 0, 0]), engine.numbers([249, 19, 128])
    q = engine.rows(engine.q, 0, newest.tolist(), [1] * 3)

    def step():
        pages.index_pages(layer, index, first, 1)
        slots, counts = pages.choose_to_read(0, layer, index, q, newest)
        return slots, counts, *pages.attend(0, layer, q, newest, slots, counts)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for _ in range(4):
        first.copy_(engine.numbers(engine.next))
        engine.append(pages, [7, 30, 1])
        newest.copy_(engine.numbers([n - 1 for n in engine.next]))
        engine.tables[1], engine.tables[2] = engine.tables[2].clone(), engine.tables[1].clone()  # rows change places
        for x in (engine.lengths, engine.positions):
            x[:, 1], x[:, 2] = x[:, 2].clone(), x[:, 1].clone()
        for x in (first, newest):
            x[1], x[2] = x[2].clone(), x[1].clone()
        graph.replay()
        got = [x.clone() for x in recorded]
        for a, b in zip(got, step()):
            assert torch.equal(a, b)
        engine.tables[1], engine.tables[2] = engine.tables[2].clone(), engine.tables[1].clone()
        for x in (engine.lengths, engine.positions):
            x[:, 1], x[:, 2] = x[:, 2].clone(), x[:, 1].clone()


def test_what_cannot_be_read_by_pages_is_said():
    engine = engine_of("cpu", torch.float32)
    quest = operations("cpu", torch.float32, "quest", BUDGET)
    engine.append(quest, [100, 50, 40])
    layer, newest = engine.layers[0], engine.numbers([99, 49, 39])
    q = engine.rows(engine.q, 0, [99, 49, 39], [1] * 3)
    index = quest.empty_index(layer)
    quest.index_pages(layer, index)
    for method, more in (("snapkv", {}), ("sparq", {}), ("rocketkv_mt", {"page": 8})):
        with pytest.raises(ValueError, match="^method is .*; expected quest, hsa or rocketkv"):
            operations("cpu", torch.float32, method, BUDGET, **more).index_pages(layer, index)
    with pytest.raises(ValueError, match="^page is 0, by the budget; expected tokens of a page of the index; pass page=16"):
        operations("cpu", torch.float32, "hsa", BUDGET).empty_index(layer)
    with pytest.raises(ValueError, match="^page of the method is 5; expected a divisor of the engine's page, which is 16; "):
        operations("cpu", torch.float32, "quest", BUDGET, page=5).index_pages(layer, index)
    with pytest.raises(ValueError, match=r"^shape of the index is \[59, 2, 2, 64\]; expected \[60, 2, 2, 64\], "):
        quest.choose_to_read(0, layer, index[1:], q, newest)
    with pytest.raises(ValueError, match="^dtype and device of the index is Double, cpu; expected Float, cpu; "):
        quest.index_pages(layer, index.double())
    with pytest.raises(ValueError, match="^tokens of q is 9; expected 1 to 8; "):
        quest.choose_to_read(0, layer, index, q.expand(3, 9, Q_HEADS, DIM), newest)
    with pytest.raises(ValueError, match="^tokens to read of sequence 1 is 65; expected 1 to 64; "):
        quest.choose_to_read(0, layer, index, q, newest, reads=engine.numbers([1, 65, 1]))
    with pytest.raises(ValueError, match="^channels of sequence 2 is 65; expected 1 to 64; "):
        quest.choose_to_read(0, layer, index, q, newest, channels=engine.numbers([1, 64, 65]))
    with pytest.raises(ValueError, match="^budget is 15; expected 16 to "):
        quest.plan(100, 15)
    with pytest.raises(ValueError, match="^max_new is 8; expected a number that leaves room for the window of 32 tokens: with a prompt of 40 "):
        operations("cpu", torch.float32, "rocketkv", BUDGET, max_new=8).plan(40, 16)
    with pytest.raises(ValueError, match="^first new slot of sequence 2 is -1; expected at least 0; "):
        quest.index_pages(layer, index, engine.numbers([0, 0, -1]))
    with pytest.raises(ValueError, match="^positions is None; expected a position of every slot; "):
        snapkv = operations("cpu", torch.float32, "snapkv", 32, window=8)
        slots, counts = snapkv.choose(0, layer, q, newest)
        snapkv.pack(layer._replace(positions=None), slots, counts)
