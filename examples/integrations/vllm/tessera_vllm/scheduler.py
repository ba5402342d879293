"""--scheduler-cls tessera_vllm.scheduler.Scheduler: vLLM's scheduler, whose requests have schedules.

It is where a request's extra_args and its blocks meet. Two things differ from vLLM's: a request's hashes know its
schedule, and no step takes a prompt beyond an end at which it is compacted. So what follows an end attends the
compacted prompt, also when a preempted request comes again with what it has generated.
"""
import json

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from . import names, settings
from .blocks import CompactedManager, ScheduledHashes, schedule_of
from .operators import Model, Operators

names.check()
logger = init_logger(__name__)


class Scheduler(VllmScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = settings.of_server(self.vllm_config.additional_config)
        if self.asked is None:
            raise settings.refused("additional_config", "without the key tessera", "settings beside this scheduler_cls",
                                   "pass --additional-config '{\"tessera\": {...}}', or leave the scheduler out")
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], CompactedManager):
            raise settings.refused("the model's kinds of KV caches", [type(one).__name__ for one in managers],
                                   "full attention in every layer", "serve this model without tessera's settings")
        self.operators = Operators(self.asked, Model(self.vllm_config))
        self.manager = managers[0]
        self.manager.requests = self.requests
        if self.asked.figures:
            try:
                open(self.asked.figures, "a", encoding="utf-8").close()
            except OSError as error:
                raise settings.refused("figures", repr(self.asked.figures), "a file that can be written",
                                       f"pass another path ({error.strerror})") from error
            self.manager.when_freed = self._write_figures

    def add_request(self, request):
        if request.request_id not in self.requests:
            request.block_hashes = ScheduledHashes(request.block_hashes, self._schedule_of(request))
        super().add_request(request)

    def _schedule_of(self, request):
        params = request.sampling_params
        prompt, block = request.num_prompt_tokens, self.manager.block_size
        if not request.resumable:  # else text that comes later makes the prompt longer: where it ends is not known
            try:
                return self.operators.schedule(settings.for_request(self.asked, params.extra_args), prompt, block)
            except ValueError as error:
                # requests.py has refused what it can see; raised here it would end the engine.
                logger.error("%s; the request stays whole", error)
        return self.operators.schedule(self._whole(params), prompt, block)

    def _whole(self, params):
        """Settings of a request that stays whole; the worker learns of it as if the request had asked for it."""
        params.extra_args = {**(params.extra_args or {}), "tessera": {"mode": "off"}}
        return settings.for_request(self.asked, params.extra_args)

    def _reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens):
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        schedule = schedule_of(request)
        end = schedule.next_compaction(num_computed_tokens) if schedule is not None else None
        return tokens if end is None else min(tokens, end - num_computed_tokens)

    def _write_figures(self, request_id, blocks):
        """One line of a request that ends: what it held, and what the steps of its answer read of one layer."""
        request = self.requests.get(request_id)
        schedule = schedule_of(request)
        if schedule is None or not request.is_finished():
            return
        stored = request.num_computed_tokens
        steps = range(request.num_prompt_tokens + 1, stored + 1)  # tokens that are there when a step attends
        read = sum(schedule.tokens_read(tokens - 1) for tokens in steps)
        line = {"request": request_id, "prompt": request.num_prompt_tokens, "generated": request.num_output_tokens,
                "blocks_of_all_tokens": len(blocks), "blocks_held": sum(not block.is_null for block in blocks),
                "blocks_freed": sum(block.is_null for block in blocks), "tokens_stored_at_steps": sum(steps),
                "tokens_read_at_steps": read, "preemptions": request.num_preemptions}
        with open(self.asked.figures, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
