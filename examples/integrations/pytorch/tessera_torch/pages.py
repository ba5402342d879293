"""A method over pages that an engine owns: observe, choose, pack, free, index, read, attend. No cache, and no transformers.

The engine has the pools, tables, lengths and positions; everything here reads and changes these tensors where they lie, on
the current stream, and allocates what it returns.
"""
import contextlib
import typing
import weakref

import torch

from . import build


class PagedLayer(typing.NamedTuple):
    """One layer of an engine's memory; numbers are torch.int32, everything on one device.

    k, v:       [pages, page, kv_heads, dim] in any strides; HND pools as views: k.transpose(1, 2). On a GPU the elements of
                a row lie side by side
    tables:     [sequences, blocks], or [sequences, kv_heads, blocks] over pages of one head (kv_heads of k is then 1)
    lengths:    [sequences, kv_heads]: every head has a length of its own
    positions:  [sequences, kv_heads, at least blocks * page], of the stored tokens, ascending; None: slots are positions, while
                nothing has been packed
    scores:     torch.float32 like positions, for methods whose scores accumulate beside the tokens (None: none); 0 for a new token

    Contiguous memory [sequences, tokens, kv_heads, dim] is a pool of one page a sequence: tables = arange(sequences)[:, None].
    """
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class Stages(typing.NamedTuple):
    """What a budget leaves to each stage of a method behind a prompt of one length.

    kept:     tokens that the first stage keeps of each kv_head, at most the prompt
    read:     tokens that a step attends
    page:     tokens that a step estimates together
    channels: channels of a key that its estimate reads
    """
    kept: int
    read: int
    page: int
    channels: int


