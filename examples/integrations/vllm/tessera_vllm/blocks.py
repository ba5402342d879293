"""The scheduler's side: blocks that a request has given up are freed, and what is overwritten stays out of the prefix
cache.

vLLM's registry gives the layers' spec a manager of one's own. It asks the requests' schedules (plan.py), which the
scheduler (scheduler.py) has put beside the hashes of their blocks.
"""
import dataclasses

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactedSpec(FullAttentionSpec):
    """Full attention whose requests may give up leading blocks."""

    @classmethod
    def of(cls, spec):
        return cls(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init})


class ScheduledHashes(list):
    """The hashes of a request's blocks, with its schedule: vLLM asks for prefix hits by the hashes alone."""

    def __init__(self, hashes, schedule):
        super().__init__(hashes)
        self.schedule = schedule


def schedule_of(request):
    """A request's schedule; None: it stays whole."""
    return getattr(request.block_hashes, "schedule", None) if request is not None else None


class CompactedManager(FullAttentionManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests = {}       # the scheduler's own, by id
        self.when_freed = None   # called with a request's id and its blocks before they go back to the pool

    def schedule(self, request_id):
        return schedule_of(self.requests.get(request_id))

    def remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens=None):
        schedule = self.schedule(request_id)
        if schedule is not None:
            self._remove_blocks_in_range(request_id, 0, schedule.dropped(processed_computed_tokens))

    # An instance's method where vLLM has one of the class: its coordinator of a single group calls it on the manager.
    def find_longest_cache_hit(self, block_hashes, max_length, *args, **kwargs):
        schedule = getattr(block_hashes, "schedule", None)
        if schedule is not None:
            max_length = schedule.longest_hit(max_length)
        return super().find_longest_cache_hit(block_hashes, max_length, *args, **kwargs)

    def cache_blocks(self, request, num_tokens, *args, **kwargs):
        schedule = schedule_of(request)
        shared = schedule.shared_blocks() if schedule is not None else None
        if shared is not None:
            num_tokens = min(num_tokens, shared * self.block_size)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def get_num_blocks_to_allocate(self, request_id, num_tokens, new_computed_blocks, *args, apply_admission_cap=False,
                                   **kwargs):
        needed = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args,
                                                    apply_admission_cap=apply_admission_cap, **kwargs)
        schedule = self.schedule(request_id)
        if not apply_admission_cap or schedule is None:
            return needed
        # To admit a request vLLM asks for the blocks of all its tokens, but it never holds them all at once. Hits that
        # nobody holds are taken from the free blocks, too.
        hits = len(new_computed_blocks)
        evictable = self._get_num_evictable_blocks(new_computed_blocks)
        first = max(0, schedule.blocks_before_first(num_tokens) - hits) + evictable
        return min(needed, max(first, schedule.most_blocks_later(num_tokens)))

    def pop_blocks_for_free(self, request_id):
        if self.when_freed is not None:
            self.when_freed(request_id, self.req_to_blocks.get(request_id, ()))
        return super().pop_blocks_for_free(request_id)


def register():
    # vLLM registers its own specs only into an empty registry, so they must be there first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(CompactedSpec, CompactedManager, uniform_type_base_spec=FullAttentionSpec)
