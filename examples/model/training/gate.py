"""FastKVzip's gate: a score for each token and key-value head from the token's hidden state alone."""

import torch
from safetensors.torch import load_file, save_file
from torch import nn

WIDTH, SINKS = 16, 16  # of the gate's queries and keys; learned keys that a token competes with
EPS = 1e-5


class LayerGate(nn.Module):
    """One layer's gate.

    q = norm(hidden Wq + c) and k = norm(hidden Wk), for each head of WIDTH numbers; norm is RMSNorm with learned
    weights. logit = q.k / sqrt(WIDTH) + b, base_s = q.k_base_s / sqrt(WIDTH). A query head's score is
    1 / (1 + sum over s of exp(base_s - logit)), a key-value head's the mean over its query heads.
    """

    def __init__(self, hidden, kv_heads, group):
        super().__init__()
        self.kv_heads, self.group = kv_heads, group
        self.q_proj = nn.Linear(hidden, kv_heads * group * WIDTH)
        self.k_proj = nn.Linear(hidden, kv_heads * WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, EPS)
        self.k_base = nn.Parameter(torch.randn(kv_heads, 1, SINKS, WIDTH))
        self.b = nn.Parameter(torch.zeros(kv_heads, group))

    def forward(self, hidden):
        """hidden [tokens, hidden], after the input RMSNorm -> scores [kv_heads, tokens] in (0, 1)."""
        q = self.q_norm(self.q_proj(hidden).view(-1, self.kv_heads, self.group, WIDTH))
        k = self.k_norm(self.k_proj(hidden).view(-1, self.kv_heads, 1, WIDTH))
        logit = (q * k).sum(-1) / WIDTH ** 0.5 + self.b
        base = torch.einsum("nhgd,hsd->nhgs", q, self.k_base[:, 0]) / WIDTH ** 0.5
        return torch.sigmoid(logit - base.logsumexp(-1)).mean(-1).T  # 1 / (1 + sum exp(base - logit))


class Gate(nn.Module):
    """The gates of all layers; tensors are named layers.I.NAME."""

    def __init__(self, layers, hidden, kv_heads, heads):
        super().__init__()
        self.layers = nn.ModuleList(LayerGate(hidden, kv_heads, heads // kv_heads) for _ in range(layers))

    def forward(self, hidden):
        """hidden [layers, tokens, hidden] -> scores [layers, kv_heads, tokens]."""
        return torch.stack([layer(rows) for layer, rows in zip(self.layers, hidden)])

    def save(self, path):
        """bf16 weights."""
        save_file({name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in self.state_dict().items()},
                  path, metadata={"format": "pt"})

    def restore(self, path):
        """Takes a file's weights, widened to this gate's type."""
        self.load_state_dict(load_file(path))
        return self