class PageOperations:
    """The operations of one method for a model of these counts; of all batches, pools and tables.

    method:         a name of tessera_torch.methods(), or a Policy
    layers, q_heads, kv_heads, dim, dtype, device: the model's
    budget:         what the method keeps of each kv_head; None: the method's default
    prompt:         tokens of a prompt, for budgets that follow its length
    sliding_window, sliding_layers, scale, softcap, sink_logits [layers, q_heads]: attention as the model has it
    rope_frequencies: [dim / 2] numbers, for methods that turn queries back (expected_attention): element d of a query turns with element
                    d + dim / 2, by position * rope_frequencies[d]
    profile:        a number for each kv_head of the model, [layers][kv_heads], for a method whose budget takes such a table
    parameters:     the method's own
    """

    def __init__(self, method, *, layers, q_heads, kv_heads, dim, dtype, device="cpu", budget=None, prompt=0,
                 sliding_window=0, sliding_layers=(), scale=0.0, softcap=0.0, sink_logits=None, profile=None,
                 rope_frequencies=(), **parameters):
        device = torch.device(device)
        self._operators = build.operators()
        path = build.library(method, dtype, dim, device.type, "pages")
        settings = [word for name, value in parameters.items() for word in (name, str(value))]
        table = [float(number) for row in profile or [] for number in row]
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._handle = self._operators.pages_open(
                str(path), layers, q_heads, kv_heads, list(sliding_layers), sliding_window, scale, softcap, budget,
                settings, prompt, sink_logits, table, [float(speed) for speed in rope_frequencies])
        self._q_heads, self._dim, self._device, self._room = q_heads, dim, device, {}
        weakref.finalize(self, self._operators.pages_close, self._handle.item())

    def append(self, layer, k, v, first_position, new_tokens=None):
        """New rows [sequences, tokens, kv_heads, dim] behind what every head holds; lengths and positions move on.

        layer: a PagedLayer, as in all that follows; first_position [sequences]: of the first new row, behind every position
        that is stored; new_tokens [sequences]: how many rows count, the first ones (None: all).
        """
        self._operators.pages_append(self._handle, *layer, k, v, first_position, new_tokens)

    @property
    def observes(self):
        """What an engine hands over beside the pages: "nothing"; "window", the newest queries of a prompt; "every_query", every query
        by `observe`, once; "newest_query", the newest query of a call by `observe`; "statistics", every query of a prompt by `observe`;
        "given", scores of its own in PagedLayer.scores; "more", what operations over pages do not take: then `choose` is refused."""
        return self._operators.pages_observes(self._handle)

    def statistics(self, sequences):
        """Empty sums over the queries of so many prompts in one layer: counts, sums, products, which `observe` adds to."""
        shape = (sequences, self._q_heads)
        return (torch.zeros(shape, dtype=torch.int64, device=self._device),
                torch.zeros(*shape, self._dim, dtype=torch.float64, device=self._device),
                torch.zeros(*shape, self._dim, self._dim, dtype=torch.float64, device=self._device))

    def observe(self, index, layer, q, first_position, valid=None, statistics=None):
        """What the method sees of queries, once their keys are stored: it adds to layer.scores, or to `statistics`, in place.

        q, first_position, valid: as in `choose`, but all new queries, at least one of each sequence where the newest counts (a GPU's
        numbers are not looked at). Each query is observed once, in order; nothing is done for a method
        that observes nothing, a window, or scores of the engine's own.
        """
        kind = self.observes
        if kind == "newest_query":
            if valid is not None and not valid.is_cuda and int(valid.min()) < 1:
                raise ValueError(f"valid is {valid.tolist()}; expected at least 1 query of each sequence; leave sequences without new "
                                 "queries out of the batch: this method's scores are those of the newest query")
            row = (torch.full_like(first_position, q.shape[1]) if valid is None else valid).clamp(min=1) - 1
            newest = q[torch.arange(q.shape[0], device=q.device), row.long()][:, None].contiguous()
            self._operators.pages_observe(self._handle, index, *layer, newest, first_position + row)
        elif kind == "every_query":
            for done in range(0, q.shape[1], 512):  # what one call on a GPU scores
                part = q[:, done:done + 512]
                some = None if valid is None else (valid - done).clamp(0, part.shape[1])
                self._operators.pages_observe(self._handle, index, *layer, part, first_position + done, some)
        elif kind == "statistics":
            if statistics is None:
                raise ValueError("statistics is None; expected what PageOperations.statistics makes; keep sums for each prompt")
            token = torch.arange(q.shape[1], device=q.device)
            least = self._operators.pages_first_observed(self._handle)
            outside = first_position[:, None] + token < least
            if valid is not None:
                outside = outside | (token >= valid[:, None])
            # A query that is not finite is left out, so no number has to come to the host.
            counted = q.masked_fill(outside[:, :, None, None], torch.nan)
            self._operators.pages_observe_queries(self._handle, *statistics, counted, first_position)

    def choose(self, index, layer, q, first_position, valid=None, *, indptr=None, tokens=None, budgets=None, tails=None,
               granularity=1, statistics=None):
        """What the method keeps of layer `index` -> slots [sequences, kv_heads, capacity], counts [sequences, kv_heads].

        q: the newest queries of each sequence, [sequences, tokens, q_heads, dim]; first_position: of the first of them;
        valid [sequences]: how many of them count, the first ones (None: all). Of each row of slots the first counts do.
        All queries that count choose, and the tokens that they are of stay: pass as many as the method's window.
        Queries may be newer than all that is stored: the tail of a prompt that is no candidate.
        indptr [sequences + 1]: then q is [rows, q_heads, dim], sequence i has the rows from indptr[i] to indptr[i + 1], at least
        one, first_position is of the first of them, and the newest `tokens` of each count.
        budgets [sequences]: tokens that stay of each kv_head, in place of the method's; tails [sequences]: newest tokens that stay
        whatever their score, in place of the method's.
        q None: for methods that observe no window; then first_position is of the next token. statistics: what `observe` has added up.
        granularity: counts are multiples of it, whole pages of a head; tokens that are left over go to other heads, a page each.
        """
        if indptr is not None:
            q, first_position, valid = _newest(q, indptr, first_position, tokens, valid)
        if q is None:
            q = layer.k.new_empty(layer.lengths.shape[0], 0, self._q_heads, self._dim)
        return self._operators.pages_choose(self._handle, index, *layer, q, first_position, valid, budgets, tails, granularity,
                                            *(statistics or ()))

    def pack(self, layer, slots, counts, ends=None):
        """Chosen rows, their positions and scores move to the front of their head, in place; lengths become the counts.

        ends [sequences]: they move to the slots before an end instead, behind which no chosen slot lies. So pages in front become
        free, and slots of later tokens stay where a table by position has them (vLLM).
        """
        self._operators.pages_pack(self._handle, *layer, slots, counts, ends)

    def plan(self, prompt, budget=None):
        """Stages behind a prompt of so many tokens, with the method's budget or another one, of a method whose steps choose by an index.

        Requests of one batch differ in both: pass `kept` in `budgets` of `choose`, `read` and `channels` in `reads` and `channels` of
        `choose_to_read`. Pages of all requests are those of one index; where the budget decides them, give the method `page`.
        """
        return Stages(*self._operators.pages_plan(self._handle, prompt, budget))

    @property
    def index_page(self):
        """Tokens of a page of the index: it divides the engine's page. ValueError for a method whose steps do not choose so, and for
        one whose page the budget decides: give it `page`."""
        return self._operators.pages_index_page(self._handle)

    def empty_index(self, layer):
        """Memory for the index of one layer's pool: [pages * parts of a page, kv_heads, 2, dim], smallest and largest keys.

        Part p of page b is number b * parts + p. An engine may allocate it itself, in any strides but between a row's elements;
        what it holds of pages that nobody has is never read.
        """
        k = layer.k
        return k.new_zeros(k.shape[0] * (k.shape[1] // self.index_page), k.shape[2], 2, k.shape[3])

    def index_pages(self, layer, index, first=None, new_tokens=0):
        """Brings the index up to date with keys that the engine has written, in place.

        first [sequences]: the slot of the first new token (None: every slot is new, or has moved). lengths count the new tokens;
        pages with a new slot are made from all of their keys, so that a call may be repeated, and rejected drafts written over.
        Pages that sequences share, behind whole pages of a common prefix, need no new call.
        new_tokens: the most that a sequence has got, as far as the host knows: a GPU's launch is made for it. More are indexed too.
        """
        self._operators.pages_index(self._handle, *layer, index, first, new_tokens)

    def choose_to_read(self, index_of_layer, layer, index, q, first_position, reads=None, channels=None):
        """What a step reads of a layer, by its index -> slots [sequences, kv_heads, room], counts [sequences, kv_heads].

        The slots are those that the method's own cache attends. Pass them to `attend`, which reads no other page.
        q [sequences, 1 to 8 tokens, q_heads, dim], whose keys are stored and indexed; first_position [sequences]: of its first;
        reads [sequences]: tokens that a step attends of each kv_head, 1 to the method's own number, in place of it;
        channels [sequences]: channels of a key that its estimate reads, 1 to dim, in place of the method's.
        Nothing is waited for: a CUDA graph may capture it, and follows tables and lengths when it is replayed.
        """
        key = (q.shape[1], layer.tables.shape[-1] * layer.k.shape[1])
        if key not in self._room:
            self._room[key] = self._operators.pages_max_read(self._handle, *key)
        return self._operators.pages_choose_to_read(self._handle, index_of_layer, *layer, index, q, first_position, self._room[key],
                                                    reads, channels)

    def free(self, tables, lengths, held, page, room=0):
        """Pages that nobody needs once all layers have packed -> freed [table rows, blocks], freed_count [table rows].

        lengths [layers, sequences, kv_heads], of all layers that share the tables; held [table rows]: pages of each row, which
        become those that stay; room: tokens to come that shall have a page.
        """
        return self._operators.pages_free(self._handle, tables, lengths, held, page, room)

    def attend(self, index, layer, q, first_position, slots=None, counts=None, indptr=None, tokens=8):
        """A step's attention over everything stored, or over chosen slots -> out like q, log-sum-exps like q without dim.

        q [sequences, 1 to 8 tokens, q_heads, dim], whose keys are stored already; first_position [sequences]: of its first.
        indptr [sequences + 1]: then q is [rows, q_heads, dim], and sequence i has the rows from indptr[i] to indptr[i + 1], at
        most `tokens` (1 to 8) of them. On a GPU the host does not see these numbers: a sequence with more rows gets NaN behind them.
        """
        if indptr is None:
            return self._operators.pages_attend(self._handle, index, q, *layer, first_position, slots, counts)
        sequence, token, rows = _places(q, indptr, tokens)
        out, sums = self._operators.pages_attend(self._handle, index, q[rows], *layer, first_position, slots, counts)
        inside = token < tokens
        token = token.clamp(max=tokens - 1)
        return (out[sequence, token].masked_fill(~inside[:, None, None], torch.nan),
                sums[sequence, token].masked_fill(~inside[:, None], torch.nan))


def _newest(q, indptr, first_position, tokens, valid):
    """Of packed rows the newest `tokens` of each sequence, padded, the position of the first of them, and how many there are."""
    if q.dim() != 3 or indptr.dim() != 1 or indptr.numel() < 2 or tokens is None or tokens < 1 or valid is not None:
        raise ValueError(f"q with indptr is {tuple(q.shape)}, indptr {tuple(indptr.shape)}, tokens {tokens}, valid "
                         f"{None if valid is None else 'given'}; expected [rows, q_heads, dim], [sequences + 1], at least 1, and None; "
                         "pass packed rows, and how many of a sequence's newest queries count")
    begins = indptr.to(torch.int64)
    if not indptr.is_cuda and (begins[0] != 0 or begins[-1] != q.shape[0] or begins.diff().min() < 1):
        raise ValueError(f"indptr is {begins.tolist()}; expected numbers from 0 to the rows, which are {q.shape[0]}, at least 1 row "
                         "apart; pass where the rows of each sequence begin")
    counts = begins.diff()
    taken = counts.clamp(max=tokens)
    first = begins[1:] - taken
    rows = (first[:, None] + torch.arange(tokens, device=q.device)).clamp(max=q.shape[0] - 1)
    return q[rows], first_position + (counts - taken).to(torch.int32), taken.to(torch.int32)


def _places(q, indptr, tokens):
    """Of each packed row its sequence and its token; and [sequences, tokens] rows, of which those behind a sequence's own are any."""
    if q.dim() != 3 or indptr.dim() != 1 or indptr.numel() < 2 or not 1 <= tokens <= 8:
        raise ValueError(f"q with indptr is {tuple(q.shape)}, indptr {tuple(indptr.shape)}, tokens {tokens}; expected [rows, q_heads, dim], "
                         "[sequences + 1] and 1 to 8; pass packed rows, and the most tokens of a sequence")
    begins = indptr.to(torch.int64)
    if not indptr.is_cuda:
        counts = begins.diff()
        if begins[0] != 0 or begins[-1] != q.shape[0] or counts.min() < 0 or counts.max() > tokens:
            raise ValueError(f"indptr is {begins.tolist()}; expected ascending numbers from 0 to the rows, which are {q.shape[0]}, at most "
                             f"{tokens} rows apart; pass where each sequence's rows begin, and the most tokens of a sequence")
    row = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(begins, row, right=True) - 1
    rows = (begins[:-1, None] + torch.arange(tokens, device=q.device)).clamp(max=max(0, q.shape[0] - 1))
    return sequence, row - begins[sequence], rows
