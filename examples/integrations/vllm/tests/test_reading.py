"""Steps that choose blocks: of a cache of which nothing is dropped (the mode `read`), or of what stays of a prompt
(`compact_and_read`)."""
import functools
import json

import pytest
import torch
from conftest import BLOCK, asking, document, kept_of
from reference import expected
from tessera_vllm import plan, settings

LENGTHS = (300, 517, 1000, 1333)
ASKED = asking("read", budget=160)
SERVERS = [ASKED, {**ASKED, "method": "hsa"}, asking("compact_and_read", budget=160),
           # Steps that choose by fewer channels than a key has.
           asking("compact_and_read", budget=160, parameters={"channels": 9, "max_new": 40})]


@pytest.fixture(scope="module", params=SERVERS, ids=lambda asked: asked["method"] + "-few" * ("parameters" in asked))
def asked(request):
    return request.param


@pytest.fixture(scope="module")
def served(engine, asked):
    """A server in fp32 whose steps are shorter than its prompts."""
    with engine(asked, dtype="float32", max_num_batched_tokens=700) as ours:
        yield ours


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]


def own_settings(asked, extra=None):
    return settings.for_request(settings.of_server({"tessera": asked}), {"tessera": extra} if extra else None)


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_a_reference_that_has_no_blocks(served, model, prompts, reference, asked):
    """Beside requests that stay whole, whose rows vLLM's own path attends in the same steps."""
    off = expected(reference, model, own_settings(asked, {"mode": "off"}), prompts, 40, BLOCK)
    state, compacted = served.state(), 0
    before = state.compactions
    for extra in (None, {"budget": 16}, {"budget": 64}, {"budget": 400}):
        tokens = served.tokens(prompts * 2, new=40, extras=[extra] * 4 + [{"mode": "off"}] * 4)
        assert tokens[:4] == expected(reference, model, own_settings(asked, extra), prompts, 40, BLOCK)
        assert tokens[4:] == off
        schedules = [state.operators.schedule(own_settings(asked, extra), len(prompt), BLOCK) for prompt in prompts]
        compacted += sum(schedule.compacts(schedule.prompt) for schedule in schedules)
    assert state.compactions - before == compacted and (compacted > 12) == (asked["mode"] == "compact_and_read")


def test_requests_of_other_budgets_come_and_go_in_one_batch(served, model, prompts, reference, asked):
    extras, news = ({"budget": 32}, {"budget": 200}, {"mode": "off"}, {"budget": 500}), (70, 20, 45, 33)
    for number, (prompt, extra, new) in enumerate(zip(prompts, extras, news)):
        served.add(f"comes-{number}", prompt, new, extra)
        for _ in range(6):
            served.step()
    while served.engine.has_unfinished_requests():
        served.step()
    for number, (prompt, extra, new) in enumerate(zip(prompts, extras, news)):
        assert tokens_of([served.outputs[f"comes-{number}"]]) == \
            expected(reference, model, own_settings(asked, extra), [prompt], new, BLOCK)


def test_a_long_prompt_and_a_small_budget_choose_by_fewer_channels(engine, model, tokenizer, reference):
    """By the plan: one batch has requests of other numbers of channels."""
    texts = [document(tokenizer, length, number)[0] for number, length in enumerate((2600, 3300, 700))]
    asked, extras = {**ASKED, "method": "hsa", "budget": 32}, [None, {"budget": 16}, {"budget": 96}]
    with engine(asked, dtype="float32") as ours:
        for number, (text, extra) in enumerate(zip(texts, extras)):
            ours.add(str(number), text, 20, extra)
        channels = set()
        while ours.engine.has_unfinished_requests():
            ours.step()
            channels.add(tuple(sorted(one.channels for one in ours.state().schedules.values())))
        tokens = [tokens_of([ours.outputs[str(number)]])[0] for number in range(3)]
    assert max(channels, key=len) == (38, 48, 64)
    for got, text, extra in zip(tokens, texts, extras):
        assert [got] == expected(reference, model, own_settings(asked, extra), [text], 20, BLOCK)


def test_needles_are_those_of_the_reference(served, model, tokenizer, reference, asked):
    documents = [document(tokenizer, 4000, number) for number in range(8)]
    prompts, extra = [prompt for prompt, _ in documents], {"budget": 256}
    outputs = served.run(prompts, new=6, extras=[extra] * 8)
    assert tokens_of(outputs)[:2] == expected(reference, model, own_settings(asked, extra), prompts[:2], 6, BLOCK)
    right = sum(value in output.outputs[0].text for output, (_, value) in zip(outputs, documents))
    print(f"{asked}: {right} of 8 right")
    assert right == 8


@pytest.fixture
def attended(monkeypatch):
    """The lengths of the sequences of one head that vLLM's kernel is given, call by call."""
    from vllm import _custom_ops as ops
    kernel, lengths = ops.cpu_attention_with_kv_cache, []

    @functools.wraps(kernel)
    def noted(**given):
        if given["key_cache"].size(1) == 1:
            lengths.append(given["seq_lens"].clone())
        return kernel(**given)

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", noted)
    return lengths


