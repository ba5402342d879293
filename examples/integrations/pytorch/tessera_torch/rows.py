"""Padding of a batch: which tokens of a call are real."""
import torch


class Rows:
    """Which tokens of a call are no padding: of each sequence a run [first, last), where need be after reordering."""

    def __init__(self, mask, batch, tokens):
        self.first, self.last, self.order = [0] * batch, [tokens] * batch, None
        if mask is None:
            return
        if mask.dim() != 2:
            raise ValueError(f"attention mask has {mask.dim()} dimensions; expected 2, [batch, tokens]; "
                             "pass padding alone: causality and windows are the cache's")
        real = mask[:, -tokens:].bool()
        if bool(real.all()):
            return
        count, first = real.sum(-1), real.int().argmax(-1)
        inside = torch.arange(tokens, device=real.device)
        one_run = (inside >= first[:, None]) & (inside < (first + count)[:, None])
        if not torch.equal(one_run, real):  # an answer's last token, padding, the next question
            self.order = torch.argsort((~real).int(), dim=-1, stable=True)
            first = torch.zeros_like(first)
        self.first, self.last = first.tolist(), (first + count).tolist()

    def forward(self, x):
        """[batch, heads, tokens, dim] with padding behind the rest, where it is not at one end already."""
        return x if self.order is None else x.gather(2, self.order[:, None, :, None].expand_as(x))

    def back(self, out):
        """[batch, tokens, heads, dim] as the tokens came."""
        return out if self.order is None else torch.empty_like(out).scatter_(
            1, self.order[:, :, None, None].expand_as(out), out)
