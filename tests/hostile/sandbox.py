"""What a hostile run finds in its folder: small files of every kind the tool reads, and ways to damage them."""
import json
import os
import random
import shutil
import struct


def tensor(dtype, *shape):
    count = 1
    for size in shape:
        count *= size
    if dtype == "F32":
        return dtype, list(shape), struct.pack(f"<{count}f", *(random.gauss(0, 1) for _ in range(count)))
    return dtype, list(shape), b"".join(struct.pack("<f", random.gauss(0, 1))[2:] for _ in range(count))


def safetensors(tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def layer(dtype="BF16"):
    return {"k": tensor(dtype, 2, 40, 64), "v": tensor(dtype, 2, 40, 64), "q": tensor(dtype, 40, 4, 64),
            "q_decode": tensor(dtype, 2, 4, 64), "k_decode": tensor(dtype, 2, 2, 64),
            "v_decode": tensor(dtype, 2, 2, 64), "turns": ("I64", [2], struct.pack("<2q", 0, 25))}


def write_model(folder, examples):
    folder.mkdir()
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
              "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(examples / "model" / "tokenizer.model", folder)
    prefix = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (2048, 16), "model.norm.weight": (16,),
              prefix + "input_layernorm.weight": (16,), prefix + "post_attention_layernorm.weight": (16,),
              prefix + "self_attn.q_proj.weight": (128, 16), prefix + "self_attn.k_proj.weight": (64, 16),
              prefix + "self_attn.v_proj.weight": (64, 16), prefix + "self_attn.o_proj.weight": (16, 128),
              prefix + "mlp.gate_proj.weight": (16, 16), prefix + "mlp.up_proj.weight": (16, 16),
              prefix + "mlp.down_proj.weight": (16, 16)}
    (folder / "model.safetensors").write_bytes(
        safetensors({name: tensor("BF16", *shape) for name, shape in shapes.items()}))


def write_sandbox(folder, examples):
    """Everything that a run may name."""
    random.seed(5)
    write_model(folder / "model", examples)
    (folder / "layer").write_bytes(safetensors(layer()))
    (folder / "prompt").write_text("The rays of light which differ in colour\n" * 4 + "Question: why?\nAnswer:")
    (folder / "questions").write_text(json.dumps(
        {"family": "mine", "turns": [{"prompt": "One two.\nAnswer:", "answer": "x"},
                                     {"prompt": "\nAnswer:", "answer": "y"}]}) + "\n")
    (folder / "text").write_text("\n".join((examples / "data" / "opticks.txt").read_text().split("\n")[:120]))
    shutil.copy(examples / "data" / "tasks.json", folder / "tasks")
    (folder / "empty").write_text("")
    (folder / "random").write_bytes(random.randbytes(3000))
    (folder / "many").write_bytes(safetensors({f"t{i}": ("U8", [0], b"") for i in range(3000)}))
    (folder / "folder").mkdir()
    (folder / "closed").write_text("precious")
    (folder / "closed").chmod(0o444)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("layer")
    (folder / "dangling").symlink_to("target")
    (folder / "loop").symlink_to("loop")


def mutated(content):
    """Bytes of a file with some damage."""
    content = bytearray(content)
    for _ in range(random.randint(1, 6)):
        if not content:
            break
        at = random.randrange(min(len(content), random.choice([60, 1500, len(content)])))
        kind = random.randrange(5)
        if kind == 0:
            content[at] = random.randrange(256)
        elif kind == 1:
            content[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            del content[at:at + random.randint(1, 9)]
        elif kind == 3:
            content[at:at] = random.choice([b"0", b"9", b"-", b"\"", b"{", b"]", b"null", b"\xff", b"\0", b"1e99"])
        else:
            del content[at:]
    return bytes(content)


def mutated_json(content):
    """A JSON text with one value replaced anywhere."""
    whole = json.loads(content)
    holder = whole
    for _ in range(6):
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return json.dumps(whole).encode()
        key = random.choice(keys)
        if not isinstance(holder[key], (dict, list)) or random.random() < 0.3:
            break
        holder = holder[key]
    if random.random() < 0.25:
        del holder[key]
    else:
        holder[key] = random.choice([None, -1, 0, 1, 3, 1e30, 2**31, 2**63, "", "x", [], {}, [[]], True, 0.5])
    return json.dumps(whole).encode()
