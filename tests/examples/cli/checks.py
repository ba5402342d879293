"""Runs the tool and counts what went wrong; makes the files that the checks read."""
import json
import pathlib
import random
import struct
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "support" / "python"))
from small_files import floats  # noqa: E402

TOOL, TOKENIZER = (str(pathlib.Path(name).resolve()) for name in sys.argv[1:3])
random.seed(1)
HANG = 3600  # seconds; no command takes so long on the slowest machine


def without_progress(stderr):
    """What a command says beside its progress, which is there or not as the machine is busy or idle."""
    return "".join(line for line in stderr.splitlines(keepends=True) if " so far" not in line)


def read_safetensors(path):
    """Header of a file, metadata included."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8:8 + length])


def layer(n_q=40, dtype="BF16"):
    return {"k": floats(2, 60, 64, dtype=dtype), "v": floats(2, 60, 64, dtype=dtype),
            "q": floats(n_q, 4, 64, dtype=dtype), "q_decode": floats(3, 4, 64, dtype=dtype),
            "k_decode": floats(3, 2, 64, dtype=dtype), "v_decode": floats(3, 2, 64, dtype=dtype)}


class Checks:
    """Runs commands in a folder and counts what went wrong."""

    def __init__(self, folder):
        self.folder, self.count, self.failures = folder, 0, 0

    def run(self, arguments, **how):
        """`how` goes to subprocess.run: input, stdout, preexec_fn and the like."""
        self.count += 1
        how.setdefault("stdout", subprocess.PIPE)
        words = arguments if isinstance(arguments, list) else arguments.split()
        return subprocess.run([TOOL, *words], cwd=self.folder, stderr=subprocess.PIPE, text=True, timeout=HANG,
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

    def refuses_at_once(self, arguments, *expected):
        """Refuses before it reads the text that documents are cut from: there is none."""
        words = arguments if isinstance(arguments, list) else arguments.split()
        self.refuses([*words, "--text", "no_such_text"], *expected)

    def refuses(self, arguments, *expected, **how):
        """Exit code 2, one line on stderr that holds every text, nothing written."""
        before = sorted(self.folder.rglob("*"))
        result = self.run(arguments, **how)
        said = without_progress(result.stderr)
        missing = [text for text in expected if text not in said]
        one_line = said.count("\n") == 1 and said.startswith("tessera: ")
        if result.returncode != 2 or missing or not one_line or result.stdout:
            self.complain(arguments, result, f"expected exit 2, one line on stderr and in it {missing}")
        if sorted(self.folder.rglob("*")) != before:
            self.complain(arguments, result, "left a file behind")
