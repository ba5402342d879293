"""What goes wrong says so in a sentence and harms nothing; memory comes back."""
import copy
import gc
import pathlib
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from conftest import HERE, padded
from tessera_torch import TesseraCache
from tessera_torch.kinds import layer_kinds

GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def small_model():
    torch.manual_seed(2)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, head_dim=64, vocab_size=128, max_position_embeddings=4096)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera").eval()


def tokens(count, batch=1):
    return torch.randint(3, 128, (batch, count))


def resident():
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("again", [False, True], ids=["new caches", "one cache, reset"])
def test_memory_returns_after_many_calls(again):
    model, cache = small_model(), None

    def call(i):
        nonlocal cache
        if not again or cache is None:
            method = ("snapkv", "rocketkv_mt", "h2o")[i % 3]
            cache = TesseraCache(model.config, method, 32, **({} if method == "h2o" else {"window": 8}))
        inputs = padded([[3 + (i + t) % 100 for t in range(length)] for length in (300, 80 + i % 50)])
        model.generate(**inputs, past_key_values=cache, max_new_tokens=3, **GREEDY)
        if again:
            cache.reset()

    for i in range(100):
        call(i)
    before = resident()
    for i in range(300 if again else 1000):
        call(i)
    assert resident() - before < 1 << 20


def test_a_call_of_another_type_or_batch_is_refused_and_changes_nothing():
    model, ids = small_model(), tokens(60)
    want = model.generate(ids, past_key_values=TesseraCache(model.config, "snapkv", 32), max_new_tokens=8, **GREEDY)
    cache = TesseraCache(model.config, "snapkv", 32)
    half = model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)
    with torch.no_grad():
        with pytest.raises(ValueError, match="torch.bfloat16.* expected .*torch.float32"):
            model.to(torch.bfloat16)(half[:, -1:], past_key_values=cache)
        with pytest.raises(ValueError, match="make a cache for each"):
            model.to(torch.float32)(tokens(1, 2), past_key_values=cache)
    got = model.generate(half, past_key_values=cache, max_new_tokens=4, **GREEDY)
    # bf16 has rounded the weights on the way: the model that goes on is not quite the one that began.
    assert got.shape == want.shape and cache.get_seq_length() == 67


def test_too_long_is_refused_and_the_cache_goes_on():
    model, ids = small_model(), tokens(60)
    want = model.generate(ids, past_key_values=TesseraCache(model.config), max_new_tokens=8, **GREEDY)
    cache = TesseraCache(model.config, max_length=68)
    half = model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)
    with torch.no_grad(), pytest.raises(ValueError, match="tokens of the conversation are 73; expected at most 68"):
        model(tokens(10), past_key_values=cache)
    assert torch.equal(model.generate(half, past_key_values=cache, max_new_tokens=4, **GREEDY), want)


def test_an_exception_within_a_model_leaves_model_and_cache_usable():
    model, ids = small_model(), tokens(60)
    want = model.generate(ids, past_key_values=TesseraCache(model.config), max_new_tokens=8, **GREEDY)

    def fail(*_):
        raise KeyboardInterrupt

    cache = TesseraCache(model.config)
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)
    hook.remove()
    half = model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)  # nothing was there: begins anew
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(half, past_key_values=cache, max_new_tokens=4, **GREEDY)
    hook.remove()
    with pytest.raises(ValueError, match="half way through a call that failed; .*; call reset()"):
        model.generate(half, past_key_values=cache, max_new_tokens=4, **GREEDY)
    cache.reset()
    assert cache.bytes() == 0
    assert torch.equal(model.generate(half, past_key_values=cache, max_new_tokens=4, **GREEDY), want)


def test_memory_that_runs_out_is_torch_s_error_and_leaves_the_cache_usable():
    """In a process of its own, whose address space ends before the rows fit."""
    program = textwrap.dedent("""
        import resource, torch, transformers
        from tessera_torch import TesseraCache
        config = transformers.LlamaConfig(num_hidden_layers=1, head_dim=256, max_position_embeddings=1 << 20)
        config._attn_implementation = "tessera"
        cache = TesseraCache(config)
        row = torch.ones(1, 1, 1, 256)
        rows = lambda count: [row.expand(1, 16, count, 256)] * 3  # no memory of their own
        attend = lambda count: cache.attend(0, *rows(count), None, None, None, None, None)
        attend(8)
        cache.reset()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (500 << 20),) * 2)
        with torch.no_grad():
            try:
                attend(20000)  # output 328 MB, keys and values 655 MB
            except torch.OutOfMemoryError as problem:
                print(problem)
            assert attend(100).shape == (1, 100, 16, 256) and cache.bytes() < 5 << 20
            print("goes on")
    """)
    result = subprocess.run([sys.executable, "-c", program], cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["memory for the cache is used up; free some, and reset the cache", "goes on"], (
        result.stdout + result.stderr)


def test_what_cannot_be_is_refused_by_a_sentence():
    model, ids = small_model(), tokens(60)
    with pytest.raises(NotImplementedError, match="beam search is not possible with a TesseraCache: .*"):
        model.generate(ids, past_key_values=TesseraCache(model.config), num_beams=2, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match="attention of LlamaAttention has no TesseraCache"):
        model.generate(ids, max_new_tokens=4, **GREEDY)
    with pytest.raises(ValueError, match="method is 'snapvk'; expected one of .*snapkv"):
        TesseraCache(model.config, "snapvk")
    with pytest.raises(ValueError, match="parameter is 'windows'; expected window, pool, "):
        model.generate(ids, past_key_values=TesseraCache(model.config, "snapkv", 32, windows=8), max_new_tokens=4)
    with pytest.raises(ValueError, match="window is 32; expected at most the budget, which is 16"):
        model.generate(ids, past_key_values=TesseraCache(model.config, "snapkv", 16), max_new_tokens=4)
    with pytest.raises(ValueError, match="gradients are asked for"):
        model(ids, past_key_values=TesseraCache(model.config))
    with pytest.raises(ValueError, match="attention of the model is 'sdpa'; expected 'tessera'"):
        TesseraCache(transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)).config)
    with torch.no_grad(), pytest.raises(ValueError, match="head_dim is 32; expected one of 64, 80"):
        config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=128)
        other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera")
        other(ids, past_key_values=TesseraCache(other.config))


def test_a_budget_may_change_between_turns():
    model, cache = small_model(), None
    cache = TesseraCache(model.config, "snapkv", 60, window=8)
    model.generate(tokens(100), past_key_values=cache, max_new_tokens=2, **GREEDY)
    assert [len(head) for head in cache.kept_positions(0)[0]] == [61]
    cache.set_budget(20)
    with torch.no_grad():
        model(tokens(10), past_key_values=cache)
    cache.end_prompt()
    assert [len(head) for head in cache.kept_positions(0)[0]] == [20]
    assert 0 < cache.bytes() < 0.25 * cache.full_bytes()


def test_rows_of_a_batch_have_budgets_of_their_own():
    """Each row does as in a cache of its budget; a float is a share of the row's tokens, which an answer leaves as it is."""
    model, ids = small_model(), tokens(100, batch=3)
    cache = TesseraCache(model.config, "snapkv", [60, 0.25, 20], window=8)
    got = model.generate(ids, past_key_values=cache, max_new_tokens=6, **GREEDY)
    assert [len(row[0]) for row in cache.kept_positions(0)] == [65, 30, 25]
    for row, budget in enumerate([60, 25, 20]):
        alone = TesseraCache(model.config, "snapkv", budget, window=8)
        want = model.generate(ids[row:row + 1], past_key_values=alone, max_new_tokens=6, **GREEDY)
        assert want.tolist() == got[row:row + 1].tolist()
        assert [head.tolist() for head in alone.kept_positions(1)[0]] == [head.tolist() for head in cache.kept_positions(1)[row]]
    steps = TesseraCache(model.config, "h2o", 0.5)
    model.generate(ids[:1], past_key_values=steps, max_new_tokens=11, **GREEDY)
    assert len(steps.kept_positions(0)[0][0]) == 55
    with pytest.raises(ValueError, match="expected one number of tokens for all rows"):
        cache.set_budget(30)
    with pytest.raises(ValueError, match="budgets are 3; expected one for each sequence of the batch, which are 1"):
        model.generate(ids[:1], past_key_values=TesseraCache(model.config, "snapkv", [60, 40, 20], window=8), max_new_tokens=2)
    with pytest.raises(ValueError, match="share of budget is 1.5; expected in"):
        TesseraCache(model.config, "snapkv", 1.5)
    with pytest.raises(ValueError, match="budget is '60'; expected tokens as an int or a share as a float"):
        TesseraCache(model.config, "snapkv", ["60"])
    with pytest.raises(ValueError, match="budget of a sequence is given; expected none"):
        model.generate(ids, past_key_values=TesseraCache(model.config, "full", [64, 64, 64]), max_new_tokens=2)


def test_a_copy_goes_its_own_way():
    """One prompt, two questions; and a state to go back to when a call has failed half way."""
    model, ids = small_model(), tokens(60)
    cache = TesseraCache(model.config, "snapkv", 32, window=8)
    half = model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)
    twin, questions = copy.deepcopy(cache), [tokens(9), tokens(9)]
    got = [model.generate(torch.cat([half, one], 1), past_key_values=which, max_new_tokens=4, **GREEDY)
           for one, which in zip(questions, (cache, twin))]
    for one, answer in zip(questions, got):
        cache = TesseraCache(model.config, "snapkv", 32, window=8)
        model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)
        want = model.generate(torch.cat([half, one], 1), past_key_values=cache, max_new_tokens=4, **GREEDY)
        assert torch.equal(answer, want)


