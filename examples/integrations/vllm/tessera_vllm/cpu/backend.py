"""The worker's side on the CPU: vLLM's own kernels over the columns of a table that are still read, and what is
observed and compacted behind their attention."""
import dataclasses

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from .. import plan, refusals, settings, worker
from ..blocks import CompactedSpec
from . import layout, reading, steps, uneven


@dataclasses.dataclass(frozen=True)
class ObservedRow:
    """A request of a step that is compacted behind it, or some of whose queries are observed or kept."""
    request: str
    queries: slice           # its own in the step's
    start: int               # its tokens are those from start to end
    end: int
    row: plan.Row
    schedule: plan.Schedule
    blocks: torch.Tensor     # those that attention reads, in order


class Backend(cpu_attn.CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return Attention

    @staticmethod
    def get_builder_cls():
        return MetadataBuilder

    @classmethod
    def customize_spec(cls, spec):
        spec = super().customize_spec(spec)
        if worker.active is None or isinstance(spec, CompactedSpec):
            return spec
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
            raise settings.refused("a layer's KV cache", type(spec).__name__, "full, causal attention without a window",
                                   "serve this model without tessera's settings")
        return CompactedSpec.of(spec)


class MetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, *args, **kwargs):
        super().__init__(kv_cache_spec, layer_names, *args, **kwargs)
        self.worker = worker.active if isinstance(kv_cache_spec, CompactedSpec) else None
        if self.worker is not None:
            if self.isa == "amx":
                # Its pages lie in tiles, which no stride describes. "vec" takes the same blocks, and is there as well.
                self.isa = "vec"
                self._set_isa_to_layers(layer_names)
            self.worker.requests.layers = {name: index for index, name in enumerate(layer_names)}

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        known = self.worker.rows(common_attn_metadata.num_reqs) if self.worker is not None else None
        if known is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        skipped, observed, kept = self._rows(common_attn_metadata, known)
        if any(skipped):
            common_attn_metadata = self._without(common_attn_metadata, skipped, kept)
        step, rows = None, list(kept.values())
        if self.worker.requests.asked.reads:
            step = reading.Step(self.worker.requests, common_attn_metadata, known, skipped, self)
            common_attn_metadata = common_attn_metadata.replace(seq_lens=step.lengths,
                                                                max_seq_len=int(step.lengths.max()))
        elif rows:
            step = uneven.Step(rows, self.worker.requests.tables_of(rows, self.block_size), self,
                               alone=len(rows) == len(known))
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.virtual_step = step
        metadata.observed_step, metadata.observed_rows = self._observed_step(observed)
        return metadata

    def _observed_step(self, observed):
        """The rows that one operator call observes, and the others."""
        requests = self.worker.requests
        together = [one for one in observed if one.row.observes and one.end - one.start == 1 and not one.row.keeps
                    and requests.asked.observes == "every_query"]
        requests.join_batch([one.request for one in together], self.block_size)
        if not together:
            return None, observed
        return (steps.step_of(together, self.num_kv_heads, self.block_size),
                [one for one in observed if one not in together])

    def _rows(self, metadata, requests):
        """Of every row the columns that are not read; the rows with something to do behind attention; and those whose
        heads have kept pages of their own, by row."""
        begins, ends = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens.tolist()
        skipped, observed, kept = [], [], {}
        for number, request in enumerate(requests):
            schedule = self.worker.requests.schedule(request, self.block_size)
            end = ends[number]
            start = end - (begins[number + 1] - begins[number])
            row = plan.row_of(schedule, start, end)
            skipped.append(row.skipped)
            if schedule.uneven and row.skipped:
                kept[number] = uneven.Row(self.worker.requests.kept[request.req_id], begins[number], end - start, end,
                                          metadata.block_table_tensor[number])
            if row.compacts or row.observes or row.keeps:
                blocks = metadata.block_table_tensor[number, row.skipped:plan.blocks_for(end, self.block_size)]
                own = slice(begins[number], begins[number + 1])
                observed.append(ObservedRow(request.req_id, own, start, end, row, schedule, blocks))
            following = schedule.next_compaction(start)
            if following is not None and end > following:
                raise RuntimeError(f"tessera: a step takes a prompt from {start} to {end}; expected at most "
                                   f"{following}, where it is compacted; pass --scheduler-cls {refusals.SCHEDULER}")
        return skipped, observed, kept

    def _without(self, metadata, skipped, kept):
        """Tables without their first columns: as if these tokens had never been. Rows with kept pages, which are
        attended behind vLLM's kernel, have their queries' tokens alone."""
        table = metadata.block_table_tensor
        skip = torch.tensor(skipped, dtype=torch.int64)
        columns = (torch.arange(table.size(1)) + skip[:, None]).clamp_(max=table.size(1) - 1)
        lengths = metadata.seq_lens - (skip * self.block_size).to(metadata.seq_lens.dtype)
        for number, row in kept.items():
            lengths[number] = row.tokens
        return metadata.replace(block_table_tensor=table.gather(1, columns), seq_lens=lengths,
                                max_seq_len=int(lengths.max()))


