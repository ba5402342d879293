"""--worker-cls tessera_vllm.worker.Worker: vLLM's CPU worker, which knows the requests of a step and what is kept of
them.

vLLM tells an attention backend lengths and tables, but not whose they are: that is known here.
"""
import dataclasses

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from . import names, operators, refusals, settings
from .cpu import steps, uneven

names.check()
active = None  # of this process; None: its model is served without tessera


@dataclasses.dataclass
class Observed:
    """What later ends of a request need of a layer.

    queries:    the newest ones, [tokens, q_heads, dim]
    positions:  of what is stored behind the blocks that were dropped, as far as it was looked at, [kv_heads, tokens];
                None: every token from 0 on
    scores:     of the same tokens, for methods that add up what every query gives, [kv_heads, tokens]
    statistics: sums over the prompt's queries, for methods that go by these
    """
    queries: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    statistics: tuple | None = None


class Requests:
    """What the backend must know of requests between steps, dropped when they end or are preempted."""

    def __init__(self, asked, model):
        self.asked = asked
        self.operators = operators.Operators(asked, model)
        self.schedules = {}   # request id -> Schedule
        self.observed = {}    # request id -> {layer: Observed}
        self.kept = {}        # request id -> uneven.KeptPages
        self.tables = None    # uneven.Tables of the requests that decode together
        self.layers = {}      # layer -> its number
        self.indices = {}     # layer -> reading.Index, where steps read a part
        self.compactions = 0  # how often a prompt was compacted
        self.batch = None     # steps.Batch of the requests that decode together

    def schedule(self, request, block):
        """request: the runner's."""
        known = self.schedules.get(request.req_id)
        if known is None:
            params = request.sampling_params
            own = settings.for_request(self.asked, params.extra_args if params is not None else None)
            known = self.schedules[request.req_id] = self.operators.schedule(own, request.num_prompt_tokens, block)
        return known

    def of_layer(self, request_id, name):
        return self.observed.setdefault(request_id, {}).setdefault(name, Observed())

    def drop(self, request_id):
        for table in (self.schedules, self.observed):
            table.pop(request_id, None)
        if self.kept.pop(request_id, None) is not None:
            self.tables = None
        if self.batch is not None:
            self.batch.forget(request_id)
            if not any(self.batch.ids):
                self.batch = None

    def kept_pages(self, request_id, kv_heads, schedule, end):
        """Of a request whose prompt is compacted at `end`, in a layer after the other."""
        if request_id not in self.kept:
            self.kept[request_id] = uneven.KeptPages(len(self.layers), kv_heads, schedule.kept_blocks,
                                                     end // schedule.block)
        return self.kept[request_id]

    def tables_of(self, rows, block):
        """rows: uneven.Row."""
        if self.tables is None or self.tables.of != uneven.Tables.key(rows, block):
            self.tables = uneven.Tables(rows, block)
        return self.tables

    def join_batch(self, ids, block):
        """These requests are observed together in the step that begins."""
        if self.batch is not None and self.batch.ids != ids:
            self.batch.store(self.of_layer)
            self.batch = None
        if self.batch is None and ids:
            self.batch = steps.Batch(ids, block)

    def begin_step(self, scheduled):
        """scheduled: vLLM's SchedulerOutput. A request that begins, again or for the first time, has nothing stored."""
        for request_id in scheduled.finished_req_ids:
            self.drop(request_id)
        for request_id in scheduled.preempted_req_ids or ():
            self.drop(request_id)
        for request in scheduled.scheduled_new_reqs:
            self.drop(request.req_id)
        for request_id in scheduled.scheduled_cached_reqs.resumed_req_ids:
            self.drop(request_id)


class Worker(CPUWorker):
    def __init__(self, vllm_config, *args, **kwargs):
        global active
        asked = settings.of_server(vllm_config.additional_config)
        if asked is None:
            raise settings.refused("additional_config", "without the key tessera", "settings beside this worker_cls",
                                   "pass --additional-config '{\"tessera\": {...}}', or leave the worker out")
        model = refusals.check(vllm_config, asked)
        self.requests = Requests(asked, model)
        active = self
        super().__init__(vllm_config, *args, **kwargs)

    def determine_available_memory(self):
        available = super().determine_available_memory()
        if not self.requests.asked.reads:
            return available
        # The index has two keys for each block and kv_head, as much as one token's key and value.
        block = self.requests.operators.model.block
        return available * block // (block + 1)

    def execute_model(self, scheduler_output):
        self.requests.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def rows(self, count):
        """The runner's requests of a step's rows, or None in a step that has none, as when vLLM warms up."""
        batch = self.model_runner.input_batch
        ids = batch.req_ids
        if len(ids) < count:
            return None
        return [self.model_runner.requests[request_id] for request_id in ids[:count]]
