"""The model as an observer of one text: hidden states, KVzip scores, and answers from a part of the tokens.

The model is transformers' Llama with an attention function of our own, which works as any other one and looks at
keys and queries on the way.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache

import evaluate

PART, WORDS, SINKS = 2048, 8, 4  # tokens of a re-read part, of the words before it, and always in its softmax
ROWS = 64  # queries whose probabilities are in memory together


class Reader:
    """A model in float32. Text is a list of tokens, BOS included."""

    def __init__(self, folder, processor, device="cpu"):
        AttentionInterface.register("reader", self._attend)
        self.model = evaluate.load(folder, torch.float32, "reader", device).model
        self.device, config = device, self.model.config
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.heads, self.hidden_size = config.num_attention_heads, config.hidden_size
        self._first = processor.encode("\n\nRepeat the previous context exactly.")
        self._next = processor.encode("\n\nRepeat the part of the previous context exactly, starting with")
        self._behind = processor.encode("\n")
        self._part, self._scores, self._kept, self._hidden = None, {}, None, {}
        for index, layer in enumerate(self.model.layers):
            layer.input_layernorm.register_forward_hook(
                lambda _, __, out, index=index: self._hidden.__setitem__(index, out[0]))

    @torch.no_grad()
    def read(self, text):
        """Hidden states that enter each layer's attention [layers, tokens, hidden] and the cache behind the text."""
        cache = DynamicCache()
        self._forward(text, cache)
        return torch.stack([self._hidden[layer] for layer in range(self.layers)]), cache

    @torch.no_grad()
    def kvzip_scores(self, text, cache):
        """What KVzip thinks of a text that `cache` holds: [layers, kv_heads, tokens], probabilities."""
        scores = torch.zeros(self.layers, self.kv_heads, len(text))
        for done in range(0, len(text), PART):
            part = text[done:done + PART]
            words = text[max(0, done - WORDS):done]
            self._part = done, len(part), len(text)
            self._forward((self._next if done else self._first) + words + self._behind + part, cache)
            cache.crop(len(text) - cache.get_seq_length())
            self._part = None
            for layer in range(self.layers):
                scores[layer, :, done:done + len(part)] = self._scores[layer].cpu()
        return scores

    @torch.no_grad()
    def guesses(self, text, cache, kept=None):
        """The likeliest token behind each of `text`, which follows what the cache holds and leaves it as it was.

        With `kept`, flags [layers, kv_heads, tokens], the text attends to these of the cached tokens and to itself.
        """
        self._kept = kept
        hidden = self._forward(text, cache)
        self._kept = None
        cache.crop(-len(text))
        return (hidden @ self.model.embed_tokens.weight.T).argmax(-1).tolist()

    def _forward(self, text, cache):
        tokens = torch.tensor([text], device=self.device)
        return self.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state[0]

    def _attend(self, module, query, key, value, mask, scaling, **_):
        rows, count = query.shape[2], key.shape[2]
        if self._part:
            self._scores[module.layer_idx] = self._largest(query[0] * scaling, key[0])
        if rows == count:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            at = torch.arange(count, device=self.device)
            seen = at <= at[count - rows:, None]
            if self._kept is not None:
                kept = F.pad(self._kept[module.layer_idx], (0, rows), value=True).to(self.device)
                seen = seen & kept.repeat_interleave(self.heads // self.kv_heads, 0)[:, None]
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def _largest(self, query, key):
        """The largest probability that any query of a group gives each key of the part: [kv_heads, tokens]."""
        first, count, before = self._part
        sinks = min(SINKS, first)
        part = slice(first, first + count)
        keys = torch.cat([key[:, :sinks], key[:, part], key[:, before:]], 1).transpose(1, 2)[:, None]
        query = query.unflatten(0, (self.kv_heads, -1))
        largest = torch.zeros(self.kv_heads, count, device=self.device)
        for begin in range(0, query.shape[2], ROWS):
            rows = query[:, :, begin:begin + ROWS]
            end = sinks + count + begin + rows.shape[2]  # keys behind the last row's own are of no use
            logits = rows @ keys[..., :end]
            logits[..., end - rows.shape[2]:] += torch.full(2 * rows.shape[2:3], -torch.inf, device=self.device).triu(1)
            largest = torch.maximum(largest, logits.softmax(-1)[..., sinks:sinks + count].amax((1, 2)))
        return largest
