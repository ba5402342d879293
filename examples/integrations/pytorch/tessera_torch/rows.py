"""The rows of a batch: which tokens of a call are real, and which budget each row has."""
import copy
import math

import torch


class Padding(torch.Tensor):
    """Which columns are padding, [batch, 1, 1, columns], for models that cut masks by their rows of queries: here all see the same."""

    @property
    def columns(self):
        return self.as_subclass(torch.Tensor)[:, 0, 0]


class Rows:
    """Which tokens of a call are no padding: of each sequence a run [first, last), where need be after reordering.

    mask: [batch, stored + tokens], as transformers has it; None: nothing new is padding
    past: the mask of earlier calls, [batch, columns]; columns behind them had no padding; None: no column had
    Errors: ValueError where the mask says another thing of stored columns than when they were stored.
    """

    def __init__(self, mask, batch, tokens, stored=0, past=None):
        self.tokens, self.first, self.last, self.order, self.past = tokens, [0] * batch, [tokens] * batch, None, past
        if mask is None:
            return
        mask = mask.columns if isinstance(mask, Padding) else mask
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            shape = f"{mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
            raise ValueError(f"attention mask has {shape}; expected 2, [batch, tokens]; "
                             "pass padding alone: causality and windows are the cache's")
        if mask.shape[0] != batch or mask.shape[1] < stored + tokens:
            raise ValueError(f"shape of the attention mask is {tuple(mask.shape)}; expected {(batch, stored + tokens)}: it says "
                             "of the stored tokens, too, whether they are padding; pass the whole conversation's")
        mask = mask[:, :stored + tokens].bool()
        known = 0 if past is None else past.shape[1]
        same = mask[:, known:].all() if past is None else mask[:, known:].all() & (mask[:, :known] == past).all()
        if bool(same):
            return
        expected = torch.ones_like(mask[:, :stored])
        if past is not None:
            expected[:, :known] = past
        if not torch.equal(mask[:, :stored], expected):
            raise ValueError("attention mask of stored tokens is another than when they were stored; expected the same: what is "
                             "stored cannot be hidden, nor padding be shown; pass each call's mask with new columns behind it")
        self.past, real = mask.clone(), mask[:, stored:]
        count, first = real.sum(-1), real.int().argmax(-1)
        inside = torch.arange(tokens, device=real.device)
        one_run = (inside >= first[:, None]) & (inside < (first + count)[:, None])
        if not torch.equal(one_run, real):  # an answer's last token, padding, the next question
            self.order = torch.argsort((~real).int(), dim=-1, stable=True)
            first = torch.zeros_like(first)
        self.first, self.last = first.tolist(), (first + count).tolist()

    def newest(self, tokens):
        """The rows of the call's last columns alone."""
        skipped = self.tokens - tokens
        if skipped == 0:
            return self
        part = copy.copy(self)
        part.tokens = tokens
        if self.order is None:
            part.first, part.last = ([max(0, column - skipped) for column in columns] for columns in (self.first, self.last))
        else:
            real = self.past[:, -tokens:]
            part.order = torch.argsort((~real).int(), dim=-1, stable=True)
            part.first, part.last = [0] * len(real), real.sum(-1).tolist()
        return part

    def forward(self, x):
        """[batch, heads, tokens, dim] with padding behind the rest, where it is not at one end already."""
        return x if self.order is None else x.gather(2, self.order.to(x.device)[:, None, :, None].expand_as(x))

    def back(self, out):
        """[batch, tokens, heads, dim] as the tokens came."""
        return out if self.order is None else torch.empty_like(out).scatter_(
            1, self.order.to(out.device)[:, :, None, None].expand_as(out), out)


def checked_budget(budget):
    """A budget as TesseraCache takes it, before anything is made."""
    for own in [] if budget is None else budget if isinstance(budget, (list, tuple)) else [budget]:
        if isinstance(own, bool) or not isinstance(own, (int, float)):
            raise ValueError(f"budget is {own!r}; expected tokens as an int or a share as a float; "
                             "pass one for all rows, or a list with one for each")
        if isinstance(own, float) and not 0 < own <= 1:
            raise ValueError(f"share of budget is {own}; expected in (0, 1]; pass a part of the tokens")
    return budget


def changed_budget(budget, tokens):
    """`tokens` in place of a budget."""
    if isinstance(budget, (float, list, tuple)):
        raise ValueError(f"budget is {budget}; expected one number of tokens for all rows; make a cache for other budgets")
    return tokens


def budgets_by_row(budget, batch, longest):
    """The method's budget, and each row's own as (tokens, shares), both empty where all rows have the method's.

    A cache on a GPU is made for the method's budget, so that one is the largest: of a share, for `longest` tokens."""
    if budget is None or isinstance(budget, int):
        return budget, [], []
    rows = [budget] * batch if isinstance(budget, float) else list(budget)
    if len(rows) != batch:
        raise ValueError(f"budgets are {len(rows)}; expected one for each sequence of the batch, which are {batch}; "
                         "pass as many, or one for all")
    tokens = [0 if isinstance(own, float) else own for own in rows]
    shares = [own if isinstance(own, float) else 0.0 for own in rows]
    return max(*tokens, 16, *(math.ceil(share * longest) for share in shares)), tokens, shares
