"""The mode `read`: steps that choose blocks, in a cache of which nothing is dropped."""
import json

import pytest
import torch
from conftest import BLOCK, document
from reference import expected
from tessera_vllm import settings

LENGTHS = (300, 517, 1000, 1333)
ASKED = {"mode": "read", "method": "quest", "budget": 160}


@pytest.fixture(scope="module")
def served(engine):
    """A server in fp32 whose steps are shorter than its prompts."""
    with engine(ASKED, dtype="float32", max_num_batched_tokens=700) as ours:
        yield ours


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]


def own_settings(extra=None):
    return settings.for_request(settings.of_server({"tessera": ASKED}), {"tessera": extra} if extra else None)


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_a_reference_that_has_no_blocks(served, model, prompts, reference):
    """Beside requests that stay whole, whose rows vLLM's own path attends in the same steps."""
    off = expected(reference, model, own_settings({"mode": "off"}), prompts, 40, BLOCK)
    for extra in (None, {"budget": 1}, {"budget": 64}, {"budget": 400}):
        tokens = served.tokens(prompts * 2, new=40, extras=[extra] * 4 + [{"mode": "off"}] * 4)
        assert tokens[:4] == expected(reference, model, own_settings(extra), prompts, 40, BLOCK)
        assert tokens[4:] == off


def test_requests_of_other_budgets_come_and_go_in_one_batch(served, model, prompts, reference):
    extras, news = ({"budget": 32}, {"budget": 200}, {"mode": "off"}, {"budget": 500}), (70, 20, 45, 33)
    for number, (prompt, extra, new) in enumerate(zip(prompts, extras, news)):
        served.add(f"comes-{number}", prompt, new, extra)
        for _ in range(6):
            served.step()
    while served.engine.has_unfinished_requests():
        served.step()
    for number, (prompt, extra, new) in enumerate(zip(prompts, extras, news)):
        assert tokens_of([served.outputs[f"comes-{number}"]]) == \
            expected(reference, model, own_settings(extra), [prompt], new, BLOCK)


def test_needles_are_those_of_the_reference(served, model, tokenizer, reference):
    documents = [document(tokenizer, 4000, number) for number in range(6)]
    prompts, extra = [prompt for prompt, _ in documents], {"budget": 256}
    outputs = served.run(prompts, new=6, extras=[extra] * 6)
    assert tokens_of(outputs) == expected(reference, model, own_settings(extra), prompts, 6, BLOCK)
    right = sum(value in output.outputs[0].text for output, (_, value) in zip(outputs, documents))
    assert right == 6


@pytest.fixture
def attended(monkeypatch):
    """The lengths of the sequences of one head that vLLM's kernel is given, call by call."""
    from vllm import _custom_ops as ops
    kernel, lengths = ops.cpu_attention_with_kv_cache, []

    def noted(**given):
        if given["key_cache"].size(1) == 1:
            lengths.append(given["seq_lens"].clone())
        return kernel(**given)

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", noted)
    return lengths


def test_steps_read_the_budget_and_the_newest_block_and_nothing_is_freed(engine, tokenizer, attended, tmp_path):
    lengths, new, budget = (2048, 2600, 3299, 4000), 40, 256
    figures = tmp_path / "figures.jsonl"
    with engine({**ASKED, "budget": budget, "figures": str(figures)}) as ours:
        for number, length in enumerate(lengths):
            ours.add(str(number), document(tokenizer, length, number)[0], new)
        while ours.engine.has_unfinished_requests():
            ours.step()
            for name, request in ours.scheduler.requests.items():
                held = ours.manager.req_to_blocks[name]
                assert len(held) >= -(-request.num_computed_tokens // BLOCK)
                assert not any(block.is_null for block in held)
        state = ours.state()
        assert state.compactions == 0 and ours.held() == 0
        lines = [json.loads(line) for line in figures.read_text().splitlines()]
        layers, kv_heads = len(state.layers), state.operators.model.kv_heads
    assert all(int(call.max()) <= budget + BLOCK and int(call.min()) > budget for call in attended)
    assert sum(call.numel() for call in attended) == len(lengths) * (new - 1) * layers * kv_heads
    assert sum(int(call.sum()) for call in attended) == \
        sum(line["tokens_read_at_steps"] for line in lines) * layers * kv_heads
    for line in lines:
        assert line["blocks_freed"] == 0 and line["blocks_held"] == line["blocks_of_all_tokens"]
        assert line["tokens_read_at_steps"] <= (budget + BLOCK) * (new - 1) < line["tokens_stored_at_steps"] / 5


def check_index(ours):
    """Of every full block that a request holds: the smallest and the largest keys that lie in it."""
    from tessera_vllm.cpu import layout
    state, full = ours.state(), set()
    for name, request in ours.scheduler.requests.items():
        blocks = ours.manager.req_to_blocks.get(name, ())
        full |= {block.block_id for block in blocks[:request.num_computed_tokens // BLOCK]}
    full = torch.tensor(sorted(full), dtype=torch.long)
    for name, number in state.layers.items():
        keys = layout.pages(ours.caches()[number])[0][full]
        index = state.indices[name].keys[full]
        assert torch.equal(index[:, :, 0], keys.amin(1)) and torch.equal(index[:, :, 1], keys.amax(1))
    return full.numel()


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": True}, {"num_gpu_blocks_override": 118}], ids=str)
def test_every_full_block_is_indexed_by_whoever_fills_it(engine, tokenizer, options):
    texts = [document(tokenizer, length, number)[0] for number, length in enumerate((1000, 1100, 1030, 1060))]
    new = 200 if "num_gpu_blocks_override" in options else 60
    with engine({**ASKED, "budget": 96}, max_model_len=2048, max_num_batched_tokens=700, **options) as ours:
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
