"""A method over pages that an engine owns, on the CPU and on a GPU: against plain PyTorch."""
import pytest
import torch
from paged_engine import (BLOCKS, BUDGET, DIM, GROUP, KV_HEADS, LAYERS, LONGEST, PAGE, PAGES, PLACES, Q_HEADS, WINDOW, Engine, operations,
                          tolerance)
from tessera_torch import PagedLayer, PageOperations, build


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_two_evictions_and_steps_between(device, dtype, order):
    """The ladder's rungs 9 and 10: what is left is attended, pages come back, positions stay true."""
    engine, pages = Engine(device, dtype, order), operations(device, dtype)
    engine.append(pages, [250, 20, 129])
    seen = [WINDOW, 20, WINDOW]  # the second prompt is shorter than the window
    for _ in range(2):
        taken = PAGES - len(engine.unused)
        assert 0 < engine.evict(pages, seen) < taken
        assert len(set(engine.unused)) == len(engine.unused) == PAGES - int(engine.held.sum())
        for b in range(3):
            longest = int(engine.lengths[:, b].max())
            assert int(engine.held[b]) == -(-longest // PAGE)
        for i in range(LAYERS):
            total = engine.lengths[i].sum(-1).tolist()
            assert all(one <= KV_HEADS * BUDGET for one in total)
            for b in range(3):
                for h in range(KV_HEADS):
                    kept = engine.kept(i, b, h)
                    assert (kept.diff() > 0).all() and kept[-seen[b]:].tolist() == list(
                        range(engine.next[b] - seen[b], engine.next[b]))  # what the window has seen stays
        assert any(len(set(row)) > 1 for row in engine.lengths.flatten(0, 1).tolist())  # heads compete
        worst = max(engine.step(pages, count) for count in [1] * 30 + [3])
        assert worst < tolerance(device, dtype)
        seen = [WINDOW] * 3  # the second eviction goes by the steps' queries


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_packed_rows_of_steps_of_different_lengths(device, dtype):
    engine, pages = Engine(device, dtype), operations(device, dtype)
    engine.append(pages, [100, 20, 60])
    for counts in ([1, 4, 2], [3, 0, 8]):
        first = list(engine.next)
        engine.append(pages, counts)
        indptr = engine.numbers([0, counts[0], counts[0] + counts[1], sum(counts)])
        for i, layer in enumerate(engine.layers):
            q = torch.cat([engine.q[i, b, first[b]:first[b] + counts[b]] for b in range(3)])
            out, lse = pages.attend(i, layer, q, engine.numbers(first), indptr=indptr, tokens=max(counts))
            for b, begin in enumerate(indptr.tolist()[:-1]):
                queries, rows = torch.arange(first[b], first[b] + counts[b], device=device), slice(begin, begin + counts[b])
                for head in range(Q_HEADS):
                    want, want_lse = engine.attention(i, b, head, engine.kept(i, b, head // GROUP), queries)
                    assert torch.allclose(out[rows, head].double(), want, atol=tolerance(device, dtype))
                    assert torch.allclose(lse[rows, head].double(), want_lse, atol=tolerance(device, dtype))
    with pytest.raises(ValueError, match="^q with indptr is "):
        pages.attend(0, engine.layers[0], q[None], engine.numbers(first), indptr=indptr)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_snapkv_keeps_what_snapkv_says(device, dtype):
    """Against SnapKV written in PyTorch: attention of the window's queries, summed, max-pooled, the best ones and the window."""
    engine, window, pool, budget = Engine(device, dtype), 16, 7, 40
    pages = operations(device, dtype, "snapkv", budget, window=window, pool=pool)
    count = [200, 90, 33]
    engine.append(pages, count)
    first = [n - window for n in count]
    for i, layer in enumerate(engine.layers):
        q = engine.rows(engine.q, i, first, [window] * 3)
        slots, counts = pages.choose(i, layer, q, engine.numbers(first))
        for b, n in enumerate(count):
            for h in range(KV_HEADS):
                queries, positions = torch.arange(n - window, n), torch.arange(n)
                k = engine.k[i, b, :n, h].double()
                scores = torch.zeros(n - window, dtype=torch.double, device=device)
                for head in range(h * GROUP, (h + 1) * GROUP):
                    logits = engine.q[i, b, n - window:n, head].double() @ k.T / DIM**0.5
                    mask = (positions[None] > queries[:, None]).to(device)
                    scores += logits.masked_fill(mask, -torch.inf).softmax(-1)[:, :n - window].sum(0)
                pooled = torch.nn.functional.max_pool1d(scores[None], pool, 1, pool // 2)[0]
                got = slots[b, h, :int(counts[b, h])].long()
                assert len(got) == min(n, budget)
                if n <= budget:
                    assert got.tolist() == list(range(n))
                    continue
                assert got[-window:].tolist() == list(range(n - window, n))
                chosen, left = pooled[got[:-window]], pooled.clone()
                left[got[:-window]] = -torch.inf
                assert chosen.min() >= left.max() * (1 - (1e-5 if dtype == torch.float32 else 1e-2))


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_a_choice_may_be_read_and_nothing_dropped(device, dtype):
    """Attention over chosen slots is attention over these positions; pools, lengths and positions stay as they were."""
    engine, pages = Engine(device, dtype), operations(device, dtype, "snapkv", 40, window=16)
    engine.append(pages, [200, 90, 33])
    newest = [n - 1 for n in engine.next]
    for i, layer in enumerate(engine.layers):
        before = [x.clone() for x in layer[:5]]
        q = engine.rows(engine.q, i, newest, [1] * 3)
        slots, counts = pages.choose(i, layer, q, engine.numbers(newest))
        out, lse = pages.attend(i, layer, q, engine.numbers(newest), slots, counts)
        assert all(torch.equal(a, b) for a, b in zip(before, layer))
        for b in range(3):
            for head in range(Q_HEADS):
                positions = slots[b, head // GROUP, :int(counts[b, head // GROUP])].long()
                want, want_lse = engine.attention(i, b, head, positions, torch.tensor([newest[b]], device=device))
                assert (out[b, :, head] - want).abs().max() < tolerance(device, dtype)
                assert (lse[b, :, head] - want_lse).abs().max() < tolerance(device, dtype)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_heads_with_tables_of_their_own_free_pages_of_their_own(device, dtype):
    """Pages of one head, as TANGRAM has them: heads of unequal length give back unequal numbers."""
    engine, pages = Engine(device, dtype, batch=1), operations(device, dtype)
    count, pool = 200, torch.zeros(2, PAGES, PAGE, 1, DIM, device=device, dtype=dtype)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:2 * BLOCKS].to(device, torch.int32)
    layer = PagedLayer(pool[0], pool[1], order.reshape(1, KV_HEADS, BLOCKS), engine.lengths[0], engine.positions[0])
    pages.append(layer, engine.k[0, :, :count], engine.v[0, :, :count], engine.numbers([0]))
    first = engine.numbers([count - WINDOW])
    pages.pack(layer, *pages.choose(0, layer, engine.q[0, :, count - WINDOW:count], first))
    held = engine.numbers([13, 13])
    freed, freed_count = pages.free(layer.tables, engine.lengths[:1], held, PAGE)
    lengths = engine.lengths[0, 0].tolist()
    assert lengths[0] != lengths[1]
    for h, length in enumerate(lengths):
        stay = -(-length // PAGE)
        assert int(held[h]) == stay and int(freed_count[h]) == 13 - stay
        assert freed[h, :13 - stay].tolist() == layer.tables[0, h, stay:13].tolist()
    query = torch.tensor([count - 1], device=device)
    out, _ = pages.attend(0, layer, engine.q[0, :, count - 1:count], query.int())
    for head in range(Q_HEADS):
        want, _ = engine.attention(0, 0, head, engine.kept(0, 0, head // GROUP), query)
        assert (out[0, :, head] - want).abs().max() < tolerance(device, dtype)


def test_contiguous_memory_is_a_pool_of_one_page_a_sequence():
    engine, pages = Engine("cpu", torch.float32), operations("cpu", torch.float32, "snapkv", 40, window=16)
    paged, plain = engine.layers[0], torch.zeros(2, 3, LONGEST, KV_HEADS, DIM)
    flat = PagedLayer(plain[0], plain[1], torch.arange(3, dtype=torch.int32)[:, None], engine.numbers(torch.zeros(3, 2)),
                      engine.numbers(torch.zeros(3, 2, LONGEST)))
    engine.append(pages, [200, 90, 33])
    first, window = [n - 16 for n in engine.next], [16] * 3
    pages.append(flat, engine.rows(engine.k, 0, [0] * 3, engine.next), engine.rows(engine.v, 0, [0] * 3, engine.next),
                 engine.numbers([0] * 3), engine.numbers(engine.next))
    made = []
    for layer in (paged, flat):
        q = engine.rows(engine.q, 0, first, window)
        pages.pack(layer, *pages.choose(0, layer, q, engine.numbers(first)))
        made.append((layer.lengths.clone(), *pages.attend(0, layer, q[:, -1:], engine.numbers([n - 1 for n in engine.next]))))
    assert all(torch.equal(a, b) for a, b in zip(*made))


def test_windows_soft_cap_and_sink_logits():
    engine = Engine("cpu", torch.float32)
    sinks = torch.randn(LAYERS, Q_HEADS, generator=torch.Generator().manual_seed(3))
    pages = operations("cpu", torch.float32, "full", None, sliding_window=24, sliding_layers=[1], scale=0.2, softcap=3.0,
                       sink_logits=sinks)
    engine.append(pages, [100, 50, 10])
    newest = [n - 1 for n in engine.next]
    for i, layer in enumerate(engine.layers):
        q = engine.rows(engine.q, i, newest, [1] * 3)
        out, _ = pages.attend(i, layer, q, engine.numbers(newest))
        for b, n in enumerate(engine.next):
            begin = max(0, n - 24) if i == 1 else 0
            for head in range(Q_HEADS):
                k, v = (x[i, b, begin:n, head // GROUP].double() for x in (engine.k, engine.v))
                logits = 3 * torch.tanh(q[b, 0, head].double() @ k.T * 0.2 / 3)
                weights = torch.cat([logits, sinks[i, head].double()[None]]).softmax(0)[:-1]
                assert (out[b, 0, head] - weights @ v).abs().max() < 1e-5


def test_operators_say_their_shapes_and_what_they_change():
    engine, pages = Engine("cpu", torch.float32), operations("cpu", torch.float32)
    engine.append(pages, [100, 50, 40])
    ops, handle, layer = build.operators(), pages._handle, engine.layers[0]
    first = [n - 8 for n in engine.next]
    q, first = engine.rows(engine.q, 0, first, [8] * 3), engine.numbers(first)
    slots, counts = pages.choose(0, layer, q, first)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.pages_choose.default, (handle, 0, *layer, q, first), test_utils=tests)
    torch.library.opcheck(ops.pages_attend.default, (handle, 0, q, *layer, first), test_utils=tests)
    torch.library.opcheck(ops.pages_free.default, (handle, engine.tables, engine.lengths, engine.held, PAGE), test_utils=tests)
    new = torch.zeros(3, 1, KV_HEADS, DIM)
    torch.library.opcheck(ops.pages_append.default, (handle, *layer, new, new, engine.numbers(engine.next)), test_utils=tests)
    torch.library.opcheck(ops.pages_pack.default, (handle, *layer, slots, counts), test_utils=tests)


def test_compiled_in_one_graph():
    """No break; what is packed before attention is packed before it."""
    ops, made = build.operators(), []

    def evict_and_attend(handle, k, v, tables, lengths, positions, scores, q, first):
        slots, counts = ops.pages_choose(handle, 0, k, v, tables, lengths, positions, scores, q * 2, first)
        ops.pages_pack(handle, k, v, tables, lengths, positions, scores, slots, counts)
        return ops.pages_attend(handle, 0, q, k, v, tables, lengths, positions, scores, first)[0].sin(), lengths + 0

    for run in (evict_and_attend, torch.compile(evict_and_attend, fullgraph=True, backend="aot_eager")):
        engine, pages = Engine("cpu", torch.float32), operations("cpu", torch.float32)
        engine.append(pages, [200, 120, 140])
        first = [n - 8 for n in engine.next]
        with torch.no_grad():
            made.append(run(pages._handle, *engine.layers[0], engine.rows(engine.q, 0, first, [8] * 3), engine.numbers(first)))
    assert all(torch.equal(a, b) for a, b in zip(*made))
    assert made[0][1].max() < 120


def test_errors_are_sentences_and_change_nothing():
    engine, pages = Engine("cpu", torch.float32), operations("cpu", torch.float32)
    engine.append(pages, [100, 50, 40])
    layer, first = engine.layers[0], engine.numbers([92, 42, 32])
    q = engine.rows(engine.q, 0, [92, 42, 32], [8] * 3)
    before = [x.clone() for x in layer[:5]]

    def refused(sentence, call, *arguments, error=ValueError):
        with pytest.raises(error, match=sentence):
            call(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(before, layer))

    refused("^dtype of k and v is BFloat16; expected Float; ", pages.attend, 0, layer._replace(k=layer.k.bfloat16()), q, first)
    refused("^dtype and device of lengths is Long, cpu; expected Int, cpu; ", pages.attend, 0,
            layer._replace(lengths=layer.lengths.long()), q, first)
    refused(r"^shape of positions is \[3, 2, 100\]; expected \[sequences, kv_heads, at least 320\]; ", pages.attend, 0,
            layer._replace(positions=layer.positions[..., :100].contiguous()), q, first)
    refused(r"^shape of q is \[3, 8, 2, 64\]; expected \[3, 8, 8, 64\]; ", pages.attend, 0, layer, q[:, :, :2], first)
    refused("^layer is 2; expected 0 to 1; ", pages.choose, 2, layer, q, first)
    refused("^tokens of q is 9; expected 1 to 8; ", pages.attend, 0, layer, q[:, :1].expand(-1, 9, -1, -1), first)
    refused("^slots and counts is slots alone; expected both or none; ", pages.attend, 0, layer, q, first, layer.positions)
    wrong = layer.tables.clone()
    wrong[0, 1] = PAGES
    refused("60.* 0 to 59", pages.choose, 0, layer._replace(tables=wrong), q, first)
    new = torch.zeros(3, 1, KV_HEADS, DIM)
    refused(r"^position of the first new token \(sequence 0, kv_head 0\) is 92; expected more than that of the last stored one, "
            "which is 99; ", pages.append, layer, new, new, first)
    turned = layer.positions.clone()
    turned[0, 0, [3, 40]] = turned[0, 0, [40, 3]]
    for call in (pages.choose, pages.attend):
        refused(r"^position of slot 4 \(sequence 0, kv_head 0\) is 4; expected more than that of the slot before it, which is 40; ",
                call, 0, layer._replace(positions=turned), q, first)
    slots, counts = pages.choose(0, layer, q, first)
    refused("ascend|strictly|slot", pages.pack, layer, slots.flip(-1).contiguous(), counts)
    held = engine.numbers([1, 1, 1])
    refused("^pages that row 0 of the tables holds is 1; expected 7 to 20; ", pages.free, engine.tables, engine.lengths,
            held, PAGE)
    refused("^indptr is .*; expected ascending numbers from 0 to the rows", pages.attend, 0, layer, q[0], first, None, None, held)
    full = operations("cpu", torch.float32, "full", None)
    refused("^method is one that keeps everything; ", full.choose, 0, layer, q, first)
    h2o = operations("cpu", torch.float32, "h2o")
    refused("^scores is null; expected one for every stored slot; ", h2o.choose, 0, layer, q, first)
    with pytest.raises(ValueError, match="^parameter is 'windows'; expected window, "):
        operations("cpu", torch.float32, windows=3)
    with pytest.raises(ValueError, match="^profile is given; expected none: this method takes no table"):
        operations("cpu", torch.float32, profile=[[1.0] * KV_HEADS] * LAYERS)
    with pytest.raises(ValueError, match="^numbers of the profile is 2; expected one for each kv_head of the model, 4; "):
        operations("cpu", torch.float32, "duo_attention", profile=[[1.0] * KV_HEADS])


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_a_profile_says_which_heads_keep_everything(device, dtype):
    engine = Engine(device, dtype)
    gates = [[0.9, 0.1], [0.2, 0.8]]
    pages = operations(device, dtype, "duo_attention", 20, profile=gates, streaming=0.5)
    engine.append(pages, [200, 90, 33])
    engine.evict(pages, [1] * 3)
    for i in range(LAYERS):
        for b, n in enumerate(engine.next):
            for h in range(KV_HEADS):
                want = range(n) if gates[i][h] > 0.5 else [*range(4), *range(n - 16, n)]
                assert engine.kept(i, b, h).tolist() == list(want)
    assert engine.step(pages) < tolerance(device, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_eviction_in_a_cuda_graph_follows_its_lengths():
    """Choose, pack, free and attend on another stream in one graph: replayed after the memory was filled anew, the same bits."""
    made = []
    for captured in (False, True):
        engine, pages = Engine("cuda", torch.bfloat16), operations("cuda", torch.bfloat16)
        engine.append(pages, [250, 80, 129])
        first = [n - 8 for n in engine.next]
        q, first = engine.rows(engine.q, 0, first, [8] * 3), engine.numbers(first)
        layer, held = engine.layers[0], engine.held.clone()
        state = [x.clone() for x in (*layer[:5], held)]

        def run():
            pages.pack(layer, *pages.choose(0, layer, q, first))
            freed, count = pages.free(layer.tables, engine.lengths[:1], held, PAGE)
            return pages.attend(0, layer, q[:, -1:].contiguous(), first + 7)[0], count, freed

        if captured:
            run()  # operations are made
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = run()
            for x, was in zip((*layer[:5], held), state):
                x.copy_(was)
            graph.replay()
        else:
            result = run()
        torch.cuda.synchronize()
        made.append([result[0], result[1], layer.lengths.clone(), held.clone()])
        made[-1] += [engine.kept(0, b, h) for b in range(3) for h in range(KV_HEADS)]
    assert all(torch.equal(a, b) for a, b in zip(*made))