@pytest.mark.parametrize("mode", ["read", "compact_and_read"])
def test_steps_read_the_budget_and_the_newest_block_of_what_is_held(engine, tokenizer, attended, tmp_path, mode):
    """rocketkv: half of the budget, of what the plan keeps of a prompt; the other half stands for the estimate."""
    lengths, new, budget = (2048, 2600, 3299, 4000), 40, 256
    figures, drops = tmp_path / "figures.jsonl", mode == "compact_and_read"
    with engine(asking(mode, budget=budget, figures=str(figures))) as ours:
        for number, length in enumerate(lengths):
            ours.add(str(number), document(tokenizer, length, number)[0], new)
        while ours.engine.has_unfinished_requests():
            ours.step()
            for name, request in ours.scheduler.requests.items():
                blocks, stored = ours.manager.req_to_blocks[name], request.num_computed_tokens
                held = sum(not block.is_null for block in blocks)
                own = kept_of(request.num_prompt_tokens, budget)
                if drops and stored > request.num_prompt_tokens:
                    tail = stored - request.num_prompt_tokens // BLOCK * BLOCK
                    exactly = plan.blocks_for(own, BLOCK) + plan.blocks_for(tail, BLOCK)
                    assert held == exactly <= 1.05 * plan.blocks_for(own + tail, BLOCK) + 1
                elif not drops:
                    assert held == len(blocks) >= plan.blocks_for(stored, BLOCK)
        state = ours.state()
        assert state.compactions == (len(lengths) if drops else 0) and ours.held() == 0
        lines = [json.loads(line) for line in figures.read_text().splitlines()]
        layers, kv_heads = len(state.layers), state.operators.model.kv_heads
    read = budget // 2 if drops else budget
    assert all(int(call.max()) <= read + BLOCK and int(call.min()) > read for call in attended)
    assert sum(call.numel() for call in attended) == len(lengths) * (new - 1) * layers * kv_heads
    assert sum(int(call.sum()) for call in attended) == \
        sum(line["tokens_read_at_steps"] for line in lines) * layers * kv_heads
    for line in lines:
        assert line["blocks_held"] + line["blocks_freed"] == line["blocks_of_all_tokens"]
        assert (line["blocks_freed"] > 0) == drops
        assert line["tokens_read_at_steps"] <= (read + BLOCK) * (new - 1) < line["tokens_stored_at_steps"] / 5


def check_index(ours):
    """Of every full block that a request holds: the smallest and the largest keys that lie in it."""
    from tessera_vllm.cpu import layout
    state, full = ours.state(), set()
    for name, request in ours.scheduler.requests.items():
        blocks = ours.manager.req_to_blocks.get(name, ())
        full |= {block.block_id for block in blocks[:request.num_computed_tokens // BLOCK] if not block.is_null}
    full = torch.tensor(sorted(full), dtype=torch.long)
    for name, number in state.layers.items():
        keys = layout.pages(ours.caches()[number])[0][full]
        index = state.indices[name].keys[full]
        assert torch.equal(index[:, :, 0], keys.amin(1)) and torch.equal(index[:, :, 1], keys.amax(1))
    return full.numel()


@pytest.mark.parametrize("mode", ["read", "compact_and_read"])
@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": True}, {"num_gpu_blocks_override": 118}], ids=str)
def test_every_full_block_is_indexed_by_whoever_fills_it(engine, tokenizer, options, mode):
    texts = [document(tokenizer, length, number)[0] for number, length in enumerate((1000, 1100, 1030, 1060))]
    new = 200 if "num_gpu_blocks_override" in options else 60
    with engine(asking(mode, budget=96), max_model_len=2048, max_num_batched_tokens=700, **options) as ours:
        for number, text in enumerate(texts + [text[:700] + text[:50] for text in texts]):
            ours.add(str(number), text, new, {"mode": "off"} if number % 3 == 2 else None)
            for _ in range(4):
                ours.step()
        checked = 0
        while ours.engine.has_unfinished_requests():
            ours.step()
            checked += check_index(ours)
        assert checked > 1000
        assert (ours.preemptions > 0) == ("num_gpu_blocks_override" in options)
        assert (ours.state().compactions > 0) == (mode == "compact_and_read")


def test_a_second_question_hits_every_whole_block_of_the_prompt(engine, tokenizer):
    first = [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]
    other = [document(tokenizer, length, number, asked="bold anchor")[0] for number, length in enumerate(LENGTHS)]
    options = {"dtype": "float32"}
    with engine(ASKED, **options) as without:
        wanted = [without.tokens(first, 70), without.tokens(other)]
    with engine(ASKED, enable_prefix_caching=True, **options) as ours:
        outputs = ours.run(first, 70)
        assert tokens_of(outputs) == wanted[0]
        again = ours.run(first, 70)
        assert tokens_of(again) == wanted[0]
        assert [output.num_cached_tokens for output in again] == [(len(text) - 1) // BLOCK * BLOCK for text in first]
        second = ours.run(other)
        assert tokens_of(second) == wanted[1]
        common = [next(at for at, (a, b) in enumerate(zip(x, y)) if a != b) for x, y in zip(first, other)]
        assert [output.num_cached_tokens for output in second] == [at // BLOCK * BLOCK for at in common]
        # What was computed by steps that read a part is nobody else's.
        longer = [text + tokens for text, tokens in zip(first, wanted[0])]
        hits = [output.num_cached_tokens for output in ours.run(longer, 1, extras=[{"mode": "off"}] * 4)]
        assert hits == [len(text) // BLOCK * BLOCK for text in first]


def test_the_pool_leaves_the_index_its_memory(engine, monkeypatch):
    from vllm.v1.worker.cpu_worker import CPUWorker
    available = 256 << 20
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda self: available)
    with engine({**ASKED, "budget": 64}) as ours:
        ours.tokens([list(range(1, 65))], 2)
        index = [one.keys.nbytes for one in ours.state().indices.values()]
        pool = [cache.nbytes for cache in ours.caches()]
        assert len(index) == len(pool) and all(one == cache // BLOCK for one, cache in zip(index, pool))
        assert 0.99 * available < sum(index) + sum(pool) <= available
