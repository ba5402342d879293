"""Caches on a GPU: what the CPU's answer, PyTorch's memory, steps in CUDA graphs. Skipped where there is no GPU."""
import copy
import gc
import statistics

import pytest
import sentencepiece
import tessera_torch
import torch
import transformers
from conftest import MODEL, padded, profile_of
from tessera_torch import CapturedStep, TesseraCache, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
BUDGET, NEW = 64, 16  # tokens
LONGEST = 2048


def options_of(method, config):
    """What test prompts of up to 500 tokens and short answers need of a method."""
    options = {} if method == "full" else {"budget": BUDGET}
    options["profile"] = profile_of(method, config.num_hidden_layers, config.num_key_value_heads)
    lines = build.operators().parameters(str(build.library(method, torch.bfloat16, 64, "cuda"))).splitlines()
    names = {line.split("\t")[0] for line in lines}
    options.update({name: 16 for name in ("max_new", "window") if name in names})
    return options


def skip_what_does_not_run(method):
    """A policy may have a body for the host alone."""
    try:
        model, tokenizer = small_model(), sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))
        cache = TesseraCache(model.config, method, max_length=256, **options_of(method, model.config)).read_text(model, tokenizer)
        with torch.no_grad():
            model(tokens(40), past_key_values=cache)
    except ValueError as problem:
        if "one of its policies says host_only" not in str(problem):
            raise
        pytest.skip(str(problem))


def shipped(device, dtype):
    """The shipped model, whose weights are bf16; in fp32 they are the same numbers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation="tessera")
    return model.to(device, dtype).eval()


@pytest.fixture(scope="module")
def on_cpu():
    return shipped("cpu", torch.bfloat16), shipped("cpu", torch.float32)


@pytest.fixture(scope="module")
def model():
    return shipped("cuda", torch.bfloat16)


def small_model(dtype=torch.bfloat16):
    torch.manual_seed(2)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, head_dim=64, vocab_size=4096, max_position_embeddings=4096)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera").to("cuda", dtype).eval()


def tokens(count, batch=1):
    return torch.randint(3, 128, (batch, count), device="cuda")


def logits_of(model, prompt, answer, cache):
    """Of a prompt's last token and of every token of an answer that is given."""
    with torch.no_grad():
        made = [model(prompt.to(model.device), past_key_values=cache).logits[0, -1]]
        for token in answer:
            made.append(model(token.reshape(1, 1).to(model.device), past_key_values=cache).logits[0, -1])
    return torch.stack(made).float().cpu()


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def compare(method, rows, tokenizer, ours, reference, exact):
    """By prompt, of `ours` and of `reference` against `exact`: relative error of logits, and whether tokens are the same."""
    options, result = options_of(method, exact.config), []
    for row in rows:
        prompt, logits, generated = torch.tensor([row]), [], []
        for model in (exact, ours, reference):
            cache = TesseraCache(model.config, method, max_length=LONGEST, **options).read_text(model, tokenizer)
            ids = model.generate(prompt.to(model.device), past_key_values=cache, max_new_tokens=NEW, **GREEDY)
            generated.append(ids[0, len(row):].cpu())
            cache.reset()
            logits.append(logits_of(model, prompt, generated[0], cache))
        result.append((relative(logits[1], logits[0]), relative(logits[2], logits[0]),
                       torch.equal(generated[1], generated[0]), torch.equal(generated[2], generated[0])))
    return result


def test_answers_are_those_of_the_cpu(model, on_cpu, prompts, tokenizer, method):
    """As near to the CPU in fp32 as the CPU in bf16 is: by about 2e-2 with `full`, and more where a rounding chooses."""
    skip_what_does_not_run(method)
    compared = compare(method, prompts[1:48:4], tokenizer, model, *on_cpu)
    ours, own = (statistics.geometric_mean(one[i] for one in compared) for i in (0, 1))
    same, own_same = (sum(one[i] for one in compared) for i in (2, 3))
    print(f"{method}: relative error of logits against the CPU in fp32: CUDA {ours:.1e}, CPU in bf16 {own:.1e}; the same "
          f"tokens for {same} and {own_same} of {len(compared)} prompts")
    assert ours < 1.5 * own
    assert same >= own_same - len(compared) / 4
    if method == "full":
        assert same > 0.7 * len(compared)


