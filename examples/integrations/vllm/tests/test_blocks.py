"""What requests hold, free and share; and that nothing which is free is read."""
import pytest
import torch
from conftest import BLOCK, asking, document, kept_of
from tessera_vllm import plan

LENGTHS = (2048, 2600, 3299, 4000)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("mode", ["compact", "chunked", "uneven"])
def test_what_is_held_while_decoding_is_what_was_kept(engine, prompts, mode):
    new = 40
    with engine(asking(mode, budget=256)) as ours:
        for number, prompt in enumerate(prompts):
            ours.add(str(number), prompt, new)
        while ours.engine.has_unfinished_requests():
            ours.step()
            for name, request in ours.scheduler.requests.items():
                if request.num_computed_tokens > request.num_prompt_tokens:  # at least one step behind its prompt
                    held = sum(not block.is_null for block in ours.manager.req_to_blocks[name])
                    tail = request.num_computed_tokens - request.num_prompt_tokens // BLOCK * BLOCK
                    assert held <= 1.05 * plan.blocks_for(256 + tail, BLOCK) + 1
        assert ours.held() == 0
        if mode == "chunked":  # budget and chunk of every request, and a block where they do not meet
            assert ours.most_held <= 4 * (256 // BLOCK + 1024 // BLOCK + 1)


@pytest.mark.parametrize("method", ["h2o", "tova"])
def test_methods_that_drop_in_steps_hold_no_more_however_long_an_answer_is(engine, prompts, method):
    with engine({"method": method, "budget": 256}, dtype="float32") as ours:
        for number, prompt in enumerate(prompts[:2]):
            ours.add(str(number), prompt, 4 * BLOCK)
        steps = 0
        while ours.engine.has_unfinished_requests():
            ours.step()
            for name, request in ours.scheduler.requests.items():
                if request.num_computed_tokens > request.num_prompt_tokens:
                    held = sum(not block.is_null for block in ours.manager.req_to_blocks[name])
                    # A block that fills, and the full one before it until the next step.
                    assert held <= 256 // BLOCK + 2
                    steps += 1
        assert steps > 6 * BLOCK and ours.state().compactions >= 2 * (1 + 3) and ours.held() == 0


def spoil_unread(ours, cache, index, name, kept):
    """NaN in a request's virtual pages that no head reads; returns how many these are."""
    blocks = ours.manager.req_to_blocks.get(name, ())[:kept.full]
    heads = cache.size(1)
    read = {int(page) for head in range(heads) for page in kept.tables[index, head, :int(kept.counts[index, head])]}
    unread = [page for block in blocks if not block.is_null
              for page in range(block.block_id * heads, (block.block_id + 1) * heads) if page not in read]
    cache.view(-1, *cache.shape[2:])[unread] = torch.nan
    return len(unread)


@pytest.mark.parametrize("mode", ["compact", "chunked", "uneven", "compact_and_read"])
def test_freed_blocks_of_nan_change_nothing(engine, prompts, mode):
    with engine(asking(mode, budget=256)) as ours:
        wanted = ours.tokens(prompts, new=24)
        seen, allocate = set(), ours.manager.allocate_new_blocks

        def allocated(*args):
            """A block that is handed out again is zeroed: what a kernel finds behind a request's last token is not
            ours."""
            blocks = allocate(*args)
            for cache in ours.caches():
                cache[[block.block_id for block in blocks]] = 0
            return blocks

        ours.manager.allocate_new_blocks = allocated
        names = [f"again-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts):
            ours.add(name, prompt, 24)
        spoilt, unread = 0, 0
        while ours.engine.has_unfinished_requests():
            ours.step()
            held = {block.block_id for blocks in ours.manager.req_to_blocks.values() for block in blocks}
            free = torch.tensor(sorted(seen - held), dtype=torch.long)
            for index, cache in enumerate(ours.caches()):
                cache[free] = torch.nan
                for name, kept in ours.state().kept.items():
                    unread += spoil_unread(ours, cache, index, name, kept)
            seen |= held
            spoilt = max(spoilt, len(free))
        assert spoilt >= 100 and (unread > 0) == (mode == "uneven")
        assert [list(ours.outputs[name].outputs[0].token_ids) for name in names] == wanted


def nothing_left(ours):
    """What the worker keeps of requests once they have ended. It hears of an end with the next step."""
    last = ours.run([[1, 5, 9]], 1)[0].request_id
    state = ours.state()
    return all(name.startswith(last) for table in (state.schedules, state.observed, state.kept)
               for name in table)


def cached(outputs):
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("mode", ["compact", "chunked", "uneven", "compact_and_read"])
def test_a_second_question_hits_what_was_not_overwritten(engine, tokenizer, prompts, mode):
    asked = [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]
    others = [document(tokenizer, length, number, asked="bold anchor")[0] for number, length in enumerate(LENGTHS)]
    tokens = lambda outputs: [list(output.outputs[0].token_ids) for output in outputs]
    options = {"dtype": "float32"}  # steps of other shapes round otherwise, and in bf16 another token may come of it
    with engine(asking(mode, budget=256), **options) as without:
        wanted = [tokens(without.run(asked)), tokens(without.run(others))]
    with engine(asking(mode, budget=256), enable_prefix_caching=True, **options) as ours:
        first, again, second = ours.run(asked), ours.run(asked), ours.run(others)
        assert cached(first) == [0, 0, 0, 0]
        kept = [plan.blocks_for(kept_of(len(prompt), 256), BLOCK) * BLOCK if mode == "compact_and_read" else 256
                for prompt in asked]
        most = [(1024 if mode == "chunked" else len(prompt) // BLOCK * BLOCK) - stays
                for prompt, stays in zip(asked, kept)]
        assert cached(again) == most
        common = [sum(1 for _ in iter_common(a, b)) // BLOCK * BLOCK for a, b in zip(asked, others)]
        assert cached(second) == [min(have, hit) for have, hit in zip(common, most)]
        assert tokens(first) == tokens(again) == wanted[0] and tokens(second) == wanted[1]
        assert ours.held() == 0


def iter_common(a, b):
    for x, y in zip(a, b):
        if x != y:
            return
        yield x


def test_requests_of_other_budgets_share_prefixes_and_overwrite_nothing_of_each_other(engine, prompts):
    prompt = prompts[1]
    extras = [{"mode": "off"}, {"budget": 128}, {"budget": 1024}, {"mode": "chunked", "chunk": 512, "budget": 64},
              {"mode": "off"}, {"budget": 128}, {"budget": 2560}, {"mode": "chunked", "chunk": 1024, "budget": 512}]
    with engine({"budget": 256}, dtype="float32") as without:
        wanted = [without.tokens([prompt], 24, [extra])[0] for extra in extras]
    with engine({"budget": 256}, enable_prefix_caching=True, dtype="float32") as ours:
        one_by_one = [ours.run([prompt], 24, [extra])[0] for extra in extras]
        full = (len(prompt) - 1) // BLOCK
        # What a request may take from the cache is bounded by what it overwrites itself, however much is there.
        assert cached(one_by_one) == [0, (full - 4) * BLOCK, (full - 32) * BLOCK, 512 - 64, full * BLOCK,
                                      (full - 4) * BLOCK, (full - 80) * BLOCK, 1024 - 512]
        assert [list(output.outputs[0].token_ids) for output in one_by_one] == wanted
        together = ours.tokens([prompt] * len(extras), 24, extras)
        assert together == wanted
        assert ours.held() == 0


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ["compact", "chunked", "uneven", "read", "compact_and_read"])
def test_preempted_requests_give_the_same_tokens_as_with_room(engine, tokenizer, mode, caching):
    asked = [document(tokenizer, length, number)[0] for number, length in enumerate((1000, 1100, 1030, 1060))]
    # A budget, and a pool that has room for four prompts which come one after the other, but not for their answers.
    budget, pool = {"read": (96, 118), "compact_and_read": (320, 106)}.get(mode, (768, 118))
    asked_of = asking(mode, budget=budget, chunk=896)
    options = {"max_model_len": 2048, "enable_prefix_caching": caching, "dtype": "float32"}
    with engine(asked_of, **options) as roomy:
        wanted = roomy.tokens(asked, new=200)
        assert roomy.preemptions == 0
    with engine(asked_of, num_gpu_blocks_override=pool, **options) as ours:
        assert ours.tokens(asked, new=200) == wanted
        assert ours.preemptions > 0
        assert ours.held() == 0 and nothing_left(ours)


def test_chunked_requests_are_admitted_with_what_they_ever_hold(engine, tokenizer):
    """Four prompts of 63 blocks in a pool of 80: each holds 17 blocks at most."""
    asked = [document(tokenizer, 2000, number)[0] for number in range(4)]
    asked_of = {"mode": "chunked", "budget": 256, "chunk": 256}
    with engine(asked_of) as roomy:
        wanted = roomy.tokens(asked, new=24)
    with engine(asked_of, num_gpu_blocks_override=81, max_model_len=2560) as ours:
        together = 0
        for number, prompt in enumerate(asked):
            ours.add(str(number), prompt, 24)
        while ours.engine.has_unfinished_requests():
            ours.step()
            together = max(together, len(ours.scheduler.running))
        assert [list(ours.outputs[str(number)].outputs[0].token_ids) for number in range(4)] == wanted
        assert together == 4 and ours.preemptions == 0


def test_nothing_is_left_of_a_request_that_is_aborted(engine, prompts):
    with engine({"mode": "chunked", "budget": 128, "chunk": 512}) as ours:
        wanted = ours.tokens(prompts[:1], 8)
        for steps in (1, 2, 3, 5, 9):
            ours.add(f"gone-{steps}", prompts[3], 30)
            for _ in range(steps):
                ours.step()
            ours.engine.abort_request([f"gone-{steps}"], internal=False)
            while ours.engine.has_unfinished_requests():
                ours.step()
            assert ours.held() == 0
        assert ours.tokens(prompts[:1], 8) == wanted
        assert nothing_left(ours)
