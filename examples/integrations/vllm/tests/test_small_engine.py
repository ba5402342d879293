"""Requests over pages in the layouts of vLLM's GPU backend, without vLLM: a scheduler that hands out blocks and preempts,
steps in a CUDA graph. The same on the CPU, with fewer requests."""
import random

import pytest
import torch
from small_engine import BLOCK, KV_HEADS, LAYERS, Q_HEADS, WINDOW, PagedLayer, Request, SmallEngine
from tessera_vllm import plan

PLACES = [("cpu", torch.float32, 300)]
if torch.cuda.is_available():
    PLACES = [("cuda", torch.bfloat16, 1000), ("cuda", torch.float16, 100)]


class CheckedEngine(SmallEngine):
    def check_choice(self, index, request):
        """The same choice over the rows side by side, in memory of their own."""
        candidates, slots, q, begin = request.kept[index]
        stored = int(candidates.lengths[0, 0])
        alone = side_by_side(candidates, stored)
        number = lambda value: torch.tensor([value], dtype=torch.int32, device=self.device)
        again, counts = self.operations.choose(index, alone, q, number(begin), budgets=number(slots.size(2)))
        assert torch.equal(again[:, :, :slots.size(2)], slots)


def side_by_side(layer, stored):
    """The first tokens of a request, copied into one page."""
    slot = torch.arange(stored, device=layer.k.device)
    pages = layer.tables[0].long()[slot // BLOCK]
    k, v = (pool[pages, slot % BLOCK][None].contiguous() for pool in (layer.k, layer.v))
    return PagedLayer(k, v, torch.zeros_like(layer.tables[:, :1]), torch.full_like(layer.lengths, stored),
                      layer.positions[:, :, :stored].contiguous())


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
@pytest.mark.parametrize("method, mode", [("snapkv", "compact"), ("keydiff", "compact"), ("snapkv", "chunked")])
@pytest.mark.parametrize("device, dtype, count", PLACES, ids=str)
def test_requests_come_go_and_are_preempted(device, dtype, count, method, mode, order):
    """Each step of a request equals attention by definition over what is left of it; its newest step has the bits of the
    same operators over rows side by side; no block is lost."""
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
        assert torch.isfinite(out).all()
        for head in range(Q_HEADS):
            positions = shown.positions[0, head // (Q_HEADS // KV_HEADS), :stored]
            want, want_lse = engine.attention(request, layer, head, positions)
            assert (out[head] - want).abs().max() < near and (lse[head] - want_lse).abs() < near
        if not dropped:
            assert positions.tolist() == list(range(stored))
        assert len(request.held()) == plan.blocks_for(request.computed, BLOCK) - dropped
        held = [block for one in engine.running for block in one.held()]
        assert sorted([*held, *engine.free]) == list(range(engine.all_blocks))
        if steps % 16 == 0:  # a batch of copies: attention has the same bits wherever rows lie
            alone = side_by_side(shown, stored)
            first = torch.tensor([request.computed - 1], dtype=torch.int32, device=engine.device)
            q = engine.q[layer, b:b + 1]
            of_pages = engine.operations.attend(layer, shown, q, first)
            of_copy = engine.operations.attend(layer, alone, q, first)
            assert torch.equal(of_pages[0], of_copy[0]) and torch.equal(of_pages[1], of_copy[1])
        engine.finish(requests)
        steps += 1
    assert sorted(engine.free) == list(range(engine.all_blocks))
    assert engine.preempted > count // 50 and engine.compacted > count // 20
