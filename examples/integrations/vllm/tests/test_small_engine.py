"""Requests over pages in the layouts of vLLM's GPU backend, without vLLM: a scheduler that hands out blocks and preempts,
steps in a CUDA graph. The same on the CPU, with fewer requests."""
import random

import pytest
import torch
from small_engine import BLOCK, LAYERS, WINDOW, PagedLayer, Request, SmallEngine
from tessera_vllm import plan

PLACES = [("cpu", torch.float32)]
if torch.cuda.is_available():
    PLACES = [("cuda", torch.bfloat16)]


class CheckedEngine(SmallEngine):
    def check_choice(self, index, request, candidates, q, slots):
        """The same choice over pages of their own; and a request that was preempted keeps the same tokens again."""
        number = lambda value: torch.tensor([value], dtype=torch.int32, device=self.device)
        again, _ = self.operations.choose(index, in_own_pages(candidates, int(candidates.lengths[0, 0])), q,
                                          number(request.computed - q.size(1)), budgets=number(slots.size(2)))
        assert torch.equal(again[:, :, :slots.size(2)], slots)
        positions = candidates.positions.gather(2, slots.long())
        assert torch.equal(positions, request.chosen.setdefault((index, request.computed), positions))


def in_own_pages(layer, stored):
    """The first tokens of a request, copied into pages as the library's own caches have them: K and V apart, in order."""
    pages = layer.tables[0].long()
    k, v = (pool[pages].contiguous() for pool in (layer.k, layer.v))
    tables = torch.arange(len(pages), dtype=torch.int32, device=pages.device)[None]
    return PagedLayer(k, v, tables, torch.full_like(layer.lengths, stored), layer.positions.contiguous())


def draw_requests(count, mode, draw):
    made = []
    for _ in range(count):
        prompt, answer = draw.choice([1, draw.randint(2, 40), draw.randint(41, 400)]), draw.randint(1, 30)
        kept = draw.choice([WINDOW, 32, 64, 160, 1000])
        chunk = draw.choice([64, 100]) if mode == "chunked" else 0
        schedule = plan.Schedule(prompt, BLOCK, plan.blocks_for(kept, BLOCK), chunk, WINDOW)
        aborted = draw.randint(1, answer) if draw.random() < 0.2 else answer + 1
        made.append(Request(draw.randrange(4000), prompt, answer, schedule, kept, aborted))
    return made


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("method, mode, count", [("snapkv", "compact", 1000), ("keydiff", "compact", 200),
                                                 ("snapkv", "chunked", 200)])
@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_requests_come_go_and_are_preempted(device, dtype, method, mode, count, order):
    """A request's step equals attention by definition over what is left of it, and has the bits of the same operators over
    pages of their own; no block is lost."""
    draw = random.Random(f"{method} {mode} {order}")
    engine = CheckedEngine(device, dtype, order, method, blocks=44)
    engine.waiting.extend(draw_requests(count, mode, draw))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    steps = 0
    while engine.waiting or engine.running:
        done = engine.schedule()
        if done is None:
            continue
        requests, made = done
        b = draw.randrange(len(requests))
        request, layer = requests[b], draw.randrange(LAYERS)
        dropped = request.dropped()
        shown = engine.of_request(request, layer, dropped)
        stored = request.computed - dropped * BLOCK
        out, lse = made[layer][0][b, 0], made[layer][1][b, 0]
        positions = shown.positions[0, :, :stored]
        want, want_lse = engine.attention(request, layer, positions)
        assert torch.allclose(out.double(), want, rtol=0, atol=near) and torch.allclose(lse.double(), want_lse, rtol=0, atol=near)
        if not dropped:
            assert torch.equal(positions[0], torch.arange(stored, dtype=torch.int32, device=engine.device))
        assert len(request.held()) == plan.blocks_for(request.computed, BLOCK) - dropped
        held = [block for one in engine.running for block in one.held()]
        assert sorted([*held, *engine.free]) == list(range(engine.all_blocks))
        if steps % 16 == 0:
            alone = in_own_pages(shown, stored)
            first = torch.tensor([request.computed - 1], dtype=torch.int32, device=engine.device)
            q = engine.q[layer, b:b + 1]
            of_pages = engine.operations.attend(layer, shown, q, first)
            of_copy = engine.operations.attend(layer, alone, q, first)
            assert torch.equal(of_pages[0], of_copy[0]) and torch.equal(of_pages[1], of_copy[1])
        engine.finish(requests)
        steps += 1
    assert sorted(engine.free) == list(range(engine.all_blocks))
    assert engine.preempted > count // 50 and engine.compacted > count // 20
