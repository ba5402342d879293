"""vLLM's CPU pages: how K and V lie in them, and what is kept moves towards a prompt's end.

A layer's cache is [blocks, kv_heads, block, 2 * dim]. In it the CPU backend has of each block and kv_head first all
of K and then all of V, and K transposed: [dim, block] (isa vec and vec16).
"""
import torch

from .operators import package


def pages(kv_cache):
    """K and V as [blocks, block, kv_heads, dim], views in the strides that they have."""
    blocks, heads, block, both = kv_cache.shape
    dim = both // 2
    halves = kv_cache.view(blocks, heads, 2, block * dim)
    k = halves[:, :, 0].unflatten(2, (dim, block)).permute(0, 3, 1, 2)
    v = halves[:, :, 1].unflatten(2, (block, dim)).transpose(1, 2)
    return k, v


def slots_in(blocks, block):
    """The slots of these blocks, one behind the other."""
    return (blocks[:, None] * block + torch.arange(block)).flatten()


def stored_positions(kept, first, tokens):
    """Positions of what a request stores in the blocks that attention reads: kept [kv_heads, n] of an earlier end, or
    None; then every token from `first` on -> [kv_heads, n + tokens], or without kept [1, tokens]."""
    behind = torch.arange(first, first + tokens, dtype=torch.int32)
    return behind[None] if kept is None else torch.cat([kept, behind.expand(kept.size(0), -1)], 1)


def compact(operations, index, kv_cache, blocks, positions, queries, first_query, kept_blocks, write):
    """Chooses among the tokens in these blocks of layer `index` and moves what is kept into the last of them.

    blocks [n]: full blocks of a request, in the order of its tokens; positions [kv_heads or 1, n * block] of these;
    queries [tokens, q_heads, dim], of which `first_query` is the first's position; write(k, v, slots): the engine's own
    writer, of rows [tokens, kv_heads, dim]. Returns the positions of what is kept, [kv_heads, kept_blocks * block].
    """
    block, heads = kv_cache.size(2), kv_cache.size(1)
    k, v = (half.index_select(0, blocks).flatten(0, 1) for half in pages(kv_cache))  # [n * block, kv_heads, dim]
    tokens = k.size(0)
    positions = positions.expand(heads, tokens)
    layer = package().PagedLayer(k[None], v[None], torch.zeros(1, 1, dtype=torch.int32),
                                 torch.full((1, heads), tokens, dtype=torch.int32), positions[None].contiguous())
    slots, counts = operations.choose(index, layer, queries[None], torch.tensor([first_query], dtype=torch.int32))
    kept = kept_blocks * block
    if not bool((counts == kept).all()):
        raise RuntimeError(f"tessera: counts of layer {index} are {counts.tolist()[0]}; expected {kept} of every "
                           "kv_head; take a method that gives all heads the same")
    slots = slots[0, :, :kept].long()  # [kv_heads, kept]
    # The rows are copies, so nothing is read that has been overwritten. PageOperations.pack towards an end, in place
    # and over the pages themselves, will take the place of the copies above and of what follows.
    rows = slots.t()[..., None].expand(-1, -1, k.size(-1))
    write(k.gather(0, rows), v.gather(0, rows), slots_in(blocks[-kept_blocks:], block))
    return positions.gather(1, slots)
