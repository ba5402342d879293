"""What the server and a request have asked for, read from dicts, and refused in a sentence. Knows nothing of vLLM.

Server:   additional_config={"tessera": {"mode": "compact", "method": "snapkv", "budget": 256,
                                         "parameters": {"window": 32}}}
Request:  extra_args={"tessera": {"budget": 512}}, or {"tessera": {"mode": "off"}} for a request that stays whole;
          over HTTP, where vLLM takes words and numbers alone, as JSON: "vllm_xargs": {"tessera": '{...}'}
"""
import dataclasses
import json
import pathlib

MODES = {
    "compact": "when a prompt ends, each layer keeps `budget` tokens of each kv_head",
    "chunked": "the same at every `chunk` tokens of the prompt, and at its end",
    "uneven": "when a prompt ends, each layer keeps `budget` tokens of a kv_head on average, unequal numbers of each",
    "read": "nothing is dropped: a step reads `budget` tokens of each kv_head, in whole blocks, and the newest block",
    "compact_and_read": "when a prompt ends, each layer keeps what the method's plan says for its length, of which a "
                        "step reads half of `budget`, in whole blocks, and the newest block",
    "off": "requests stay whole, except those that ask for another mode",
}
# The newest queries of a prompt that a method looks at unless its parameter `window` says another number; 0: none.
EVEN = {"chunkkv": 32, "criticalkv": 32, "expected_attention": 0, "h2o": 0, "keydiff": 0, "knorm": 0, "lagkv": 0,
        "random": 0, "snapkv": 32, "streaming_llm": 0, "tova": 0}
UNEVEN = {"ada_snapkv": 32, "tangram": 32}
READING = {"hsa": 0, "quest": 0}
STAGED = {"rocketkv": 32}
PROFILED = ("tangram",)
METHODS = EVEN | UNEVEN | READING | STAGED
OF_MODE = {"compact": EVEN, "chunked": EVEN, "uneven": UNEVEN, "read": READING, "compact_and_read": STAGED,
           "off": METHODS}
PLANNED = ("hsa", "rocketkv")  # by the length of a prompt
# What the others observe of queries, as PageOperations.observes has it.
OBSERVES = {"expected_attention": "statistics", "h2o": "every_query", "tova": "newest_query"}
DROPS_IN_STEPS = ("h2o", "tova")
_LAYERS = "it gives layers unequal numbers of tokens, and all layers of vLLM share one table"
_WHOLE = "it keeps every token of a prompt, so that no block would be free"
_FILTERED = "its steps choose among single tokens that a prompt's end has chosen, and the index here is of whole blocks"
_NO_BOUNDS = "its steps do not choose by the smallest and largest keys of a block, which is the only index here"
_TEXT = "it goes by the text's sentences, which a worker does not see"
REFUSED = {
    "pyramidkv": _LAYERS, "duo_attention": _LAYERS, "mosaickv": _LAYERS, "full": _WHOLE, "a_shape": _WHOLE,
    "tri_shape": _WHOLE,
    "minference": _WHOLE, "think": _WHOLE, "rocketkv_mt": _FILTERED,
    "sparq": _NO_BOUNDS, "exact_topk": _NO_BOUNDS, "loopserve": _NO_BOUNDS, "loopserve_decode": _NO_BOUNDS,
    "loopserve_prefill": _NO_BOUNDS,
    "sablock": _TEXT, "sentencekv": _TEXT, "kvzip": "it reads a prompt twice",
    "fastkvzip": "it needs a gate over hidden states",
}
LARGEST = 1 << 30
# Arguments of PageOperations itself, which hide a method's parameter of the same name.
HIDDEN = ("layers", "q_heads", "kv_heads", "dim", "dtype", "device", "budget", "prompt", "sliding_window",
          "sliding_layers", "scale", "softcap", "sink_logits", "profile", "rope_frequencies")


