"""The shipped model in a few lines of PyTorch, fp32, which compacts prompts by a schedule: what vLLM's tokens are
compared with.

It has no blocks that move and no tables: of each layer and kv_head the rows in order, of which a choice keeps some,
as many of every head or not, or of which a token behind the prompt reads some. With blocks of one token it is what
`tessera eval` does: the budget exactly, and every token of the prompt a candidate.
"""
import collections
import json
import pathlib

import safetensors.torch
import torch
import transformers
from tessera_vllm import operators


class Reference:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        self.w = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
        self.layers, self.dim = self.config["num_hidden_layers"], self.config["head_dim"]
        self.q_heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.eps = self.config["rms_norm_eps"]
        self._seen = collections.OrderedDict()  # leading tokens of a prompt -> what is stored of them, and logits

    def _norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w[name + ".weight"]

    def _turn(self, x, positions):
        """RoPE of [tokens, heads, dim]."""
        speeds = self.config["rope_theta"] ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = (positions[:, None].float() * speeds)[:, None]
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, q, k, v):
        """q [tokens, q_heads, dim], the newest tokens; k and v [stored, dim] of every kv_head."""
        tokens = q.size(0)
        q = q.view(tokens, self.kv_heads, -1, self.dim)
        out = []
        for head in range(self.kv_heads):
            logits = torch.einsum("tgd,sd->gts", q[:, head], k[head]) * self.dim ** -0.5
            stored = k[head].size(0)
            hidden = torch.ones(tokens, stored, dtype=torch.bool).triu(stored - tokens + 1)
            out.append(torch.einsum("gts,sd->tgd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v[head]))
        return torch.stack(out, 1).reshape(tokens, -1)

    def _estimate(self, q, low, high, channels):
        """Scores of blocks by their smallest and largest keys [blocks, dim]. q [group, dim].

        Of Quest: the largest product that a key between them could have, summed over the group. Of RocketKV, by so
        many channels: attention of each head to keys that have in every channel the larger value where the group's
        queries are above 0 in sum, else the smaller one; the mean over the group.
        """
        if not channels:
            return torch.maximum(q[:, None] * low, q[:, None] * high).sum((0, 2))
        best = q.abs().sum(0).topk(channels).indices
        keys, some = torch.where(q.sum(0) > 0, high, low)[:, best], q[:, best]
        scale = (self.dim * some.abs().sum(1) / q.abs().sum(1)).rsqrt()
        return (some @ keys.T * scale[:, None]).softmax(-1).mean(0)

    def _read(self, q, k, v, schedule):
        """The rows that a token reads by the methods' definitions, in double: those of the best blocks, and the newest.
        q [1, q_heads, dim]; k and v as in _attend."""
        q, rows = q.double().view(self.kv_heads, -1, self.dim), []
        for head in range(self.kv_heads):
            full = (k[head].size(0) - 1) // schedule.block
            blocks = k[head][:full * schedule.block].double().view(full, schedule.block, self.dim)
            scores = self._estimate(q[head], blocks.amin(1), blocks.amax(1), schedule.channels)
            chosen = torch.zeros(full + 1, dtype=torch.bool)
            chosen[scores.topk(schedule.read_blocks - 1).indices] = chosen[-1] = True
            rows.append(chosen.repeat_interleave(schedule.block)[:k[head].size(0)])
        return [keys[own] for keys, own in zip(k, rows)], [values[own] for values, own in zip(v, rows)]

    def _layer(self, store, stored):
        """The first rows of a layer as Tessera's operators take them."""
        from tessera_torch import PagedLayer
        rows = lambda name: torch.stack([rows[:stored] for rows in store[name]])
        return PagedLayer(rows("k").transpose(0, 1)[None].contiguous(), rows("v").transpose(0, 1)[None].contiguous(),
                          torch.zeros(1, 1, dtype=torch.int32),
                          torch.full((1, self.kv_heads), stored, dtype=torch.int32),
                          rows("positions")[None], rows("scores")[None])

    def _observe(self, store, index, q, start, operations, of_prompt):
        if operations.observes == "statistics" and not of_prompt:
            return
        if operations.observes in ("nothing", "window"):
            return
        layer = self._layer(store, store["k"][0].size(0))
        operations.observe(index, layer, q[None].contiguous(), torch.tensor([start], dtype=torch.int32),
                           statistics=store["statistics"])
        store["scores"] = list(layer.scores[0])

    def _pass(self, ids, start, memory, operations, of_prompt, schedule):
        """Logits of the last of these tokens; rows, positions and what is observed go into memory, by layer."""
        positions = torch.arange(start, start + len(ids))
        x = self.w["embed_tokens.weight"][ids]
        for index in range(self.layers):
            name, store = f"layers.{index}.", memory[index]
            h = self._norm(x, name + "input_layernorm")
            q, k, v = ((h @ self.w[f"{name}self_attn.{kind}_proj.weight"].T).view(len(ids), -1, self.dim)
                       for kind in "qkv")
            q, k = self._turn(q, positions), self._turn(k, positions)
            for head in range(self.kv_heads):
                for key, new in (("k", k[:, head]), ("v", v[:, head]), ("positions", positions.int()),
                                 ("scores", torch.zeros(len(ids)))):
                    store[key][head] = torch.cat([store[key][head], new])
            store["q"] = torch.cat([store["q"], q])[-256:]
            self._observe(store, index, q, start, operations, of_prompt)
            reads = schedule.read_blocks and start >= schedule.first_reading(start)
            rows = self._read(q, store["k"], store["v"], schedule) if reads else (store["k"], store["v"])
            x = x + self._attend(q, *rows) @ self.w[name + "self_attn.o_proj.weight"].T
            h = self._norm(x, name + "post_attention_layernorm")
            gate, up = h @ self.w[name + "mlp.gate_proj.weight"].T, h @ self.w[name + "mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ self.w[name + "mlp.down_proj.weight"].T
        head = self.w["embed_tokens.weight"] if self.config["tie_word_embeddings"] else self.w["lm_head.weight"]
        return self._norm(x[-1], "norm") @ head.T

    def _compact(self, store, index, schedule, end, operations):
        tail = end % schedule.block
        stored = store["k"][0].size(0) - tail
        queries = store["q"][-min(max(1, schedule.window), end):]
        number = lambda value: torch.tensor([value], dtype=torch.int32)
        kept = schedule.kept_blocks * schedule.block
        whole = {"granularity": schedule.block, "tails": number(-(-schedule.window // schedule.block) * schedule.block)}
        slots, counts = operations.choose(
            index, self._layer(store, stored), queries[None].contiguous(), number(end - queries.size(0)),
            budgets=number(kept), statistics=store["statistics"], **(whole if schedule.uneven else {}))
        assert counts.sum() <= kept * self.kv_heads + self.kv_heads // 2 if schedule.uneven else counts.eq(kept).all()
        for head in range(self.kv_heads):
            own = slots[0, head, :int(counts[0, head])].long()
            for name in ("k", "v", "positions", "scores"):
                rows = store[name][head]
                store[name][head] = torch.cat([rows[own], rows[stored:]])

    def _remember(self, tokens, memory, logits):
        self._seen[tokens] = (_copied(memory), logits)
        self._seen.move_to_end(tokens)
        while len(self._seen) > 24:
            self._seen.popitem(last=False)

    @torch.no_grad()
    def generate(self, prompt, new, schedule, operations):
        """Greedy tokens."""
        by_head = lambda *shape, dtype=torch.float32: [torch.zeros(0, *shape, dtype=dtype)
                                                       for _ in range(self.kv_heads)]
        memory = [{"k": by_head(self.dim), "v": by_head(self.dim), "q": torch.zeros(0, self.q_heads, self.dim),
                   "positions": by_head(dtype=torch.int32), "scores": by_head(),
                   "statistics": operations.statistics(1) if operations.observes == "statistics" else None}
                  for _ in range(self.layers)]
        position, generated = 0, []
        # Until a prompt is compacted, all methods that do not observe every query store the same of it.
        alike = operations.observes in ("nothing", "window")
        while len(generated) < new:
            of_prompt = position < len(prompt)
            end = min(schedule.next_compaction(position) or len(prompt), position + 1024, len(prompt)) if of_prompt \
                else position + 1
            alike = alike and of_prompt
            seen = self._seen.get(tuple(prompt[:end])) if alike else None
            if seen is not None:
                memory, logits = _copied(seen[0]), seen[1]
            else:
                logits = self._pass(prompt[position:end] if of_prompt else generated[-1:], position, memory, operations,
                                    of_prompt, schedule)
            if alike:
                self._remember(tuple(prompt[:end]), memory, logits)
            if schedule.compacts(end):
                alike = False
                for index, store in enumerate(memory):
                    self._compact(store, index, schedule, end, operations)
            position = end
            if position >= len(prompt):
                generated.append(int(logits.argmax()))
        return generated


def _copied(memory):
    """Tensors of a layer are never written to, but its lists of them are."""
    return [{name: list(value) if isinstance(value, list) else value for name, value in store.items()}
            for store in memory]


class ReferenceModel:
    """What Operators ask of a model, of the reference."""

    def __init__(self, reference, path, block):
        self.path, self.dtype, self.block = path, torch.float32, block
        self.layers, self.q_heads, self.kv_heads = reference.layers, reference.q_heads, reference.kv_heads
        self.dim, self.config = reference.dim, transformers.AutoConfig.from_pretrained(path)

    rope_frequencies = operators.Model.rope_frequencies


def expected(reference, model, own, prompts, new, block):
    """Tokens of the reference. own: settings.Settings."""
    known = operators.Operators(own, ReferenceModel(reference, model, block))
    return [reference.generate(prompt, new, known.schedule(own, len(prompt), block), known.pages())
            for prompt in prompts]