@pytest.mark.parametrize("padded_batch", [False, True], ids=["one", "padded batch"])
def test_a_captured_step_is_the_step(model, prompts, tokenizer, method, padded_batch):
    """Bit for bit, over two turns and a change of the budget."""
    skip_what_does_not_run(method)
    rows = prompts[3:6] if padded_batch else [max(prompts, key=len)]
    more = torch.randint(3, 2000, (len(rows), 9), device="cuda")
    steps = torch.randint(3, 2000, (40, len(rows), 1), device="cuda")
    inputs = {name: value.cuda() for name, value in padded(rows).items()}

    def conversation(captured):
        cache = TesseraCache(model.config, method, max_length=LONGEST, **options_of(method, model.config)).read_text(model, tokenizer)
        one = CapturedStep(model, cache)
        mask, made, kept = inputs["attention_mask"], [], []
        with torch.no_grad():
            position = (mask.cumsum(1) - 1).clamp(min=0)
            model(**inputs, position_ids=position, past_key_values=cache)
            for turn in range(3):
                for token in steps:
                    mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
                    position = mask.sum(1, keepdim=True) - 1
                    logits = (one.step(token, position) if captured else
                              model(token, position_ids=position, past_key_values=cache).logits)
                    made.append(logits.clone())
                kept.append(cache.kept_positions(2)[0])
                if turn == 0:
                    position = mask.sum(1, keepdim=True) + torch.arange(9, device="cuda")
                    mask = torch.cat([mask, mask.new_ones(len(rows), 9)], 1)
                    model(more, attention_mask=mask, position_ids=position, past_key_values=cache)
                elif turn == 1 and method != "full":
                    cache.set_budget(BUDGET - 16)
        return made, kept, cache.bytes()

    want, got = conversation(False), conversation(True)
    assert all(torch.equal(a, b) for a, b in zip(want[0], got[0], strict=True))
    assert all(torch.equal(a, b) for x, y in zip(want[1], got[1]) for a, b in zip(x, y, strict=True))
    assert want[2] == got[2]


def test_a_captured_step_needs_a_prompt_and_one_token_a_sequence(model, prompts):
    cache = TesseraCache(model.config, max_length=LONGEST)
    one = CapturedStep(model, cache)
    with pytest.raises(ValueError, match="the cache is empty; expected a prompt in it"):
        one.step(tokens(1))
    with torch.no_grad():
        model(torch.tensor([prompts[4]], device="cuda"), past_key_values=cache)
    with pytest.raises(ValueError, match="shape of a step's tokens is .1, 2.; expected .1, 1.; "):
        one.step(tokens(2))
    for _ in range(4):
        assert one.step(tokens(1)).shape == (1, 1, model.config.vocab_size)
    assert cache.get_seq_length() == len(prompts[4]) + 4


def test_pytorch_s_figures_show_the_cache():
    """The cache's memory is the allocator's, all of it, and comes back."""
    model, ids = small_model(), tokens(300)

    def run(cache):
        with torch.no_grad():
            model(ids, past_key_values=cache)  # nobody says that the prompt ends here: there is room for all of it in every layer
            model(tokens(1), past_key_values=cache)
        torch.cuda.synchronize()

    run(TesseraCache(model.config, "snapkv", 64, 512))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    longest = 1 << 20
    cache = TesseraCache(model.config, "snapkv", 64, longest)
    run(cache)
    held = torch.cuda.memory_allocated() - allocated
    row = 2 * 64 * 2 + 4  # K, V and a position
    assert held > 2 * longest * row > cache.bytes() > 0
    assert held < 5 * longest * row  # a third place to move in, and scores
    beside = (free - torch.cuda.mem_get_info()[0]) - (torch.cuda.memory_reserved() - reserved)
    assert abs(beside) < 16 << 20, f"{beside} bytes come from elsewhere"
    twin = copy.deepcopy(cache)
    assert torch.cuda.memory_allocated() - allocated > 1.9 * held
    del twin
    cache.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated


