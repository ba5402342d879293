"""The mode `uneven`: heads that compete for a layer's budget, in vLLM's own blocks."""
import random

import pytest
from conftest import BLOCK, document
from reference import expected
from tessera_vllm import plan, settings
from tessera_vllm.cpu import uneven

LENGTHS = (300, 517, 1000, 1333)
METHODS = sorted(settings.UNEVEN)


@pytest.fixture(scope="module", params=METHODS)
def served(request, engine):
    """A method, and a server of it in fp32, whose steps are shorter than its prompts."""
    with engine({"mode": "uneven", "method": request.param, "budget": 160}, dtype="float32",
                max_num_batched_tokens=700) as ours:
        yield request.param, ours


@pytest.mark.parametrize("budget", [32, 160, 400])
def test_tokens_are_those_of_a_reference_that_has_no_blocks(served, model, tokenizer, reference, budget):
    """Beside requests that stay whole, whose rows vLLM's own path attends in the same steps."""
    method, ours = served
    prompts = [document(tokenizer, length, number)[0] for number, length in enumerate(LENGTHS)]
    before = ours.state().compactions
    asked = {"budget": budget}
    tokens = ours.tokens(prompts * 2, new=40, extras=[asked] * 4 + [{"mode": "off"}] * 4)
    assert ours.state().compactions - before == sum(len(prompt) // BLOCK > -(-budget // BLOCK) for prompt in prompts)
    for extra, got in ((asked, tokens[:4]), ({"mode": "off"}, tokens[4:])):
        own = settings.of_server({"tessera": {"mode": "uneven", "method": method, **extra}})
        assert got == expected(reference, model, own, prompts, 40, BLOCK)


def test_heads_keep_unequal_numbers_and_no_page_has_two_owners(served, tokenizer):
    _, ours = served
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
            last = {block.block_id for block in blocks[kept.full - 160 // BLOCK:kept.full]}
            for layer in range(kept.counts.size(0)):
                for head, count in enumerate(kept.counts[layer].tolist()):
                    for page in kept.tables[layer, head, :count].tolist():
                        assert page // kept.counts.size(1) in last and (layer, page) not in owned
                        owned.add((layer, page))
    assert unequal > 0


def test_needles_are_those_of_the_same_method_without_blocks(served, model, tokenizer, reference):
    """Blocks of one token: the budget exactly, as `tessera eval` has it."""
    method, ours = served
    documents = [document(tokenizer, 1500, number) for number in range(8)]
    prompts = [prompt for prompt, _ in documents]
    texts = [output.outputs[0].text for output in ours.run(prompts, new=6, extras=[{"budget": 256}] * 8)]
    right = [value in text for text, (_, value) in zip(texts, documents)]
    own = settings.of_server({"tessera": {"mode": "uneven", "method": method, "budget": 256}})
    exact = [value in tokenizer.decode(one)
             for one, (_, value) in zip(expected(reference, model, own, prompts, 6, 1), documents)]
    assert sum(right) >= sum(exact) - 1, (right, exact)  # whole blocks, where the budget exactly has single tokens
    print(f"{method}: {sum(right)} of 8 right, {sum(exact)} by the budget exactly")


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
    of = lambda mode, method: plan.schedule_of(settings.of_server({"tessera": {"mode": mode, "method": method}}), 1000, 32)
    one, other = of("uneven", "ada_snapkv"), of("compact", "snapkv")
    assert one.uneven and not other.uneven
    for position in range(1, 1100):
        assert one.dropped(position) == other.dropped(position)
