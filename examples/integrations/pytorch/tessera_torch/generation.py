"""What transformers' generate was asked, where a call of the model comes from it.

generate tells a cache neither how it decodes, nor how long the answer may become, nor that a chunk of the prompt is not its last.
No class of transformers is patched for it: the frames of the call are read.
"""
import inspect
import sys

from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# Settings, what they usually are, and why another value cannot be.
BEYOND = (
    ("guidance_scale", 1, "classifier-free guidance is not possible with a TesseraCache: the answer that it compares with runs "
                          "without the cache; leave guidance_scale out"),
    ("output_attentions", False, "output_attentions is not possible with a TesseraCache: weights of attention are kept nowhere; "
                                 "leave it out, or use transformers' own cache and eager attention"),
)
READ = ("input_ids", "model_kwargs", "generation_mode", "generation_config")  # of generate's names
CHUNKING = inspect.unwrap(getattr(GenerationMixin, "_prefill_chunking", None) or GenerationMixin._prefill).__code__  # of 4, of 5
LAST_CHUNK_ENDS_PROMPT = not hasattr(GenerationMixin, "_prefill_chunking")
ASSISTED = inspect.unwrap(GenerationMixin._assisted_decoding).__code__
ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
STEP_TOKENS = 8  # of a step at most


def cache_keyword(model):
    """By which name a model takes its cache: another one since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Draft:
    """A call of the model that checks a draft. model: whose call it is; inputs: what it was given; tokens: how many of its last
    columns are a draft; columns: those of the conversation with the draft."""

    def __init__(self, assisted):
        self.model, self.inputs, self.tokens = assisted["self"], assisted["model_inputs"], int(assisted["candidate_length"])
        self.columns = assisted["candidate_input_ids"].shape[1]


class Request:
    """One call of generate. mode: how it decodes; needs: a sentence about what it asks for that no TesseraCache gives, or None;
    longest: tokens of the conversation at its end at most; chunk_begins: where in the prompt the chunk begins that the model
    reads, None where it reads no chunk; prompt_goes_on: whether more of the prompt comes in a later call, so that a call of one
    token is no step; draft: the Draft that the call checks, or None."""

    def __init__(self, generate, chunking, assisted):
        settings, prompt = generate["generation_config"], generate["input_ids"].shape[1]
        mask = generate["model_kwargs"].get("attention_mask")
        columns = getattr(settings, "_mask_length", prompt) if mask is None else mask.shape[1]
        self.mode = generate["generation_mode"]
        self.needs = next((what for name, usual, what in BEYOND if getattr(settings, name, None) not in (None, usual)), None)
        self.longest = max(columns, prompt) + settings.max_length - prompt - 1  # the last token is not stored
        chunks = (chunking or {}).get("input_chunks", ())
        self.chunk_begins = chunking["past_length"] if chunks else None
        # transformers 4 leaves the prompt's last token to the first step; transformers 5 has it in the last chunk.
        self.prompt_goes_on = len(chunks) > 0 and not (LAST_CHUNK_ENDS_PROMPT and chunking["input_chunk"] is chunks[-1])
        self.draft = None if assisted is None else Draft(assisted)


def request_for(cache):
    """The call of generate that this call of the model is part of, if it decodes with this cache; else None."""
    frame, chunking, assisted = sys._getframe(1), None, None
    while frame is not None:
        code = frame.f_code
        if code is CHUNKING:
            chunking = frame.f_locals
        elif code is ASSISTED:
            assisted = frame.f_locals
        elif code is GENERATE and all(name in frame.f_locals for name in READ):  # not so while it runs a `custom_generate`
            names = frame.f_locals
            given = names["model_kwargs"]
            return Request(names, chunking, assisted) if cache in (given.get("cache"), given.get("past_key_values")) else None
        frame = frame.f_back
    return None