def test_a_prompt_in_one_call_takes_memory_for_one_whole_layer():
    """From generate, or announced; answers are those of a cache with room for everything."""
    model, ids, longest = small_model(), tokens(3000), 1 << 20
    answer = tokens(1100).split(1, dim=1)  # more than there is room for

    def memory_of(call, cache):
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call(cache)
        return result, torch.cuda.max_memory_allocated() - before

    def announced(cache, parts):
        with torch.no_grad(), cache.prompt(ids.shape[1]):
            for part in ids.split(ids.shape[1] // parts, dim=1):
                model(part, past_key_values=cache)
        with torch.no_grad():
            return [model(token, past_key_values=cache).logits for token in answer]

    made = [TesseraCache(model.config, "snapkv", 64, longest) for _ in range(3)]
    want, ample = memory_of(lambda cache: announced(cache, 2), made[0])
    got, fitted = memory_of(lambda cache: announced(cache, 1), made[1])
    _, generated = memory_of(lambda cache: model.generate(ids, past_key_values=cache, max_new_tokens=8, **GREEDY), made[2])
    assert fitted < ample / 8 and generated < ample / 8
    assert all(torch.allclose(a, b, atol=0.03) for a, b in zip(got, want))
    assert [len(head) for head in made[1].kept_positions(0)[0]] == [64 + 1100]


@pytest.mark.parametrize("captured", [False, True], ids=["called", "captured"])
@pytest.mark.parametrize("method", ["snapkv", "ada_snapkv", "rocketkv", "h2o"])
def test_what_is_dropped_becomes_free_memory(method, captured):
    """And changes no answer, also where later calls need more than was left."""
    model, ids, longest = small_model(), tokens(5000, 2), 1 << 17
    options = {} if method == "h2o" else {"window": 16}

    def call(fits):
        gc.collect()
        before, made, held = torch.cuda.memory_allocated(), [], []
        cache = TesseraCache(model.config, method, 256, longest, **options)
        one = CapturedStep(model, cache)
        with torch.no_grad():
            for turn in range(2):
                for chunk in ids.split(1250 - 250 * turn, 1)[:4 - 2 * turn]:
                    made.append(model(chunk, past_key_values=cache).logits[:, -1].clone())
                cache.end_prompt()
                if fits:
                    cache.fit_memory(20)
                    held.append(torch.cuda.memory_allocated() - before - sum(x.nbytes for x in made))
                for i in range(30):
                    token = ids[:, i:i + 1]
                    logits = one.step(token) if captured else model(token, past_key_values=cache).logits
                    made.append(logits[:, -1].clone())
        return made, held, cache.bytes()

    (want, _, want_bytes), (got, held, got_bytes) = call(False), call(True)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert want_bytes == got_bytes
    if method.endswith("snapkv"):  # others have scores or an index beside the rows, of fixed size
        whole = 2 * 2 * longest * 256  # layers, sequences, tokens, bytes of a row
        print(f"{method}: {held} bytes held, {got_bytes} in use, {whole} whole")
        assert max(held) < whole / 3


def test_memory_returns_after_many_calls():
    model, step = small_model(), None
    for i in range(200):
        if i == 20:
            gc.collect()
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        cache = TesseraCache(model.config, ("snapkv", "rocketkv_mt", "h2o")[i % 3], 32, 1024,
                             **({} if i % 3 == 2 else {"window": 8}))
        inputs = padded([[3 + (i + t) % 100 for t in range(length)] for length in (300, 80 + i % 50)])
        inputs = {name: value.cuda() for name, value in inputs.items()}
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=3, **GREEDY)
        if i % 10 == 0:
            step = CapturedStep(model, cache)
            for _ in range(3):
                step.step(out[:, -1:])
    del cache, step, inputs, out
    gc.collect()
    assert torch.cuda.memory_allocated() <= before[0]
    assert torch.cuda.memory_reserved() <= before[1] + (64 << 20)  # graphs have pools of their own