@dataclasses.dataclass(frozen=True)
class Settings:
    """mode:       of MODES
    method:     of METHODS
    budget:     tokens that each kv_head of each layer keeps of a prompt; rounded up to whole blocks; of the mode
                `uneven` on average over the kv_heads of a layer; of the mode `read` tokens that a step reads; of the
                mode `compact_and_read` what the method shares out over both of its stages
    chunk:      of the mode `chunked`: tokens of the prompt between two choices
    parameters: the method's own, (name, value) pairs
    profile:    of `tangram`: the share of a prompt that each kv_head keeps, (layers of (kv_heads)); (): `budget` of all
    figures:    a file that gets a line for every request that ends; None: no file
    """
    mode: str = "compact"
    method: str = "snapkv"
    budget: int = 256
    chunk: int = 1024
    parameters: tuple = ()
    profile: tuple = ()
    figures: str | None = None

    @property
    def window(self):
        """The newest queries that the method looks at; the prompt's last tokens that these are of are always kept."""
        return dict(self.parameters).get("window", METHODS[self.method]) if METHODS[self.method] else 0

    @property
    def uneven(self):
        """Whether the method gives the heads of a layer unequal numbers."""
        return self.method in UNEVEN

    @property
    def reads(self):
        """Whether the method chooses what steps read."""
        return self.method in READING | STAGED

    @property
    def drops(self):
        """Whether the method drops a part of a prompt."""
        return self.method not in READING

    @property
    def planned(self):
        """Whether the length of a prompt decides about what stays and what steps read."""
        return self.method in PLANNED

    @property
    def observes(self):
        return OBSERVES.get(self.method, "window" if METHODS[self.method] else "nothing")

    @property
    def drops_in_steps(self):
        """Whether the method also drops behind the prompt: then it does wherever a block is full."""
        return self.method in DROPS_IN_STEPS


def refused(name, given, expected, cure):
    return ValueError(f"tessera: {name} is {given}; expected {expected}; {cure}")


def _words(allowed):
    return ", ".join(sorted(allowed))


def _known_keys(given, allowed, whose):
    if not isinstance(given, dict):
        raise refused(f"what {whose} has asked for", repr(given), "a dict", f"pass some of {_words(allowed)}")
    for key in given:
        if key not in allowed:
            raise refused(f"a key of what {whose} has asked for", repr(key), _words(allowed), "correct or remove it")


def _mode(value):
    if not isinstance(value, str) or value not in MODES:
        raise refused("mode", repr(value), _words(MODES), "pass one of these")
    return value


def _count(name, value, smallest=1):
    if type(value) is not int or not smallest <= value <= LARGEST:
        raise refused(name, repr(value), f"a whole number from {smallest} to {LARGEST}", "pass a number of tokens")
    return value


def _method(value):
    if not isinstance(value, str) or value not in METHODS:
        why = f": as for {value}, {REFUSED[value]}" if isinstance(value, str) and value in REFUSED else ""
        raise refused("method", repr(value), _words(METHODS), f"take one of these{why}")
    return value


def _parameters(value):
    if not isinstance(value, dict) or not all(
            isinstance(name, str) and type(number) in (int, float, str) for name, number in value.items()):
        raise refused("parameters", repr(value), "a dict of names and numbers or words",
                      "pass the method's own parameters")
    for name in value:
        if name in HIDDEN:
            raise refused("a name of parameters", repr(name), f"another one than {', '.join(HIDDEN)}",
                          "leave it out: the page operators have an argument of this name, so the method keeps its "
                          "default")
    if value.get("dense_layers"):
        raise refused("dense_layers", repr(value["dense_layers"]), "0", "leave it out: all layers share one table")
    return tuple(sorted(value.items()))


