"""What a request asks for is checked where requests come in, so that a wrong one fails alone.

vLLM hands the sampling parameters of every request to the logits processors that are installed (entry point
vllm.logits_processors): a public door for checks of extra_args. This one leaves logits as they are.
"""
from vllm.v1.sample.logits_processor import LogitsProcessor

from . import settings


class SettingsCheck(LogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params):
        settings.of_request(sampling_params.extra_args)

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits
