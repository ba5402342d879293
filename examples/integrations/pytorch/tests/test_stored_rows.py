"""Rows of 8, 4 and 2 bits: a cache of them does what a cache does that is handed what such rows decode to."""
import copy
import pickle

import pytest
import torch
from tessera_torch import Policy, TesseraCache, build
from test_use import GREEDY, small_model, tokens


def decoded(x, rows):
    """What is left of vectors [.., dim] once they are stored, in another way than the library's."""
    if rows in ("fp8", "int8"):
        largest = x.abs().amax(-1, keepdim=True)
        scale = largest / (448 if rows == "fp8" else 127)
        scale = torch.where(scale > 1e-30, scale, 1.0)
        codes = (x / scale).to(torch.float8_e4m3fn).float() if rows == "fp8" else (x / scale).round()
        return codes * scale
    most = {"int4": 15, "int2": 3}[rows]
    groups = x.unflatten(-1, (-1, 64))
    low = groups.amin(-1, keepdim=True).half().float()
    step = ((groups.amax(-1, keepdim=True) - low) / most).half().float()
    codes = torch.where(step > 0, ((groups - low) / step).round().clamp(0, most), 0.0)
    return (low + step * codes).flatten(-2)


CASES = [("full", "fp8"), ("full", "int8"), ("full", "int4"), ("full", "int2"), ("snapkv", "int4"), ("quest", "int8")]


@pytest.mark.parametrize("method, rows", CASES)
def test_a_cache_of_few_bits_is_one_of_what_they_decode_to(method, rows, monkeypatch):
    model, ids = small_model(), tokens(90)
    named = {} if method == "full" else {"budget": 32}
    given = TesseraCache(model.config, method, **named)
    few = TesseraCache(model.config, method, rows=rows, **named)
    attend = TesseraCache.attend

    def of_decoded(self, layer, q, k, v, *more):
        return attend(self, layer, q, *((decoded(x, rows) for x in (k, v)) if self is given else (k, v)), *more)

    monkeypatch.setattr(TesseraCache, "attend", of_decoded)
    with torch.no_grad():
        for part in (ids[:, :80], ids[:, 80:81], ids[:, 81:82]):
            want = model(part, past_key_values=given).logits
            assert torch.allclose(model(part, past_key_values=few).logits, want, atol=2e-4)
    monkeypatch.undo()
    row = {"fp8": 68, "int8": 68, "int4": 36, "int2": 20}[rows]  # of 64 channels, scales included
    assert few.full_bytes() * 4 * 64 == given.full_bytes() * row
    twin, again = copy.deepcopy(few), pickle.loads(pickle.dumps(few))
    answers = [model.generate(torch.cat([ids[:, :82], ids[:, 82:86]], 1), past_key_values=one, max_new_tokens=6, **GREEDY)
               for one in (few, twin, again)]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method, rows", [("full", "fp8"), ("full", "int8"), ("full", "int4"), ("full", "int2"), ("snapkv", "int4")])
