"""Heads that keep unequal numbers of rows in pages that hold all heads: each head's part of a page is a virtual page.

The number of a virtual page is page * ids + head. `ids` is how many strides from head to head a page is long: kv_heads
where a page holds its heads one behind the other. A table of virtual pages gives a head any of them, also one in
another head's part of a page. Kernels that know one length a sequence read such tables as sequences of one head.
"""
import torch

from .pages import PagedLayer


def ids_of_page(pool):
    """How many virtual pages a page of [pages, page, kv_heads, dim] is long.

    Errors: ValueError if that is no whole number.
    """
    outer, _, head, _ = pool.stride()
    if outer % head:
        raise ValueError(f"the stride from page to page is {outer}; expected a multiple of that from head to head, "
                         f"{head}; pad the pages")
    return outer // head


def one_head_pages(pool):
    """Pages [pages, page, kv_heads, dim] as virtual pages [.., page, 1, dim], a view."""
    pages, page, heads, dim = pool.shape
    _, token, head, element = pool.stride()
    return pool.as_strided(((pages - 1) * ids_of_page(pool) + heads, page, 1, dim), (head, token, head, element))


def by_head(layer):
    """The same rows of a PagedLayer over virtual pages.

    k and v of the result are views, its tables [sequences, kv_heads, blocks] are new.
    """
    ids, heads = ids_of_page(layer.k), layer.k.shape[2]
    if ids_of_page(layer.v) != ids:
        raise ValueError(f"virtual pages of a page of v are {ids_of_page(layer.v)}; expected those of k, {ids}; "
                         "lay k and v out alike")
    own = torch.arange(heads, dtype=torch.int32, device=layer.tables.device)
    return layer._replace(k=one_head_pages(layer.k), v=one_head_pages(layer.v),
                          tables=layer.tables[:, None] * ids + own[None, :, None])


def move(layer, slots, counts, tables):
    """Chosen rows of a layer of virtual pages move to the pages of other tables -> the layer behind these tables.

    slots, counts: as `choose` returns them
    tables:        [sequences, kv_heads, blocks]; a head's i-th row goes to slot i. They may name pages of
                   `layer.tables`, of any head, because all rows are read before one is written. No page that gets
                   rows may occur twice
    Lengths, positions and scores of the result are new tensors.
    """
    page, capacity = layer.k.shape[1], tables.shape[2] * layer.k.shape[1]
    place = torch.arange(slots.shape[2], device=slots.device)
    counted = place < counts[..., None]
    source = slots.clamp(min=0).long()
    place = place.expand_as(source)

    def rows_in(table, slot):
        pages = table.long().gather(2, (slot // page).clamp(max=table.shape[2] - 1))
        return pages[counted], (slot % page)[counted]

    source_page, source_row = rows_in(layer.tables, source)
    page_of, row_of = rows_in(tables, place)
    for pool in (layer.k, layer.v):
        rows = pool[source_page, source_row]
        pool[page_of, row_of] = rows
    sequence, head, slot = counted.nonzero(as_tuple=True)

    def column(values):
        if values is None:
            return None
        result = torch.zeros(*counts.shape, capacity, dtype=values.dtype, device=values.device)
        result[sequence, head, slot] = values[sequence, head, source[counted]]
        return result

    return PagedLayer(layer.k, layer.v, tables, counts.clone(), column(layer.positions), column(layer.scores))
