"""Runs the tool and counts what went wrong; makes the small model and the files that the checks read."""
import json
import pathlib
import random
import struct
import subprocess
import sys

TOOL, TOKENIZER = (str(pathlib.Path(name).resolve()) for name in sys.argv[1:3])
random.seed(1)


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


def read_safetensors(path):
    """Header of a file, metadata included."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8:8 + length])


def layer(n_q=40, dtype="BF16"):
    return {"k": floats(2, 60, 64, dtype=dtype), "v": floats(2, 60, 64, dtype=dtype),
            "q": floats(n_q, 4, 64, dtype=dtype), "q_decode": floats(3, 4, 64, dtype=dtype),
            "k_decode": floats(3, 2, 64, dtype=dtype), "v_decode": floats(3, 2, 64, dtype=dtype)}


def write_model(folder):
    folder.mkdir()
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
              "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(pathlib.Path(TOKENIZER).read_bytes())
    prefix = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (2048, 16), "model.norm.weight": (16,),
              prefix + "input_layernorm.weight": (16,), prefix + "post_attention_layernorm.weight": (16,),
              prefix + "self_attn.q_proj.weight": (128, 16), prefix + "self_attn.k_proj.weight": (64, 16),
              prefix + "self_attn.v_proj.weight": (64, 16), prefix + "self_attn.o_proj.weight": (16, 128),
              prefix + "mlp.gate_proj.weight": (16, 16), prefix + "mlp.up_proj.weight": (16, 16),
              prefix + "mlp.down_proj.weight": (16, 16)}
    (folder / "model.safetensors").write_bytes(
        safetensors({name: floats(*shape, spread=0.3) for name, shape in shapes.items()}))


class Checks:
    """Runs commands in a folder and counts what went wrong."""

    def __init__(self, folder):
        self.folder, self.count, self.failures = folder, 0, 0

    def run(self, arguments, **how):
        """`how` goes to subprocess.run: input, stdout, preexec_fn and the like."""
        self.count += 1
        how.setdefault("stdout", subprocess.PIPE)
        words = arguments if isinstance(arguments, list) else arguments.split()
        return subprocess.run([TOOL, *words], cwd=self.folder, stderr=subprocess.PIPE, text=True, timeout=300,
                              check=False, **how)

    def complain(self, arguments, result, why):
        self.failures += 1
        print(f"FAILED tessera {arguments}\n  {why}\n  exit {result.returncode}\n  stdout: {result.stdout}"
              f"\n  stderr: {result.stderr}")

    def works(self, arguments, *expected, **how):
        result = self.run(arguments, **how)
        missing = [text for text in expected if text not in result.stdout]
        if result.returncode != 0 or missing:
            self.complain(arguments, result, f"expected exit 0 and {missing} on stdout")
        return result.stdout

    def notes(self, arguments, *expected, **how):
        """Works, and says each text in a note on stderr."""
        result = self.run(arguments, **how)
        missing = [text for text in expected if text not in result.stderr]
        if result.returncode != 0 or missing or "tessera: note: " not in result.stderr:
            self.complain(arguments, result, f"expected exit 0 and a note with {missing}")

    def require(self, holds, arguments, why):
        if not holds:
            self.failures += 1
            print(f"FAILED tessera {arguments}\n  {why}")

    def refuses(self, arguments, *expected, **how):
        """Exit code 2, one line on stderr that holds every text, nothing written."""
        before = sorted(self.folder.rglob("*"))
        result = self.run(arguments, **how)
        missing = [text for text in expected if text not in result.stderr]
        one_line = result.stderr.count("\n") == 1 and result.stderr.startswith("tessera: ")
        if result.returncode != 2 or missing or not one_line or result.stdout:
            self.complain(arguments, result, f"expected exit 2, one line on stderr and in it {missing}")
        if sorted(self.folder.rglob("*")) != before:
            self.complain(arguments, result, "left a file behind")
