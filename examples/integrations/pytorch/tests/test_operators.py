"""The operators alone: strides, shapes without data, torch.compile, threads."""
import threading

import pytest
import torch
from tessera_torch import build

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 64


@pytest.fixture(scope="module")
def ops():
    return build.operators()


def new(ops, method="full", budget=None, batch=2, **settings):
    path = build.library(method, torch.float32, DIM)
    words = [word for name, value in settings.items() for word in (name, str(value))]
    return ops.create(str(path), LAYERS, Q_HEADS, KV_HEADS, [], 0, 0.0, 0.0, budget, words, batch, 4096, None)


def rows(seed, count, batch=2):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, count, DIM, generator=random) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]


def begin_step(ops, cache):
    ops.prepare_step(cache, torch.empty(0, 1, 1))
    ops.begin_step(cache, torch.empty(0, 1, 1))


def conversation(ops, change=lambda x: x, method="snapkv", budget=24):
    """All outputs of a prompt and three steps, of rows that `change` lays out anew."""
    cache = new(ops, method, budget, window=8)
    made = [ops.prompt(cache, layer, *map(change, rows(layer, 50)), [0, 10], [50, 50]) for layer in range(LAYERS)]
    ops.end_prompt(cache, torch.empty(0, 1, 1))
    for step in range(3):
        begin_step(ops, cache)
        made += [ops.step(cache, layer, *map(change, rows(9 + 2 * step + layer, 1))) for layer in range(LAYERS)]
    ops.destroy(cache.item())
    return made


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_rows_are_read_in_any_strides(ops):
    want = conversation(ops)
    assert (want[0][1, :10] == 0).all() and (want[0][1, 10:] != 0).any()  # padding
    assert same(want, conversation(ops, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)))
    wide = lambda x: torch.nn.functional.pad(x, (0, 0, 3, 2))[:, :, 3:-2]
    assert same(want, conversation(ops, wide))
    assert same(want, conversation(ops, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)))  # the one that is copied


def test_a_step_over_everything_is_attention_in_double(ops):
    cache = new(ops, batch=1)
    q, k, v = rows(1, 30, 1)
    out = [ops.prompt(cache, layer, q, k, v, [0], [30]) for layer in range(LAYERS)][1]
    weights = (q.double() @ k.repeat_interleave(2, 1).double().mT / DIM**0.5).masked_fill(
        torch.ones(30, 30).triu(1).bool(), -torch.inf).softmax(-1)
    want = (weights @ v.repeat_interleave(2, 1).double()).transpose(1, 2)
    assert (out - want).abs().max() < 1e-5


def test_operators_say_their_shapes_and_what_they_change(ops):
    cache = new(ops)
    arguments = (cache, 0, *rows(0, 5), [0, 0], [5, 5])
    torch.library.opcheck(ops.prompt.default, arguments, test_utils=("test_schema", "test_faketensor"))
    assert ops.prompt(cache, 0, *[x.to("meta") for x in rows(0, 5)], [0, 0], [5, 5]).shape == (2, 5, Q_HEADS, DIM)
    assert ops.step(cache, 0, *[x.to("meta") for x in rows(0, 1)]).shape == (2, 1, Q_HEADS, DIM)
    assert ops.reread(cache, 0, *[x.to("meta") for x in rows(0, 5)], [0, 0], [5, 5], [5, 5]).shape == (2, 5, Q_HEADS, DIM)


def test_compiled_in_one_graph(ops):
    """No break, and nothing dropped or out of order: layers see each other through the cache alone."""

    def step(cache, q, k, v):
        begin_step(ops, cache)
        first = ops.step(cache, 0, q * 2, k, v)
        return ops.step(cache, 1, q + first.transpose(1, 2), k * 3, v).sin()

    made = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = new(ops, "h2o", 16, batch=1)
        for layer in range(LAYERS):
            ops.prompt(cache, layer, *rows(layer, 40, 1), [0], [40])
        ops.end_prompt(cache, torch.empty(0, 1, 1))
        made.append([run(cache, *rows(5 + i, 1, 1)) for i in range(4)])
        assert [len(x) for x in ops.positions(cache, 1)] == [16, 16]
    assert same(*made)


def test_errors_are_the_library_s_sentences(ops):
    cache = new(ops)
    with pytest.raises(ValueError, match="^heads of q is 2; expected 4; pass "):
        q, k, v = rows(0, 5)
        ops.prompt(cache, 0, k, k, v, [0, 0], [5, 5])
    with pytest.raises(ValueError, match="^sequences of the batch is 1; expected those that the cache was made for"):
        ops.prompt(cache, 0, *rows(0, 5, 1), [0], [5])
    with pytest.raises(ValueError, match="call end_prefill before the first decode step"):
        ops.prompt(cache, 0, *rows(0, 5), [0, 0], [5, 5])
        ops.prepare_step(cache, torch.empty(0, 1, 1))
    with pytest.raises(ValueError, match="^the step is not prepared; expected one that is; call prepare_step"):
        ops.begin_step(cache, torch.empty(0, 1, 1))
    ops.destroy(cache.item())
    with pytest.raises(ValueError, match="expected the handle of an open cache"):
        ops.figures(cache)


def test_caches_of_several_threads(ops):
    want, got = conversation(ops), [None] * 4

    def run(i):
        got[i] = conversation(ops)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(want, one) for one in got)