def _profile(value):
    """The shares in a file of `tessera calibrate`."""
    expected, cure = "the path of a file of `tessera calibrate`", "pass one, or leave it out"
    if not isinstance(value, str):
        raise refused("profile", repr(value), expected, cure)
    try:
        shares = json.loads(pathlib.Path(value).read_text(encoding="utf-8"))["budget"]
        table = tuple(tuple(float(share) for share in layer) for layer in shares)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refused("profile", repr(value), expected, f"{cure} ({type(error).__name__}: {error})") from error
    if not table or not table[0] or any(len(layer) != len(table[0]) or not all(0 < share <= 1 for share in layer)
                                        for layer in table):
        raise refused("profile", repr(value), "a share in (0, 1] for every layer and kv_head",
                      "make the file again by `tessera calibrate`")
    return table


def _mode_of(settings):
    return next(mode for mode in MODES if settings.method in OF_MODE[mode])


def _figures(value):
    if value is not None and (not isinstance(value, str) or not value):
        raise refused("figures", repr(value), "the path of a file", "pass one, or leave it out")
    return value


def _check_reading(settings):
    """What vLLM's kernel cannot do."""
    given = dict(settings.parameters)
    if settings.reads and "newest" in given:
        raise refused("newest", repr(given["newest"]), "none", "leave it out: a step reads the newest block in any case")
    if settings.planned and given.get("unit", "page") != "page":
        raise refused("unit", repr(given["unit"]), "'page'", "leave it out: vLLM's kernel reads whole blocks")


def of_server(additional_config):
    """Settings of a server, or None if it has none. Errors: ValueError of one sentence."""
    config = additional_config if isinstance(additional_config, dict) else {}
    if "tessera" not in config:
        return None
    given = config["tessera"]
    readers = {"mode": _mode, "method": _method, "budget": lambda value: _count("budget", value),
               "chunk": lambda value: _count("chunk", value), "parameters": _parameters, "profile": _profile,
               "figures": _figures}
    _known_keys(given, readers, "the server")
    made = Settings(**{name: readers[name](value) for name, value in given.items()})
    window = dict(made.parameters).get("window")
    if METHODS[made.method] and window is not None:
        _count("window", window)
    if made.method not in OF_MODE[made.mode]:
        raise refused("method", f"{made.method!r} in the mode {made.mode!r}", _words(OF_MODE[made.mode]),
                      f"take one of these, or the mode {_mode_of(made)!r}")
    if made.profile and (made.method not in PROFILED or "budget" in given):
        raise refused("profile", f"given beside {made.method}" + (" and a budget" if "budget" in given else ""),
                      f"one of {', '.join(PROFILED)} alone", "leave the budget out, which the profile says"
                      if made.method in PROFILED else "leave it out")
    _check_reading(made)
    if made.budget < made.window and not made.planned:
        raise refused("budget", made.budget, f"at least the window, which is {made.window}",
                      "raise the budget or lower the window: the window's own tokens are always kept")
    return made


def of_request(extra_args):
    """What a request asks for instead of the server's settings, checked: some of mode, budget, chunk."""
    if not isinstance(extra_args, dict) or "tessera" not in extra_args:
        return {}
    given = extra_args["tessera"]
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise refused("what a request has asked for", repr(given), "JSON of a dict, or a dict",
                          f"correct it ({error})") from error
    readers = {"mode": _mode, "budget": lambda value: _count("budget", value),
               "chunk": lambda value: _count("chunk", value)}
    _known_keys(given, readers, "a request")
    return {name: readers[name](value) for name, value in given.items()}


def for_request(server, extra_args):
    """The server's settings with what a request asks for instead. Errors: ValueError of one sentence."""
    asked = of_request(extra_args)
    made = dataclasses.replace(server, **asked)
    if server.profile and "budget" in asked:
        raise refused("budget of a request", asked["budget"], "none, as the server has a profile", "leave it out")
    if made.method not in OF_MODE[made.mode]:
        allowed = [mode for mode in MODES if made.method in OF_MODE[mode] and mode != "off"]
        raise refused("mode of a request", repr(made.mode),
                      f"{', '.join(allowed)} or off, as the server has {made.method}",
                      "pass one of these, or leave it out")
    return made
