"""Compiles what a server will need, before it starts.

python -m tessera_vllm.build --model PATH --methods snapkv,keydiff

Inside an engine nothing is compiled. Libraries are kept by their content in $TESSERA_TORCH_CACHE, or
~/.cache/tessera_torch; the server must see the same variable, the same compiler and the same processor.
"""
import argparse
import sys

from . import settings
from .operators import package


def model_of(path):
    """Element type and head dim of a model, as vLLM reads them from its config."""
    import torch
    import transformers
    config = transformers.AutoConfig.from_pretrained(path)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.bfloat16
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    # vLLM serves models of float32 in bfloat16 unless it is told another type.
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    return dtype, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tessera_vllm.build",
                                     description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--model", required=True, help="as for vllm serve")
    parser.add_argument("--methods", required=True, help=f"some of {', '.join(settings.METHODS)}, separated by commas")
    parser.add_argument("--dtype", help="as for vllm serve; left out: the model's")
    asked = parser.parse_args(arguments)
    import torch
    methods = asked.methods.split(",")
    for method in methods:
        settings.of_server({"tessera": {"mode": "off", "method": method}})
    dtype, dim = model_of(asked.model)
    if asked.dtype not in (None, "auto"):
        dtype = {"half": torch.float16, "float": torch.float32}.get(asked.dtype) or getattr(torch, asked.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise settings.refused("dtype", repr(asked.dtype), "bfloat16, float16 or float32", "pass one of these")
    builder = package().build
    print("Building the operators ...", flush=True)
    builder.operators()
    print(f"Building {', '.join(methods)} for {dtype} and heads of {dim} ...", flush=True)
    for path in builder.build_all([(method, dtype, dim, "cpu", "pages") for method in methods]):
        print(path)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