def test_chunks_of_any_size_keep_what_one_prompt_keeps():
    model, ids = small_model(), tokens(100)
    kept, logits = [], []
    for sizes in ([100], [1, 60, 1, 1, 37], [99, 1]):
        cache = TesseraCache(model.config, "ada_snapkv", 40)
        with torch.no_grad(), cache.prompt():
            for chunk in ids.split(sizes, 1):
                last = model(chunk, past_key_values=cache).logits[:, -1]
        cache.end_prompt()
        kept.append([[head.tolist() for head in cache.kept_positions(layer)[0]] for layer in range(2)])
        logits.append(last)
    assert kept[0] == kept[1] == kept[2]
    assert all(torch.allclose(logits[0], other, atol=1e-5) for other in logits[1:])


def test_a_compiled_model_and_inference_mode():
    model, ids = small_model(), tokens(50)
    compiled, made = torch.compile(model.forward, backend="eager"), []
    for forward, mode in ((model.forward, torch.no_grad), (compiled, torch.no_grad), (model.forward, torch.inference_mode)):
        cache = TesseraCache(model.config, "snapkv", 20, window=8)
        with mode():
            made.append([forward(input_ids=part, past_key_values=cache).logits for part in (ids, ids[:, :1], ids[:, 1:2])])
    for other in made[1:]:
        assert all(torch.equal(x, y) for x, y in zip(made[0], other))


@pytest.mark.parametrize("count", [5, 300])
def test_a_child_of_fork_goes_on_with_its_parents_executor(count):
    """5 tokens run on the calling thread alone: then the child is the first whose library asks who was forked."""
    script = textwrap.dedent(f"""
        import os, signal, sys, torch, transformers
        sys.path.insert(0, {str(HERE.parent)!r})
        from tessera_torch import TesseraCache
        torch.set_num_threads(2)
        config = transformers.LlamaConfig(hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                          num_key_value_heads=1, head_dim=64, vocab_size=128, max_position_embeddings=1024)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera").eval()
        def read(tokens):
            with torch.no_grad():
                model(torch.full((1, tokens), 5), past_key_values=TesseraCache(model.config))
        read({count})
        torch.set_num_threads(1)
        child = os.fork()
        if child == 0:
            signal.alarm(300)
            read(600)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o", "quest", "rocketkv", "mosaickv", "loopserve", "tangram"])
def test_a_saved_cache_goes_on_with_the_answer(method, tmp_path):
    model, inputs = small_model(), padded([[3 + t % 100 for t in range(length)] for length in (90, 60)])
    cache = TesseraCache(model.config, method, **({} if method in ("full", "loopserve") else {"budget": 48}))
    first = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, **GREEDY)
    torch.save({"cache": cache}, tmp_path / "cache")
    twin = torch.load(tmp_path / "cache", weights_only=False)["cache"]
    again = pickle.loads(pickle.dumps(cache))
    kept = [[[list(head) for head in row] for row in one.kept_positions(1)] for one in (cache, twin)]
    assert twin.get_seq_length() == cache.get_seq_length() and kept[0] == kept[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long)], dim=1)
    answers = [model.generate(first, attention_mask=mask, past_key_values=one, max_new_tokens=9, **GREEDY) for one in (cache, twin, again)]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


def test_a_saved_cache_goes_on_in_another_process(tmp_path):
    model, ids = small_model(), tokens(70)
    cache = TesseraCache(model.config, "snapkv", 32)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
    torch.save((cache, first, model.state_dict()), tmp_path / "session")
    want = model.generate(first, past_key_values=cache, max_new_tokens=7, **GREEDY)
    script = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
        import torch
        from test_use import GREEDY, small_model
        cache, first, weights = torch.load({str(tmp_path / "session")!r}, weights_only=False)
        model = small_model()
        model.load_state_dict(weights)
        print(model.generate(first, past_key_values=cache, max_new_tokens=7, **GREEDY).tolist())
    """)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip().splitlines()[-1] == str(want.tolist())


def test_what_cannot_be_saved_or_loaded_is_refused(monkeypatch):
    model = small_model()
    cache = TesseraCache(model.config, "snapkv", 32)
    empty = pickle.loads(pickle.dumps(cache))
    assert empty.get_seq_length() == 0
    model.generate(tokens(40), past_key_values=empty, max_new_tokens=3, **GREEDY)
    with torch.no_grad():
        model(tokens(40), past_key_values=cache)
    with pytest.raises(ValueError, match="^the prompt has not ended; "):
        pickle.dumps(cache)
    cache.end_prompt()
    of, whole = cache._kinds.all[0], layer_kinds.Kind.__getstate__
    saved = cache._operators.save(of.handle)
    damaged = [saved[0].clone()]
    damaged[0][len(damaged[0]) // 2] ^= 1
    with monkeypatch.context() as patch:
        patch.setattr(layer_kinds.Kind, "__getstate__", lambda kind: {**whole(kind), "saved": damaged})
        pickled = pickle.dumps(cache)
    with pytest.raises(ValueError, match="^saved sequence is damaged; "):
        pickle.loads(pickled)
    with pytest.raises(ValueError, match="^saved sequence is damaged; "):
        cache._operators.load(of.handle, damaged)
    assert cache.get_seq_length() == 40
    assert all(torch.equal(a, b) for a, b in zip(saved, cache._operators.save(of.handle)))
