"""A decode step as one CUDA graph: no Python, and no launch one by one, between a token and the next."""
import torch

from .generation import cache_keyword


class CapturedStep:
    """Steps of a model with a TesseraCache on a GPU; the same bits as calls of the model.

    model: on a GPU, with the attention "tessera"
    cache: with a prompt in it; turns, resets and changes of the budget may come between steps

    The first step of each kind runs as it is, the second is captured, the others replay it.
    """

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self._made_for, self._tokens = None, None
        self._kinds = {}  # by what a step does: None, or its graph and logits

    @torch.no_grad()
    def step(self, tokens, position_ids=None):
        """tokens, position_ids [batch, 1] -> logits [batch, 1, vocabulary], which the next step overwrites.

        position_ids: where a batch has padding; else a token's position is the cache's length.
        """
        column, kind = self.cache.get_seq_length(), self.cache.prepare_step(tokens)
        if self._made_for is not self.cache.memory_of:
            self._made_for, self._tokens, self._kinds = self.cache.memory_of, None, {}
        try:
            self._take(tokens, position_ids, column)
            if kind not in self._kinds:
                self._kinds[kind] = None
                return self._forward()
            if self._kinds[kind] is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    logits = self._forward()
                self._kinds[kind] = graph, logits
            else:
                self.cache.took_captured_step()
            graph, logits = self._kinds[kind]
            graph.replay()
            return logits
        except BaseException:
            self.cache.fail_step()
            raise

    def _take(self, tokens, position_ids, column):
        """What changes from step to step goes where the graph reads it."""
        if self._tokens is None:
            self._tokens = torch.empty_like(tokens, memory_format=torch.contiguous_format)
            self._positions = torch.empty_like(self._tokens)
            self._columns = torch.empty(1, dtype=torch.long, device=tokens.device)
        self._tokens.copy_(tokens)
        self._columns.fill_(column)
        self._positions.copy_(self._columns.expand_as(self._positions) if position_ids is None else position_ids)

    def _forward(self):
        return self.model(input_ids=self._tokens, position_ids=self._positions, cache_position=self._columns, use_cache=True,
                          **{cache_keyword(self.model): self.cache}).logits
