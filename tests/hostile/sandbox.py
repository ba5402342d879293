"""What a hostile run finds in its folder: small files of every kind the tool reads, and ways to damage them."""
import json
import os
import pathlib
import random
import shutil
import struct
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support" / "python"))
from small_files import floats, safetensors, write_model  # noqa: E402


def layer(dtype="BF16"):
    return {"k": floats(2, 40, 64, dtype=dtype), "v": floats(2, 40, 64, dtype=dtype), "q": floats(40, 4, 64, dtype=dtype),
            "q_decode": floats(2, 4, 64, dtype=dtype), "k_decode": floats(2, 2, 64, dtype=dtype),
            "v_decode": floats(2, 2, 64, dtype=dtype), "turns": ("I64", [2], struct.pack("<2q", 0, 25)),
            "boundaries": ("U8", [40], bytes(token % 9 == 8 for token in range(40))),
            "boundaries_decode": ("U8", [2], b"\1\0"), "output_projection": floats(4, 64, 2, dtype=dtype)}


def profile(layers, kv_heads):
    """What `tessera calibrate` writes."""
    def table(value):
        return [[value] * kv_heads] * layers
    return {"version": 1, "model": "model", "method": "snapkv", "share": 0.3, "samples": 4, "alpha": 2.0,
            "mean": table(0.3), "deviation": table(0.05), "budget": table(0.4)}


def gates(layers, kv_heads):
    """What `tessera heads` writes."""
    return {"kind": "tessera head gates", "version": 1, "model": "model", "sinks": 4, "recent": 64, "questions": 2,
            "gates": [[0.25 + head / 2 for head in range(kv_heads)]] * layers}


def write_sandbox(folder, examples):
    """Everything that a run may name."""
    random.seed(5)
    write_model(folder / "model", examples / "model" / "tokenizer.model")
    (folder / "layer").write_bytes(safetensors(layer()))
    (folder / "prompt").write_text("The rays of light which differ in colour\n" * 4 + "Question: why?\nAnswer:")
    (folder / "questions").write_text(json.dumps(
        {"family": "mine", "turns": [{"prompt": "One two.\nAnswer:", "answer": "x"},
                                     {"prompt": "\nAnswer:", "answer": "y"}]}) + "\n")
    (folder / "text").write_text("\n".join((examples / "data" / "opticks.txt").read_text().split("\n")[:120]))
    shutil.copy(examples / "data" / "tasks.json", folder / "tasks")
    for name, make in (("profile", profile), ("gates", gates)):
        (folder / name).write_text(json.dumps(make(1, 2)))  # for the layer
        (folder / f"model_{name}").write_text(json.dumps(make(1, 1)))
    (folder / "deep").write_text("[" * 200_000)
    (folder / "wide").write_text(json.dumps(profile(300, 300)))
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
