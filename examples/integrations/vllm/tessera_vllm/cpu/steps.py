"""Methods that observe every step: positions and scores of the requests that decode together, side by side.

One operator call observes all rows of a step with one new token each. What it reads and adds to stays in the tensors of
a batch for as long as the same requests come in the same order; nothing is copied from step to step.
"""
import dataclasses

import torch

from ..operators import package
from . import layout

SPARE_BLOCKS = 4  # by which columns grow


@dataclasses.dataclass(frozen=True)
class Step:
    """The rows of a step that are observed together, one new token each.

    rows:    backend.ObservedRow
    queries: their rows in the step's queries: a slice, or [rows]
    tables:  [rows, blocks] that attention reads
    lengths: [rows, kv_heads], tokens that are stored
    slots:   [rows, kv_heads, 1], of the new tokens
    newest:  [rows], positions of the new tokens
    """
    rows: list
    queries: slice | torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    newest: torch.Tensor


def step_of(rows, kv_heads, block):
    """rows: of one new token each."""
    tokens = [one.end - one.row.skipped * block for one in rows]
    begins = [one.queries.start for one in rows]
    tables = torch.nn.utils.rnn.pad_sequence([one.blocks for one in rows], batch_first=True).to(torch.int32)
    queries = slice(begins[0], begins[-1] + 1) if begins[-1] - begins[0] + 1 == len(rows) else torch.tensor(begins)
    number = lambda values: torch.tensor(values, dtype=torch.int32)
    lengths = number(tokens)[:, None].expand(-1, kv_heads).contiguous()
    return Step(rows, queries, tables, lengths, lengths.long()[..., None] - 1, number([one.end - 1 for one in rows]))


class Columns:
    """Of one layer and all rows: positions and scores [rows, kv_heads, slots]. Behind what is stored scores are 0.

    pages: the layer's k and v, as layout.pages has them
    """

    def __init__(self, rows, kv_heads, kv_cache):
        self.pages = layout.pages(kv_cache)
        self.positions = torch.zeros(rows, kv_heads, 0, dtype=torch.int32)
        self.scores = torch.zeros(rows, kv_heads, 0)

    def reserve(self, slots, more):
        if self.positions.size(2) < slots:
            missing = slots + more - self.positions.size(2)
            self.positions = torch.nn.functional.pad(self.positions, (0, missing))
            self.scores = torch.nn.functional.pad(self.scores, (0, missing))

    def load(self, row, observed):
        """observed: worker.Observed, whose columns become these."""
        stored = observed.positions.size(1)
        self.positions[row, :, :stored] = observed.positions
        if observed.scores is not None:
            self.scores[row, :, :stored] = observed.scores
        observed.positions = observed.scores = None

    def store(self, row, tokens, observed):
        observed.positions = self.positions[row, :, :tokens].clone()
        observed.scores = self.scores[row, :, :tokens].clone()

    def drop(self, row, begin, tokens):
        """The slots before `begin` are gone."""
        for column in (self.positions, self.scores):
            kept = column[row, :, begin:tokens].clone()
            column[row, :, :tokens - begin] = kept
            column[row, :, tokens - begin:] = 0


class Batch:
    """The columns of requests that decode together.

    ids: of the rows; None where a request is gone
    """

    def __init__(self, ids, block):
        self.ids, self.block = list(ids), block
        self.stored = [0] * len(self.ids)
        self.layers = {}

    def columns(self, name, kv_cache, step, observed):
        """Of a layer. observed: the function from (request, layer) to worker.Observed."""
        slots = step.tables.size(1) * self.block
        known = self.layers.get(name)
        if known is None:
            known = self.layers[name] = Columns(len(self.ids), step.lengths.size(1), kv_cache)
            known.reserve(slots, SPARE_BLOCKS * self.block)
            for row, one in enumerate(step.rows):
                kept = observed(one.request, name)
                if kept.positions is not None:
                    known.load(row, kept)
                else:
                    known.positions[row, :, :one.end] = torch.arange(one.end, dtype=torch.int32)
        known.reserve(slots, SPARE_BLOCKS * self.block)
        return known

    def observe(self, operations, index, columns, step, query):
        """query [tokens, q_heads, dim] of the step. Returns the rows as a PagedLayer."""
        columns.positions.scatter_(2, step.slots, step.newest[:, None, None].expand_as(step.slots))
        paged = package().PagedLayer(*columns.pages, step.tables, step.lengths, columns.positions, columns.scores)
        operations.observe(index, paged, query[step.queries][:, None], step.newest)
        return paged

    def forget(self, request_id):
        self.ids = [None if known == request_id else known for known in self.ids]

    def store(self, observed):
        """Gives every request its own columns back."""
        for name, columns in self.layers.items():
            for row, request in enumerate(self.ids):
                if request is not None:
                    columns.store(row, self.stored[row], observed(request, name))