def test_a_gpu_stores_what_codes_decode_to(method, rows, monkeypatch):
    """What is decoded here is then rounded to bf16, which rows of codes are not: by 2e-3 of an element."""
    model, ids = small_model().to("cuda", torch.bfloat16), tokens(90).to("cuda")
    named = dict(max_length=128) if method == "full" else dict(max_length=128, budget=64)
    given = TesseraCache(model.config, method, **named)
    few = TesseraCache(model.config, method, rows=rows, **named)
    attend = TesseraCache.attend

    def of_decoded(self, layer, q, k, v, *more):
        return attend(self, layer, q, *((decoded(x.float(), rows).to(x.dtype) for x in (k, v)) if self is given else (k, v)), *more)

    monkeypatch.setattr(TesseraCache, "attend", of_decoded)
    with torch.no_grad():
        for part in (ids[:, :80], ids[:, 80:81], ids[:, 81:82]):
            want = model(part, past_key_values=given).logits.float()
            got = model(part, past_key_values=few).logits.float()
            assert (got - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize("method, rows", [("full", "given"), ("snapkv", "given"), ("full", "int4")])
def test_rotated_rows_answer_as_rows_that_are_not(method, rows, monkeypatch):
    """Of rows as given; and rows of few bits are those of what the rotated ones decode to."""
    model, ids = small_model(), tokens(90)
    named = {} if method == "full" else {"budget": 32}
    plain = TesseraCache(model.config, method, **named)
    turned = TesseraCache(model.config, method, rows=rows, rotate="hadamard", **named)
    attend, matrix = TesseraCache.attend, torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2 ** 0.5, matrix)

    def of_decoded(self, layer, q, k, v, *more):
        if self is plain and rows != "given":
            k, v = (decoded(x @ matrix, rows) @ matrix for x in (k, v))
        return attend(self, layer, q, k, v, *more)

    monkeypatch.setattr(TesseraCache, "attend", of_decoded)
    with torch.no_grad():
        for part in (ids[:, :80], ids[:, 80:81], ids[:, 81:82]):
            want = model(part, past_key_values=plain).logits
            assert torch.allclose(model(part, past_key_values=turned).logits, want, atol=5e-4)
    if method == "snapkv":
        kept = [[positions.tolist() for i in range(one.layer_count) for positions in one.kept_positions(i)[0]] for one in (plain, turned)]
        assert kept[0] == kept[1]
    twin, again = copy.deepcopy(turned), pickle.loads(pickle.dumps(turned))
    monkeypatch.undo()
    answers = [model.generate(torch.cat([ids[:, :82], ids[:, 82:86]], 1), past_key_values=one, max_new_tokens=6, **GREEDY)
               for one in (turned, twin, again)]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o"])
def test_rows_behind_a_whole_tail(method):
    """A tail of everything packs nothing; one of 16 tokens leaves less of the error of 4 bits than rows without."""
    model, ids = small_model(), tokens(90)
    named = {} if method == "full" else {"budget": 64}

    def logits(**more):
        cache = TesseraCache(model.config, method, **named, **more)
        with torch.no_grad():
            model(ids[:, :80], past_key_values=cache)
            return torch.cat([model(ids[:, i:i + 1], past_key_values=cache).logits for i in range(80, 90)]), cache

    (given, cache), (whole, _) = logits(), logits(rows="tailed", element="int4", tail=400)
    assert torch.allclose(whole, given, atol=1e-5)
    (few, packed), (none, _) = logits(rows="tailed", element="int4", tail=16), logits(rows="int4")
    assert 0 < (few - given).norm() < (none - given).norm()
    assert packed.bytes() < cache.bytes()
    twin = pickle.loads(pickle.dumps(packed))
    with torch.no_grad():
        assert torch.equal(*(model(ids[:, :5], past_key_values=one).logits for one in (packed, twin)))


def test_rows_that_are_not_there_are_refused():
    config = small_model().config
    with pytest.raises(ValueError, match="^rows is 'int3'; expected one of given, fp8, int8, int4, int2, tailed; "):
        TesseraCache(config, "snapkv", 32, rows="int3")
    own = Policy("struct nothing {};\n", "recipe<retain_all, dense<T, D>, retrieve_all, dense_decode, once>")
    with pytest.raises(ValueError, match="^rows is 'int4'; expected 'given' beside a Policy, whose recipe names its layout; "):
        TesseraCache(config, own, rows="int4")
    with pytest.raises(ValueError, match="^rotate is 'hadamard'; expected 'none' beside a Policy, which may go by "):
        TesseraCache(config, own, rotate="hadamard")
    with pytest.raises(ValueError, match="^rotate is 'givens'; expected none or hadamard; "):
        TesseraCache(config, "snapkv", 32, rotate="givens")
    with pytest.raises(ValueError, match="^rotate is 'hadamard'; expected 'none' under expected_attention, which turns queries by "):
        TesseraCache(config, "expected_attention", 32, rotate="hadamard")
    with pytest.raises(ValueError, match="^rotate is 'hadamard'; expected 'none' under criticalkv, which weighs values by their channels; "):
        TesseraCache(config, "criticalkv", 32, rotate="hadamard")
    with pytest.raises(ValueError, match="^tessera: mosaickv packs its rows; leave rows out"):
        build.library("mosaickv", torch.float32, 64, rows="int8")
