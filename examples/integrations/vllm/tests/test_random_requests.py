"""1,120 requests of random lengths, budgets and modes, aborts in the middle, and a pool too small for all of them."""
import random

import pytest
import torch
from conftest import BLOCK, document

ENGINES = [
    {"mode": "compact", "method": "snapkv", "budget": 128, "parameters": {"window": 24, "pool": 5}},
    {"mode": "chunked", "method": "keydiff", "budget": 96, "chunk": 160},
    {"mode": "chunked", "method": "streaming_llm", "budget": 64, "chunk": 200},
    {"mode": "compact", "method": "chunkkv", "budget": 100, "parameters": {"window": 60}},
    {"mode": "chunked", "method": "lagkv", "budget": 128, "chunk": 130, "parameters": {"lag": 16}},
    {"mode": "chunked", "method": "expected_attention", "budget": 96, "chunk": 150},
    {"mode": "compact", "method": "h2o", "budget": 64},
    {"mode": "uneven", "method": "ada_snapkv", "budget": 100, "parameters": {"window": 24}},
    {"mode": "read", "method": "quest", "budget": 64},
    {"mode": "compact_and_read", "method": "rocketkv", "budget": 256, "parameters": {"max_new": 100, "window": 24}},
]
REQUESTS = 1120
EACH = -(-REQUESTS // len(ENGINES))  # of one engine


def random_request(draw, prompts, mode):
    prompt = draw.choice(prompts)
    prompt = prompt[:draw.randrange(1, len(prompt) + 1)] if draw.random() < 0.7 else prompt
    modes = ["chunked", "compact"] if mode in ("chunked", "compact") else [mode, mode]
    extra = draw.choice([None, None, {"mode": "off"}, {"budget": draw.randrange(1, 400)},
                         {"mode": modes[0], "chunk": draw.randrange(1, 500), "budget": draw.randrange(1, 200)},
                         {"mode": modes[1], "budget": draw.randrange(1, 100)}])
    longest = 300 if mode == "compact_and_read" else 100  # an answer must fill what its prompt has freed
    return prompt, draw.randrange(1, draw.choice([20, longest])), extra


def check_pool(ours):
    """Every block is free or held, as often as requests hold it, and never both."""
    held = {}
    for blocks in ours.manager.req_to_blocks.values():
        for block in blocks:
            if not block.is_null:
                held[block.block_id] = held.get(block.block_id, 0) + 1
    free = [block.block_id for block in ours.pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) and not set(free) & set(held)
    assert len(free) + len(held) == ours.pool.num_gpu_blocks - 1
    assert all(ours.pool.blocks[number].ref_cnt == count for number, count in held.items())


@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_random_requests_lose_no_block(engine, tokenizer, number):
    draw = random.Random(100 + number)
    prompts = [document(tokenizer, 900, shared)[0] for shared in range(6)]  # common prefixes
    # Few enough that an answer runs out of them.
    blocks = 36 if ENGINES[number]["method"] in ("h2o", "ada_snapkv", "quest", "rocketkv") else 52
    with engine(ENGINES[number], dtype="float32", num_gpu_blocks_override=blocks, max_model_len=1024, max_num_seqs=8,
                max_num_batched_tokens=draw.choice([256, 512, 1024]), enable_prefix_caching=number % 2 == 0) as ours:
        compute, spoilt = ours.runner.model.compute_logits, []

        def checked(*args, **kwargs):
            logits = compute(*args, **kwargs)
            spoilt.append(bool(torch.isnan(logits).any()))
            return logits

        ours.runner.model.compute_logits = checked
        wanted = ours.tokens(prompts[:1], 8)
        come, aborted, living = 0, 0, []
        while come < EACH or ours.engine.has_unfinished_requests():
            while come < EACH and len(living) < 12 and draw.random() < 0.6:
                prompt, new, extra = random_request(draw, prompts, ENGINES[number]["mode"])
                ours.add(f"r{come}", prompt, new, extra)
                living.append(f"r{come}")
                come += 1
            if living and draw.random() < 0.06:
                gone = draw.choice(living)
                ours.engine.abort_request([gone], internal=False)
                living.remove(gone)
                aborted += 1
            ours.step()
            living = [name for name in living if name not in ours.outputs]
            check_pool(ours)
        fewest = {"read": -1, "compact_and_read": 15}.get(ENGINES[number]["mode"], 50)
        assert ours.held() == 0 and aborted > 5 and not any(spoilt)
        assert ours.preemptions > 0 and ours.state().compactions > fewest
        assert ours.tokens(prompts[:1], 8) == wanted
        state, last = ours.state(), f"{len(ours.outputs) - 1}-0"
        assert all(name.startswith(last)
                   for table in (state.schedules, state.observed, state.kept) for name in table)
        print(f"{ENGINES[number]['method']}: {come} requests, {aborted} aborted, {ours.preemptions} preempted, "
              f"{state.compactions} compactions")
