"""Tessera's KV-cache compression as a plug-in of vLLM: nothing of vLLM is patched. See README.md.

vLLM calls `register` in every process (entry point vllm.general_plugins). A server without tessera's settings runs as
if the package were not there.
"""


def register():
    from . import names
    names.check()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import blocks, refusals

    # vLLM's CPU platform knows no other backend than CPU_ATTN, so ours goes by that name.
    register_backend(AttentionBackendEnum.CPU_ATTN, refusals.BACKEND)
    blocks.register()