@pytest.mark.parametrize("method", ["full", "ada_snapkv", "rocketkv"])
def test_another_stream_is_as_good(method):
    """Also while PyTorch hands memory from one stream to the other."""
    model, ids = small_model(), tokens(700)

    def call():
        cache = TesseraCache(model.config, method, None if method == "full" else 64, 1024)
        with torch.no_grad():
            made = [model(part, past_key_values=cache).logits[:, -1] for part in ids.split(100, 1)]
            made += [model(ids[:, i:i + 1], past_key_values=cache).logits[:, -1] for i in range(20)]
        return torch.stack(made)

    want, streams = call(), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 3]):
            junk = [torch.full((1 << 18,), torch.nan, device="cuda") for _ in range(20)]
            del junk
            got = call()
        streams[turn % 3].synchronize()
        assert torch.equal(want, got)


@pytest.mark.parametrize("what", ["full", "quest"])
def test_memory_that_runs_out_leaves_model_and_cache_usable(what):
    model, ids = small_model(), tokens(60)
    budget, longest = None if what == "full" else 64, 1 << 22
    # of the same length: for how many tokens there is room decides how an attention is split, and so how it is rounded
    want = model.generate(ids, past_key_values=TesseraCache(model.config, what, budget, longest), max_new_tokens=8, **GREEDY)
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match="device memory is .* MiB more; expected the .* MiB that are free"):
        model.generate(ids, past_key_values=TesseraCache(model.config, what, budget, 1 << 30), max_new_tokens=8, **GREEDY)
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated
    cache = TesseraCache(model.config, what, budget, longest)  # 3 GB
    torch.cuda.empty_cache()
    hog = torch.empty((torch.cuda.mem_get_info()[0] >> 21 << 21) - (1 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(ids, past_key_values=cache, max_new_tokens=8, **GREEDY)
    assert torch.cuda.memory_allocated() == allocated + hog.numel()
    del hog
    torch.cuda.empty_cache()
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=8, **GREEDY), want)


def test_errors_within_a_call_leave_the_cache_usable():
    model, ids = small_model(), tokens(60)
    want = model.generate(ids, past_key_values=TesseraCache(model.config, max_length=512), max_new_tokens=8, **GREEDY)
    cache = TesseraCache(model.config, max_length=68)
    half = model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)
    one = CapturedStep(model, cache)
    with torch.no_grad(), pytest.raises(ValueError, match="tokens of the conversation are 73; expected at most 68"):
        model(tokens(10), past_key_values=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="dtype, device and batch are .*make a cache for each"):
        model(tokens(1, 2), past_key_values=cache)

    def fail(*_):
        raise KeyboardInterrupt

    assert torch.equal(model.generate(half, past_key_values=copy.deepcopy(cache), max_new_tokens=4, **GREEDY), want)
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        one.step(half[:, -1:])
    hook.remove()
    with pytest.raises(ValueError, match="half way through a call that failed"):
        one.step(half[:, -1:])
    cache.reset()
    assert torch.equal(model.generate(half, past_key_values=cache, max_new_tokens=4, **GREEDY), want)
    with pytest.raises(ValueError, match="dtype is torch.float32; expected torch.bfloat16 or torch.float16 on CUDA"):
        small_model(torch.float32).generate(ids, past_key_values=TesseraCache(model.config), max_new_tokens=2, **GREEDY)


def test_a_method_that_does_not_run_here_says_so():
    model = small_model()
    hosted = build.Policy("struct hosted : uniform {\n  static constexpr bool host_only = true;\n};\n",
                          "recipe<retain<observation_window, hosted, top_tokens>, dense<T, D>, retrieve_all, dense_decode, once>")
    with pytest.raises(ValueError, match="tessera: the CUDA backend does not run this: one of its policies says host_only"):
        model.generate(tokens(60), past_key_values=TesseraCache(model.config, hosted, 32, 512), **GREEDY)


def test_no_cache_is_made_while_a_graph_is_captured():
    ops, path = build.operators(), build.library("full", torch.bfloat16, 64, "cuda")
    create = lambda: ops.create(str(path), 2, 2, 1, [], 0, 0.0, 0.0, None, [], 1, 256, None, torch.device("cuda", 0))
    ops.destroy(create().item())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="a CUDA graph is being captured; expected none while a cache takes memory"):
            create()
        torch.zeros(1, device="cuda").add_(1)
    graph.replay()
    torch.cuda.synchronize()
