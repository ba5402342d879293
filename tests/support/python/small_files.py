"""The smallest files that the tool reads: tensors of random numbers, safetensors, a model of one layer."""
import json
import pathlib
import random
import struct


def floats(*shape, spread=1.0, dtype="F32"):
    count = 1
    for size in shape:
        count *= size
    values = [random.gauss(0, spread) for _ in range(count)]
    if dtype == "F32":
        return dtype, list(shape), struct.pack(f"<{count}f", *values)
    return dtype, list(shape), b"".join(struct.pack("<f", value)[2:] for value in values)


def safetensors(tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_model(folder, tokenizer):
    folder.mkdir()
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
              "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(pathlib.Path(tokenizer).read_bytes())
    prefix = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (2048, 16), "model.norm.weight": (16,),
              prefix + "input_layernorm.weight": (16,), prefix + "post_attention_layernorm.weight": (16,),
              prefix + "self_attn.q_proj.weight": (128, 16), prefix + "self_attn.k_proj.weight": (64, 16),
              prefix + "self_attn.v_proj.weight": (64, 16), prefix + "self_attn.o_proj.weight": (16, 128),
              prefix + "mlp.gate_proj.weight": (16, 16), prefix + "mlp.up_proj.weight": (16, 16),
              prefix + "mlp.down_proj.weight": (16, 16)}
    (folder / "model.safetensors").write_bytes(
        safetensors({name: floats(*shape, spread=0.3) for name, shape in shapes.items()}))