class Attention(cpu_attn.CPUAttentionBackendImpl):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        asked = settings.of_server(get_current_vllm_config().additional_config)
        if asked is None:
            worker.active = None  # another model of this process had settings
        elif worker.active is None or worker.active.requests.asked != asked:
            raise settings.refused("worker_cls", get_current_vllm_config().parallel_config.worker_cls, refusals.WORKER,
                                   f"pass --worker-cls {refusals.WORKER}")
        elif self.kv_sharing_target_layer_name is not None or self.alibi_slopes is not None or self.sinks is not None \
                or self.sliding_window != -1:
            raise settings.refused("a layer's attention",
                                   "one with ALiBi, sink logits, a window or another layer's keys",
                                   "its own keys without these", "serve this model without tessera's settings")
        elif (self.num_heads, self.num_kv_heads, self.head_size) != worker.active.requests.operators.model.heads():
            raise settings.refused("a layer's q heads, kv_heads and head dim",
                                   (self.num_heads, self.num_kv_heads, self.head_size),
                                   f"{worker.active.requests.operators.model.heads()}, as the model's config has them",
                                   "serve this model without tessera's settings")
        self.requests = worker.active.requests if asked is not None else None

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        virtual = getattr(attn_metadata, "virtual_step", None)
        result = output if virtual is not None and virtual.alone else \
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if virtual is not None:
            virtual.attend(self.requests.layers[layer.layer_name], layer, self, query, kv_cache, output)
        step = getattr(attn_metadata, "observed_step", None)
        if step is not None:
            self._observe_step(layer, query, kv_cache, step)
        for one in getattr(attn_metadata, "observed_rows", ()):
            self._after_attention(layer, query, kv_cache, one)
        return result

    def _operations(self):
        return self.requests.operators.pages(self.scale, float(self.logits_soft_cap))

    def operations_of_reading(self, reads):
        return self.requests.operators.reading(self.scale, float(self.logits_soft_cap), reads)

    def index_of(self, layer, kv_cache):
        """A layer's index; a new one where the engine has taken other memory for its cache."""
        indices, name = self.requests.indices, layer.layer_name
        if name not in indices or indices[name].address != kv_cache.data_ptr():
            indices[name] = reading.Index(self._operations(), kv_cache)
        return indices[name]

    def _observe_step(self, layer, query, kv_cache, step):
        requests, operations = self.requests, self._operations()
        index, batch = requests.layers[layer.layer_name], self.requests.batch
        columns = batch.columns(layer.layer_name, kv_cache, step, requests.of_layer)
        query = query.view(-1, self.num_heads, self.head_size)
        paged = batch.observe(operations, index, columns, step, query)
        for row, one in enumerate(step.rows):
            tokens = batch.stored[row] = one.end - one.row.skipped * one.schedule.block
            if one.row.compacts:
                stored = layout.RequestLayer(layout.sequence(paged, row), one.schedule.block, tokens)
                stored.compact(operations, index, query[one.queries], one.schedule.kept_blocks)
                columns.drop(row, stored.begin, tokens)
                batch.stored[row] = tokens - stored.begin
                requests.compactions += index == 0

    def _after_attention(self, layer, query, kv_cache, one):
        row, seen = one.row, self.requests.of_layer(one.request, layer.layer_name)
        own = query[one.queries].view(-1, self.num_heads, self.head_size)
        wanted = max(row.queries if row.compacts else 0, row.keeps)
        newest = own[-wanted:] if seen.queries is None or own.size(0) >= wanted else \
            torch.cat([seen.queries, own])[-wanted:]
        if row.compacts or row.observes:
            self._observe(layer, kv_cache, one, seen, own, newest[-row.queries:])
        seen.queries = newest[-row.keeps:].clone() if row.keeps else None

    def _observe(self, layer, kv_cache, one, seen, own, newest):
        """own: the step's queries; newest: those that a choice looks at, some of them of earlier steps."""
        requests, row, schedule = self.requests, one.row, one.schedule
        operations = self._operations()
        index = requests.layers[layer.layer_name]
        tokens = one.end - row.skipped * schedule.block
        known = 0 if seen.positions is None else seen.positions.size(1)
        behind = torch.arange(one.end - tokens + known, one.end, dtype=torch.int32)
        positions = behind[None] if known == 0 else \
            torch.cat([seen.positions, behind.expand(seen.positions.size(0), -1)], 1)
        scores = None
        if requests.asked.observes in ("every_query", "newest_query"):
            scores = torch.zeros(kv_cache.size(1), tokens)
            if seen.scores is not None:
                scores[:, :known] = seen.scores
        stored = layout.RequestLayer.of(kv_cache, one.blocks, tokens, positions, scores)
        if requests.asked.observes == "statistics" and one.start < schedule.prompt:
            seen.statistics = seen.statistics or operations.statistics(1)
        if row.observes or requests.asked.observes == "newest_query":
            stored.observe(operations, index, own, seen.statistics)
        if row.compacts:
            if newest.size(0) != row.queries:
                raise RuntimeError(f"tessera: {newest.size(0)} queries of {one.request} are there; expected "
                                   f"{row.queries}; this is an error of tessera_vllm: please report it")
            if schedule.uneven:
                requests.kept_pages(one.request, self.num_kv_heads, schedule, one.end).compact(
                    index, stored, operations, newest, schedule)
            else:
                stored.compact(operations, index, newest, schedule.kept_blocks, seen.statistics)
            if schedule.read_blocks:
                self.index_of(layer, kv_cache).renew(stored)
            requests.compactions += index == 0
        if schedule.next_compaction(one.end) is None:
            seen.positions = seen.scores = seen.statistics = None
        elif row.compacts or scores is not None:
            seen.positions = stored.positions()
            seen.scores = stored.scores() if schedule.every_query and scores is not None else None
