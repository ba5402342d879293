"""Heads of unequal length in pages of all heads: rows that move between the heads' parts of pages."""
import pytest
import torch
from paged_engine import DIM, KV_HEADS, PAGE, PLACES, Q_HEADS, Engine, operations, tolerance
from tessera_torch import virtual_pages


def shared_out(blocks, counts, ids):
    """Tables of virtual pages for heads of these numbers of pages, out of those of `blocks`, last ones first."""
    pages = [block * ids + head for block in reversed(blocks) for head in range(KV_HEADS)]
    tables = torch.zeros(KV_HEADS, max(counts), dtype=torch.int32)
    for head, count in enumerate(counts):
        for i in range(count):
            tables[head, i] = pages.pop()
    return tables


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
def test_rows_move_into_pages_of_other_heads_and_are_attended_there(device, dtype, order):
    """What heads that compete keep lies in the last full pages of a prompt, and all others may be overwritten."""
    engine, pages = Engine(device, dtype, order, batch=1), operations(device, dtype, "ada_snapkv", 64, window=16)
    tokens = 250
    engine.append(pages, [tokens])
    full = tokens // PAGE * PAGE
    for i, layer in enumerate(engine.layers):
        first = engine.numbers([tokens - 16])
        q = engine.rows(engine.q, i, [tokens - 16], [16])
        candidates = layer._replace(lengths=engine.numbers([[full] * KV_HEADS]))
        slots, counts = pages.choose(i, candidates, q, first, granularity=PAGE)
        assert counts.sum() <= 64 * KV_HEADS and len(set(counts[0].tolist())) == 2
        last = layer.tables[0, full // PAGE - 4:full // PAGE].tolist()
        tables = shared_out(last, (counts[0] // PAGE).tolist(), virtual_pages.ids_of_page(layer.k))
        tables = tables[None].to(device)
        moved = virtual_pages.move(virtual_pages.by_head(candidates), slots, counts, tables)
        for h in range(KV_HEADS):
            count = int(counts[0, h])
            assert torch.equal(moved.positions[0, h, :count], slots[0, h, :count])
        used = [tables[0, h, :int(counts[0, h]) // PAGE].long() for h in range(KV_HEADS)]
        assert len(set(torch.cat(used).tolist())) == counts.sum() // PAGE
        for pool in (moved.k, moved.v):
            kept = pool[torch.cat(used)].clone()
            layer_pool = layer.k if pool is moved.k else layer.v
            layer_pool.fill_(torch.nan)  # what no head reads
            pool[torch.cat(used)] = kept
        query = torch.tensor([tokens - 1], device=device)
        out, _ = pages.attend(i, moved, engine.q[i, :, tokens - 1:tokens], query.int())
        for head in range(Q_HEADS):
            kept = slots[0, head // (Q_HEADS // KV_HEADS), :int(counts[0, head // (Q_HEADS // KV_HEADS)])].long()
            want, _ = engine.attention(i, 0, head, kept, query)
            assert (out[0, :, head] - want).abs().max() < tolerance(device, dtype)


def test_scores_move_with_rows_and_a_second_sequence_has_its_own():
    k = torch.arange(6 * 2 * 4, dtype=torch.float32).view(6, 2, 4, 1).expand(6, 2, 4, DIM).clone().transpose(1, 2)
    layer = virtual_pages.PagedLayer(
        k, k.clone(), torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32),
        torch.full((2, 2), 12, dtype=torch.int32),
        torch.arange(12, dtype=torch.int32).expand(2, 2, 12).contiguous(), torch.arange(48.).view(2, 2, 12))
    slots = torch.tensor([[[1, 5, 9, -1, -1], [0, 2, 3, 8, 11]], [[4, 5, 6, 7, -1], [-1] * 5]], dtype=torch.int32)
    counts = torch.tensor([[3, 5], [4, 0]], dtype=torch.int32)
    tables = torch.tensor([[[5, 0], [2, 3]], [[11, 0], [0, 0]]], dtype=torch.int32)
    before = layer.k.clone()
    moved = virtual_pages.move(virtual_pages.by_head(layer), slots, counts, tables)
    for b, h in ((0, 0), (0, 1), (1, 0)):
        for i, slot in enumerate(slots[b, h, :int(counts[b, h])].tolist()):
            want = before[int(layer.tables[b, slot // 4]), slot % 4, h]
            assert torch.equal(moved.k[int(tables[b, h, i // 4]), i % 4, 0], want)
            assert moved.scores[b, h, i] == layer.scores[b, h, slot]
    assert torch.equal(moved.lengths, counts)


def test_pages_that_are_no_whole_number_of_heads_are_refused():
    tables = torch.zeros(1, 2, dtype=torch.int32)
    layer = virtual_pages.PagedLayer(*torch.zeros(2, 3, 4, 2, 64).transpose(2, 3), tables, None, None)
    padded = torch.zeros(3, 2 * 4 * 64 + 8).as_strided((3, 4, 2, 64), (520, 64, 256, 1))
    with pytest.raises(ValueError, match="^the stride from page to page is 520; expected a multiple of .*, 256; pad"):
        virtual_pages.by_head(layer._replace(k=padded))
    with pytest.raises(ValueError, match="^virtual pages of a page of v are 8; expected those of k, 2; lay k and v"):
        virtual_pages.by_head(layer._replace(k=torch.zeros(3, 2, 4, 64).transpose(1, 2), v=torch.zeros(3, 4, 2, 64)))
