"""Methods that observe more than a window over an engine's pages: accumulated scores and statistics, against PyTorch in double."""
import pytest
import torch
from paged_engine import BLOCKS, DIM, GROUP, KV_HEADS, LAYERS, LONGEST, PAGE, PLACES, Q_HEADS, Engine, operations, tolerance
from tessera_torch import PagedLayer

SPEEDS = [10000.0 ** (-2 * i / DIM) for i in range(DIM // 2)]


def with_scores(engine):
    scores = torch.zeros(LAYERS, engine.batch, KV_HEADS, LONGEST, device=engine.device)
    engine.layers = [layer._replace(scores=scores[i]) for i, layer in enumerate(engine.layers)]
    return scores


def chunk(engine, pages, count, **more):
    """New tokens of each sequence, whose queries are observed once their keys are stored."""
    first = list(engine.next)
    engine.append(pages, count)
    for i, layer in enumerate(engine.layers):
        pages.observe(i, layer, engine.rows(engine.q, i, first, count), engine.numbers(first), engine.numbers(count),
                      **{name: value[i] for name, value in more.items()})


def weights(engine, i, b, head, query, positions):
    """What a query gives each of the positions, by definition."""
    h = head // GROUP
    seen = positions[positions <= query]
    logits = engine.q[i, b, query, head].double() @ engine.k[i, b, seen, h].double().T / DIM**0.5
    return torch.cat([logits.softmax(-1), torch.zeros(len(positions) - len(seen), dtype=torch.double, device=engine.device)])


def agrees(got, want, device, dtype):
    assert torch.allclose(got.double(), want, rtol=1e-4 if dtype == torch.float32 else 3e-2, atol=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_h2o_adds_up_what_every_query_gives_and_scores_move_with_rows(device, dtype):
    engine, budget = Engine(device, dtype), 48
    pages = operations(device, dtype, "h2o", budget)
    assert pages.observes == "every_query"
    scores = with_scores(engine)
    for count in ([100, 20, 9], [30, 7, 60], [1, 1, 1]):
        chunk(engine, pages, count)
    want = {}
    for i in range(LAYERS):
        for b, n in enumerate(engine.next):
            for h in range(KV_HEADS):
                positions = torch.arange(n, device=device)
                total = sum(weights(engine, i, b, head, query, positions)
                            for head in range(h * GROUP, (h + 1) * GROUP) for query in range(n))
                agrees(scores[i, b, h, :n], total, device, dtype)
                want[i, b, h] = scores[i, b, h, :n].clone()
    for i, layer in enumerate(engine.layers):
        slots, counts = pages.choose(i, layer, None, engine.numbers(engine.next))
        pages.pack(layer, slots, counts)
        for b, n in enumerate(engine.next):
            for h in range(KV_HEADS):
                kept = engine.kept(i, b, h)
                assert len(kept) == min(n, budget)
                if n <= budget:
                    continue
                recent = budget // 2
                assert kept[-recent:].tolist() == list(range(n - recent, n))
                own, left = want[i, b, h][:n - recent], want[i, b, h][:n - recent].clone()
                left[kept[:-recent]] = -1
                assert own[kept[:-recent]].min() >= left.max()
                assert torch.equal(scores[i, b, h, :budget], want[i, b, h][kept])
    # A step adds to what is left.
    before = scores.clone()
    kept = {(i, b, h): engine.kept(i, b, h) for i in range(LAYERS) for b in range(3) for h in range(KV_HEADS)}
    chunk(engine, pages, [1, 1, 1])
    for (i, b, h), old in kept.items():
        query = engine.next[b] - 1
        positions = torch.cat([old, torch.tensor([query], device=device)])
        total = sum(weights(engine, i, b, head, query, positions) for head in range(h * GROUP, (h + 1) * GROUP))
        total[:-1] += before[i, b, h, :len(old)].double()
        agrees(scores[i, b, h, :len(positions)], total, device, dtype)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_tova_goes_by_the_newest_query_of_all_heads(device, dtype):
    engine, budget = Engine(device, dtype), 40
    pages = operations(device, dtype, "tova", budget)
    assert pages.observes == "newest_query"
    scores = with_scores(engine)
    for count in ([100, 20, 9], [30, 7, 60]):
        chunk(engine, pages, count)
    for i, layer in enumerate(engine.layers):
        slots, counts = pages.choose(i, layer, None, engine.numbers(engine.next))
        for b, n in enumerate(engine.next):
            positions = torch.arange(n, device=device)
            for h in range(KV_HEADS):
                total = sum(weights(engine, i, b, head, n - 1, positions) for head in range(h * GROUP, (h + 1) * GROUP))
                agrees(scores[i, b, h, :n], total, device, dtype)
            assert counts[b].tolist() == [min(n, budget)] * KV_HEADS
            got = slots[b, :, :int(counts[b, 0])]
            assert torch.equal(got[0], got[1]) and int(got[0, -1]) == n - 1  # one set for all heads, the newest token in it
            joined = scores[i, b, :, :n - 1].sum(0)
            left = joined.clone()
            left[got[0, :-1].long()] = -1
            assert n <= budget or joined[got[0, :-1].long()].min() >= left.max() * (1 - 1e-5)


def turned(x, positions, back):
    """RoPE at these positions, or undone; x [tokens, dim] in double."""
    angle = (positions[:, None].float() * torch.tensor(SPEEDS, device=x.device, dtype=torch.float32)).double()
    cosine, sine, half = angle.cos(), -angle.sin() if back else angle.sin(), DIM // 2
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], 1)


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_expected_attention_goes_by_all_queries_of_a_prompt(device, dtype):
    engine, budget, sinks, future = Engine(device, dtype), 40, 4, 64
    pages = operations(device, dtype, "expected_attention", budget, rope_frequencies=SPEEDS, sinks=sinks, future=future)
    assert pages.observes == "statistics"
    sums = [pages.statistics(engine.batch) for _ in range(LAYERS)]
    for count in ([100, 3, 9], [30, 27, 60]):
        chunk(engine, pages, count, statistics=sums)
    for i, layer in enumerate(engine.layers):
        counts, added, _ = sums[i]
        slots, kept = pages.choose(i, layer, None, engine.numbers(engine.next), statistics=sums[i])
        for b, n in enumerate(engine.next):
            assert counts[b].tolist() == [n - sinks] * Q_HEADS
            positions = torch.arange(sinks, n, device=device)
            for h in range(KV_HEADS):
                scores = torch.zeros(n - sinks, dtype=torch.double, device=device)
                for head in range(h * GROUP, (h + 1) * GROUP):
                    q = turned(engine.q[i, b, sinks:n, head].double(), positions, True)
                    assert torch.allclose(added[b, head], q.sum(0), atol=1e-3)
                    # The mean rotation to come, undone for keys: an average of keys that are turned back.
                    k = engine.k[i, b, sinks:n, h].double()
                    mean = sum(turned(k, torch.full((n - sinks,), p, device=device), True) for p in range(n, n + future)) / future
                    logits = q @ mean.T / DIM**0.5
                    expected = logits.mean(0) + logits.var(0, unbiased=False) / 2
                    scores += expected.softmax(0) / GROUP
                scores *= engine.v[i, b, sinks:n, h].double().norm(dim=-1)
                got = slots[b, h, :int(kept[b, h])].long()
                assert len(got) == min(n, budget)
                if n <= budget:
                    continue
                assert got[:sinks].tolist() == list(range(sinks))
                left = scores.clone()
                left[got[sinks:] - sinks] = -1
                assert scores[got[sinks:] - sinks].min() >= left.max() * (1 - (1e-4 if dtype == torch.float32 else 2e-2))


def test_what_is_observed_wrongly_is_said():
    engine = Engine("cpu", torch.float32)
    h2o, snapkv = operations("cpu", torch.float32, "h2o"), operations("cpu", torch.float32, "snapkv", window=16)
    expected = operations("cpu", torch.float32, "expected_attention", rope_frequencies=SPEEDS)
    engine.append(h2o, [50, 20, 30])
    layer, first = engine.layers[0], engine.numbers([42, 12, 22])
    q = engine.rows(engine.q, 0, [42, 12, 22], [8] * 3)
    assert snapkv.observes == "window" and operations("cpu", torch.float32, "full", None).observes == "nothing"
    snapkv.observe(0, layer, q, first)  # nothing
    with pytest.raises(ValueError, match="^scores is null; expected one for every stored slot; "):
        h2o.observe(0, layer, q, first)
    with pytest.raises(ValueError, match="^scores is Double .*; expected Float "):
        h2o.observe(0, layer._replace(scores=torch.zeros(3, KV_HEADS, LONGEST, dtype=torch.double)), q, first)
    tova = operations("cpu", torch.float32, "tova")
    with pytest.raises(ValueError, match=r"^valid is \[8, 0, 8\]; expected at least 1 query of each sequence; "):
        tova.observe(0, layer._replace(scores=torch.zeros(3, KV_HEADS, LONGEST)), q, first, engine.numbers([8, 0, 8]))
    with pytest.raises(ValueError, match="^statistics is None; expected what PageOperations.statistics makes; "):
        expected.observe(0, layer, q, first)
    with pytest.raises(ValueError, match="^tensors of the statistics is 2; expected 3: "):
        expected.choose(0, layer, None, first, statistics=expected.statistics(3)[:2])
    with pytest.raises(ValueError, match="^tensor 1 of the statistics is "):
        expected.choose(0, layer, None, first, statistics=[x[:2].contiguous() if i else x for i, x in enumerate(expected.statistics(3))])
    with pytest.raises(ValueError, match="^statistics and rope_frequencies is null; "):
        expected.choose(0, layer, None, first)
    with pytest.raises(ValueError, match="rope_frequencies"):
        operations("cpu", torch.float32, "expected_attention")
