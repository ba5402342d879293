"""What compacted prompts answer: vLLM's own tokens where nothing is dropped, a reference's tokens where something
is."""
import random

import pytest
from conftest import BLOCK, asking, document
from reference import expected
from tessera_vllm import plan, settings

METHODS = sorted(settings.EVEN)


@pytest.fixture(scope="module")
def mixed(tokenizer):
    """64 prompts of 1 to 1,500 tokens."""
    draw = random.Random(5)
    lengths = [1, 2, 31, 32, 33, 63, 64, 65] + [draw.randrange(60, draw.choice([200, 600, 1500])) for _ in range(56)]
    return [document(tokenizer, max(length, 60), number)[0][:length] for number, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def of_vllm(engine, mixed):
    with engine(max_num_seqs=64) as own:
        return own.tokens(mixed, new=12)


@pytest.mark.parametrize("mode", [mode for mode in settings.MODES if mode != "off"])
def test_a_full_budget_gives_vllms_own_tokens(engine, mixed, of_vllm, mode):
    with engine(asking(mode, budget=4096), max_num_seqs=64) as ours:
        assert ours.tokens(mixed, new=12) == of_vllm
        assert ours.state().compactions == 0


def test_a_request_that_is_off_gives_vllms_own_tokens_beside_others(engine, mixed, of_vllm):
    off = [number % 2 == 0 for number in range(len(mixed))]
    with engine({"budget": 64}, max_num_seqs=64) as ours:
        tokens = ours.tokens(mixed, new=12, extras=[{"mode": "off"} if whole else None for whole in off])
        assert [one for one, whole in zip(tokens, off) if whole] == [one for one, whole in zip(of_vllm, off) if whole]
        assert ours.state().compactions == sum(len(prompt) >= 96 and not whole for prompt, whole in zip(mixed, off))


def compactions(own, prompt, new):
    """How often a request is compacted while so many tokens are stored: all but the newest."""
    schedule = plan.schedule_of(own, len(prompt), BLOCK)
    return sum(schedule.compacts(stored) for stored in range(1, len(prompt) + new))


@pytest.fixture(scope="module", params=METHODS)
def served(request, engine):
    """A method, and a server of it in fp32, whose steps are shorter than its prompts."""
    with engine({"method": request.param, "budget": 160}, dtype="float32", max_num_batched_tokens=700) as ours:
        yield request.param, ours


@pytest.mark.parametrize("mode", ["compact", "chunked"])
def test_tokens_are_those_of_a_reference_that_has_no_blocks(served, model, tokenizer, reference, mode):
    method, ours = served
    prompts = [document(tokenizer, length, number)[0] for number, length in enumerate((300, 517, 1000, 1333))]
    before = ours.state().compactions
    asked = {"mode": mode, "budget": 160, "chunk": 256}
    tokens = ours.tokens(prompts, new=12, extras=[asked] * 4)
    own = settings.of_server({"tessera": {"method": method, **asked}})
    expected_compactions = sum(compactions(own, prompt, 12) for prompt in prompts)
    assert ours.state().compactions - before == expected_compactions
    if method not in settings.DROPS_IN_STEPS:  # of 300, 517, 1,000 and 1,333 tokens
        assert expected_compactions == (4 if mode == "compact" else 2 + 2 + 4 + 6)
    assert tokens == expected(reference, model, own, prompts, 12, BLOCK)


def test_requests_that_come_and_go_while_others_are_observed_give_the_tokens_of_the_reference(
        engine, model, tokenizer, reference):
    """Each step of h2o is observed, and the rows of its batch change."""
    asked = {"method": "h2o", "budget": 96}
    prompts = [document(tokenizer, length, number)[0] for number, length in enumerate((300, 90, 517, 700, 333))]
    news = (90, 20, 40, 70, 110)
    with engine(asked, dtype="float32", max_num_batched_tokens=256) as ours:
        for number, (prompt, new) in enumerate(zip(prompts, news)):
            ours.add(str(number), prompt, new)
            for _ in range(7):
                ours.step()
        while ours.engine.has_unfinished_requests():
            ours.step()
        tokens = [list(ours.outputs[str(number)].outputs[0].token_ids) for number in range(5)]
    own = settings.of_server({"tessera": asked})
    for got, prompt, new in zip(tokens, prompts, news):
        assert got == expected(reference, model, own, [prompt], new, BLOCK)[0]


def test_needles_are_those_of_the_same_method_without_blocks(served, model, tokenizer, reference):
    """Blocks of one token: the budget exactly, and the whole prompt a candidate, as `tessera eval` has it."""
    method, ours = served
    documents = [document(tokenizer, 1500, number) for number in range(6)]
    prompts = [prompt for prompt, _ in documents]
    texts = [output.outputs[0].text for output in ours.run(prompts, new=6, extras=[{"budget": 256}] * 6)]
    right = [value in text for text, (_, value) in zip(texts, documents)]
    own = settings.of_server({"tessera": {"method": method, "budget": 256}})
    exact = [value in tokenizer.decode(one)
             for one, (_, value) in zip(expected(reference, model, own, prompts, 6, 1), documents)]
    # A rounded budget and a tail that always stays keep at least as much.
    assert all(ours or not theirs for ours, theirs in zip(right, exact)), (right, exact)
    print(f"{method}: {sum(right)} of 6 right, {sum(exact)} by the budget exactly")


@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_other_sizes_give_the_tokens_of_the_reference(engine, model, tokenizer, reference, block):
    prompts = [document(tokenizer, length, number)[0] for number, length in enumerate((517, 1000, 1333))]
    asked = {"mode": "chunked", "method": "snapkv", "budget": 200, "chunk": 300}
    with engine(asked, dtype="float32", block_size=block) as ours:
        tokens = ours.tokens(prompts, new=12)
        assert ours.state().compactions >= 5
    assert tokens == expected(reference, model, settings.of_server({"tessera": asked}), prompts, 12, block)
