"""Layers on several devices behind one cache: each device has a store for its layers. Without GPUs, of tensors that say that they are
elsewhere."""
import copy
import pickle

import pytest
import tiny_models
import torch
import transformers
from conftest import padded
from tessera_torch import CapturedStep, TesseraCache, layer_devices
from tessera_torch.generation import cache_keyword

HERE, THERE = torch.device("cpu"), torch.device("cpu:0")
GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
ROWS = [torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (60, 41)]
METHODS = {"full": {}, "snapkv": dict(budget=24, window=8), "h2o": dict(budget=24), "quest": dict(budget=24, page=8)}


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on THERE, as whatever is made of it does."""

    @property
    def device(self):
        return THERE


def model_of(kind="llama", device="cpu", **more):
    torch.manual_seed(1)
    config = tiny_models.config_of(kind)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera", **more).eval()
    return tiny_models.randomise(model).to(device)


def half_elsewhere(model):
    """The second half of a model's layers computes on THERE, and what they make comes back. Returns the layers' devices."""
    layers = model.get_decoder().layers
    move = lambda rows, to: rows.as_subclass(to) if isinstance(rows, torch.Tensor) else rows
    for layer in layers[len(layers) // 2:]:
        layer.register_forward_pre_hook(lambda _, given: (move(given[0], Elsewhere), *given[1:]))
        layer.register_forward_hook(lambda _, given, made: (
            tuple(move(one, torch.Tensor) for one in made) if isinstance(made, tuple) else move(made, torch.Tensor)))
    return [HERE] * (len(layers) - len(layers) // 2) + [THERE] * (len(layers) // 2)


def cache_of(model, method="full", devices=None, **more):
    return TesseraCache(model.config, method, devices=devices, **METHODS[method], **more)


def kept(cache):
    return [[head.tolist() for row in cache.kept_positions(layer) for head in row] for layer in range(cache.layer_count)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("method", METHODS)
def test_two_devices_give_the_tokens_of_one(kind, method):
    """With copies, pickles and a second turn, whose mask has padding between the answer and the question."""
    model, inputs = model_of(kind), padded(ROWS)
    name = cache_keyword(model)

    def conversation(devices):
        cache = cache_of(model, method, devices)
        first = model.generate(**inputs, **GREEDY, **{name: cache})
        question = torch.tensor([[0, 7, 8], [9, 10, 11]])
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long), (question > 0).long()], 1)
        caches = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        made = [model.generate(torch.cat([first, question], 1), attention_mask=mask, **GREEDY, **{name: one}) for one in caches]
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        return cache, made[0]

    (one, want), devices = conversation(None), half_elsewhere(model)
    two, got = conversation(devices)
    assert {kind.device for kind in one._kinds.all} == {HERE} and {kind.device for kind in two._kinds.all} == {HERE, THERE}
    assert all(devices[layer] == kind.device for kind in two._kinds.all for layer in kind.layers)
    assert torch.equal(got, want) and kept(two) == kept(one)
    assert two.full_bytes() == one.full_bytes() and two.bytes_read() == one.bytes_read()


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_drafts_are_judged_on_two_devices(method):
    """What is rejected is taken back on both; under h2o a copy of both waits for that."""
    model, ids = model_of(), torch.tensor([ROWS[0] + ROWS[0][:20]])
    name = cache_keyword(model)
    asked = dict(GREEDY, eos_token_id=2)  # transformers 4.57 wants one here, and may give a drafted answer one token more
    want = model.generate(ids, **asked, **{name: cache_of(model, method)})
    cache = cache_of(model, method, half_elsewhere(model))
    got = model.generate(ids, prompt_lookup_num_tokens=3, **asked, **{name: cache})
    assert torch.equal(got[:, :want.shape[1]], want)


@pytest.mark.parametrize("turn", [1, 2])
def test_rows_on_another_device_are_refused(turn):
    """A first call that is refused stores nothing; a cache that holds something says that a call failed."""
    model, ids = model_of(), torch.tensor(ROWS[:1])
    name, cache = cache_keyword(model), cache_of(model)
    with torch.no_grad():
        want = model(ids, **{name: cache_of(model)}).logits
        if turn == 2:
            model(ids, **{name: cache})
        devices = half_elsewhere(model)
        with pytest.raises(ValueError, match="^device of layer 2 is cpu:0; expected cpu, where the cache has it; make the cache with "):
            model(ids, **{name: cache})
        if turn == 2:
            with pytest.raises(ValueError, match="^the cache is half way through a call that failed; "):
                model(ids, **{name: cache})
            cache.reset()
        assert cache.get_seq_length() == cache.bytes() == 0
        with pytest.raises(ValueError, match="^device of layer 0 is cpu; expected cpu:0, "):
            model(ids, **{name: cache_of(model, devices=devices[::-1])})
        assert torch.equal(model(ids, **{name: cache_of(model, devices=devices)}).logits, want)


def test_what_needs_all_layers_on_one_device_is_refused():
    model = model_of()
    devices, name, ids = half_elsewhere(model), cache_keyword(model), torch.tensor(ROWS[:1])
    with torch.no_grad(), pytest.raises(ValueError, match="^method is 'pyramidkv', which looks over all layers; expected .* on several devices"):
        model(ids, **{name: TesseraCache(model.config, "pyramidkv", 24, devices=devices)})
    cache = cache_of(model, devices=devices)
    with torch.no_grad():
        model(ids, **{name: cache})
    with pytest.raises(NotImplementedError, match="^capturing steps of layers .* on several devices, is not possible"):
        CapturedStep(model, cache).step(ids[:, :1])


def test_devices_that_are_no_list_of_them_are_refused():
    config = model_of().config
    with pytest.raises(ValueError, match="^devices are 3; expected a list with one for each layer of the model, which are 4; pass layer_devices"):
        TesseraCache(config, devices=[HERE] * 3)
    with pytest.raises(ValueError, match="^devices are of the type dict; expected a list"):
        TesseraCache(config, devices={"": 0})


@pytest.mark.parametrize("dense", [0, 1, 3, 4])
def test_dense_layers_are_the_model_s_first(dense):
    """Not each device's, nor each kind's."""
    model, ids = model_of(), torch.tensor(ROWS[:1])
    devices, name = half_elsewhere(model), cache_keyword(model)
    cache = cache_of(model, "snapkv", devices, dense_layers=dense)
    with torch.no_grad():
        model(ids, **{name: cache})
    cache.end_prompt()
    assert [len(cache.kept_positions(layer)[0][0]) for layer in range(4)] == [60] * dense + [24] * (4 - dense)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "qwen3_next"])
def test_layers_say_where_they_compute(kind):
    if kind not in tiny_models.ARCHITECTURES:
        return
    model = transformers.AutoModelForCausalLM.from_config(tiny_models.config_of(kind), attn_implementation="sdpa")
    assert layer_devices(model) == [HERE] * 4
    for module in model.get_decoder().modules():
        if getattr(module, "layer_idx", None) == 2:
            module.to("meta")
    assert layer_devices(model) == [HERE, HERE, torch.device("meta"), HERE]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("method", METHODS)
def test_a_device_map_over_two_gpus_gives_the_tokens_of_one(method, tmp_path):
    pytest.importorskip("accelerate")
    model_of(dtype=torch.bfloat16).save_pretrained(tmp_path)
    load = lambda where: transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="tessera", device_map=where).eval()
    inputs = {name: value.to("cuda:0") for name, value in padded(ROWS).items()}
    split = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1,
             "model.layers.3": 1, "model.norm": 1, "lm_head": 1}
    made = []
    for where in ({"": 0}, split):
        model = load(where)
        cache = cache_of(model, method, layer_devices(model), max_length=256)
        made.append((model.generate(**inputs, **GREEDY, **{cache_keyword(model): cache}).cpu(), kept(cache)))
        assert len({kind.device for kind in cache._kinds.all}) == len(set(where.values()))
    assert torch.equal(made[0][0], made[1][0]) and made[0][1] == made[1][1]
