"""The mode `uneven`: heads that compete for a layer's budget, in vLLM's own blocks."""
import json
import random

import pytest
from conftest import BLOCK, document
from reference import expected
from tessera_vllm import plan, settings
from tessera_vllm.cpu import uneven

LENGTHS = (300, 517, 1000, 1333)


@pytest.fixture(scope="module", params=["ada_snapkv", "tangram", "tangram with a profile"])
def served(request, engine, reference, tmp_path_factory):
    """A server in fp32 whose steps are shorter than its prompts, and what it was asked for."""
    asked = {"mode": "uneven", "method": request.param.split()[0], "budget": 160}
    if "profile" in request.param:
        draw, path = random.Random(2), tmp_path_factory.mktemp("profile") / "profile.json"
        shares = [[round(draw.uniform(0.05, 0.5), 3) for _ in range(reference.kv_heads)]
                  for _ in range(reference.layers)]
        path.write_text(json.dumps({"budget": shares}))
        asked = {"mode": "uneven", "method": "tangram", "profile": str(path)}
    with engine(asked, dtype="float32", max_num_batched_tokens=700) as ours:
        yield asked, ours


def own_settings(asked, extra=None):
    return settings.for_request(settings.of_server({"tessera": asked}), {"tessera": extra} if extra else None)


def test_tokens_are_those_of_a_reference_that_has_no_blocks(served, model, tokenizer, reference):
    """Beside requests that stay whole, whose rows vLLM's own path attends in the same steps."""
    asked, ours = served
    prompts = [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]
    off = expected(reference, model, own_settings(asked, {"mode": "off"}), prompts, 40, BLOCK)
    for extra in [None] if "profile" in asked else [{"budget": budget} for budget in (32, 160, 400)]:
        before, own = ours.state().compactions, own_settings(asked, extra)
        tokens = ours.tokens(prompts * 2, new=40, extras=[extra] * 4 + [{"mode": "off"}] * 4)
        assert ours.state().compactions - before == sum(
            plan.schedule_of(own, len(prompt), BLOCK).next_compaction(0) is not None for prompt in prompts) > 0
        assert tokens[:4] == expected(reference, model, own, prompts, 40, BLOCK) and tokens[4:] == off


def test_heads_keep_unequal_numbers_and_no_page_has_two_owners(served, tokenizer):
    asked, ours = served
    prompts = [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]
    for number, prompt in enumerate(prompts):
        ours.add(f"own-{number}", prompt, 20)
    unequal = 0
    while ours.engine.has_unfinished_requests():
        ours.step()
        owned = set()
        for name, kept in ours.state().kept.items():
            blocks = ours.manager.req_to_blocks.get(name)
            if not blocks:
                continue
            unequal += int(kept.counts.max()) > int(kept.counts.min())
            held = {block.block_id for block in blocks[:kept.full] if not block.is_null}
            for layer in range(kept.counts.size(0)):
                for head, count in enumerate(kept.counts[layer].tolist()):
                    for page in kept.tables[layer, head, :count].tolist():
                        assert page // kept.counts.size(1) in held and (layer, page) not in owned
                        owned.add((layer, page))
    assert (unequal > 0) == (asked["method"] == "ada_snapkv" or "profile" in asked)


def test_needles_are_those_of_the_same_method_without_blocks(served, model, tokenizer, reference):
    """Blocks of one token: the budget exactly, as `tessera eval` has it."""
    asked, ours = served
    documents = [document(tokenizer, 1500, number) for number in range(8)]
    prompts = [prompt for prompt, _ in documents]
    extra = None if "profile" in asked else {"budget": 256}
    texts = [output.outputs[0].text for output in ours.run(prompts, new=6, extras=[extra] * 8)]
    right = [value in text for text, (_, value) in zip(texts, documents)]
    exact = [value in tokenizer.decode(one) for one, (_, value) in
             zip(expected(reference, model, own_settings(asked, extra), prompts, 6, 1), documents)]
    assert sum(right) >= sum(exact) - 1, (right, exact)  # whole blocks, where the budget exactly has single tokens
    print(f"{asked['method']}: {sum(right)} of 8 right, {sum(exact)} by the budget exactly")


def test_pages_are_shared_out_once():
    draw = random.Random(1)
    for _ in range(200):
        kv_heads, blocks = draw.randrange(1, 9), draw.sample(range(100), draw.randrange(1, 12))
        left, counts = kv_heads * len(blocks), []
        for _ in range(kv_heads):
            counts.append(draw.randrange(left + 1))
            left -= counts[-1]
        pages = uneven.shared_out(blocks, kv_heads, counts)
        assert [len(own) for own in pages] == counts
        every = [page for own in pages for page in own]
        assert len(set(every)) == len(every) and all(page // kv_heads in blocks for page in every)


def test_a_schedule_of_uneven_requests_is_one_of_compact_ones():
    of = lambda mode, method: plan.schedule_of(own_settings({"mode": mode, "method": method}), 1000, 32)
    one, other = of("uneven", "ada_snapkv"), of("compact", "snapkv")
    assert one.uneven and not other.uneven
    for position in range(1, 1100):
        assert one.dropped(position) == other.dropped(position)


def test_a_profile_says_how_many_blocks_stay():
    shares = ((0.25, 0.5, 0.01, 0.3), (0.1, 0.1, 0.1, 0.1))
    own = settings.Settings(mode="uneven", method="tangram", profile=shares)
    # Of 992 tokens in full blocks: 248 + 496 + the window's 32 + 298 = 1,074, which are 33 virtual pages, of 9 blocks.
    assert plan.kept_blocks(own, 1000, 32) == 9
    assert plan.kept_blocks(own, 31, 32) == 1 and plan.schedule_of(own, 40, 32).next_compaction(0) is None
