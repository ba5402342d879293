"""What a hostile run asks of the tool: arguments, parameters, files, streams, limits and signals."""
import random
import resource
import signal

from sandbox import layer, mutated, mutated_json
from small_files import safetensors

CPU_SECONDS = 60  # of a core; most commands take less than one
HANG = 3600       # seconds, however busy the machine is
NASTY = ["", " ", "-", "--", "-1", "0", "00", "1e9", "nan", "inf", "0x10", "2147483647", "2147483648", "-2147483648",
         "9" * 40, "1.5", "\x1b[31m", "\n", "\t", "\u00fc\u202e", "%s%n", "$(id)", "*", "..", "/", "a=b=c", "=", "=1", ",",
         ",,", "1,1", "x" * 3000]
PATHS = ["layer", "prompt", "questions", "absent", ".", "..", "/", "fifo", "link", "dangling", "loop", "closed", "empty",
         "/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/proc/self/mem", "/proc/self/environ", "-", "layer/x",
         "n" * 255, "n" * 256, "d/" * 2500 + "x", "\x1b[2J", "many", "random", "folder", "profile", "gates", "deep", "wide",
         "\udcff"]


class Run:
    """One command, the files that it may change, and how it is started."""

    memory_limits = True  # a sanitized program needs more than any limit
    least_file = 0        # the thread sanitizer writes a file before the tool's own code begins

    def __init__(self, folder, methods):
        self.folder, self.methods = folder, methods
        self.words, self.may_change, self.files = [], set(), {}
        self.limits, self.signal, self.stdin, self.stdout, self.closed = [], None, b"", "pipe", None
        self.json_on_stdout = False

    def method_words(self, of="", budget="--budget", nasty=0.3):
        """`of`: whose profiles, the layer's or the model's; `nasty`: how often a value is no value at all."""
        method = random.choice(self.methods)
        words = ["--method", method["name"]]
        if budget and method["has_budget"] == (random.random() < 0.95):
            words += [budget, random.choice(["40", "16", "1", "64", "16777216", random.choice(NASTY)])]
        often = random.choice([0.4, 0.1])
        for parameter in method["parameters"]:
            if parameter["name"] == "profile":
                if random.random() < (0.3 if "none" in parameter["allowed"] else 0.9):
                    words += ["--set", f"profile={self.profile(parameter, of)}"]
            elif random.random() < often:
                words += ["--set", f"{parameter['name']}={self.value(parameter, nasty)}"]
        if not of and (method["name"] == "expected_attention") == (random.random() < 0.95):
            words += ["--set", f"rope_theta={random.choice(['10000', '1', '1e12', '0.5', random.choice(NASTY)])}"]
        if random.random() < 0.05:
            words += ["--set", random.choice(NASTY)]
        return words

    @staticmethod
    def profile(parameter, of):
        if random.random() < 0.2:
            return random.choice(PATHS)
        return of + ("profile" if "none" in parameter["allowed"] else "gates")

    @staticmethod
    def value(parameter, nasty=0.3):
        allowed = parameter["allowed"]
        if random.random() < nasty:
            return random.choice(NASTY)
        try:
            least, most = (float(end) for end in allowed.split(" to "))
        except ValueError:
            words = allowed.replace(",", " or ").split(" or ")
            return random.choice([parameter["default"], *(word.strip() for word in words), "adaptive", "0", "1", "0.5", "2"])
        if "." in parameter["default"] or "e" in allowed:  # a real number
            return random.choice([least, most, (least + most) / 2, least - 1e-7, most * (1 + 1e-6), 1e-45, -0.0, 1e39,
                                  "0.30000000000000001", parameter["default"]])
        least, most = int(least), int(most)
        return random.choice([least - 1, least, least + 1, 2, 5, 17, most - 1, most, most + 1, 2 * most, parameter["default"]])

    def compress(self):
        self.words = ["compress", *self.method_words(), "--in", "layer", "--out", "out", "--threads", "1"]
        if random.random() < 0.3:
            self.words.append("--scores")
        self.may_change = {"out"}

    def calibrate(self):
        self.words = ["calibrate", "--model", "model", *self.method_words("model_", budget="", nasty=0.1), "--samples",
                      random.choice(["1", "2", "3", "0"]), "--share",
                      random.choice(["0.3", "1", "1e-6", "1.00000001", "0.9999999999", "0"]), "--alpha",
                      random.choice(["2", "0", "1e6", "1000000.0000001", "-1"]), "--out", "out", *self.documents(), "--threads", "1"]
        if random.random() < 0.3:
            self.words.append("--renormalise")
        self.may_change = {"out"}

    def heads(self):
        self.words = ["heads", "--model", "model", "--sinks", random.choice(["4", "0", "16777216", "-1"]), "--recent",
                      random.choice(["20", "1", "16777216", "0"]), "--out", "out", "--threads", "1"]
        self.words += ["--questions", "questions"] if random.random() < 0.4 else self.documents() + ["--count", "1"]
        self.may_change = {"out"}

    @staticmethod
    def documents():
        return ["--text", "text", "--tasks", "tasks", "--context", random.choice(["300", "450", "64", "1", "512"]), "--families",
                random.choice(["single", "conversation", "multi_key", "frequent_words", "variable_tracking", "none"])]

    def run(self):
        self.words = ["run", "--model", "model", "--prompt", "prompt", "--max-new", random.choice(["1", "3", "0", "600"]),
                      *self.method_words("model_"), "--threads", "1"]
        if random.random() < 0.5:
            self.words.append("--json")
            self.json_on_stdout = True
        if random.random() < 0.2:
            self.words += ["--dtype", random.choice(["fp32", "fp16", "bf16", "int8"])]

    def evaluate(self):
        chosen = random.sample(self.methods, random.randint(1, min(3, len(self.methods))))
        names = [method["name"] for method in chosen]
        self.words = ["eval", "--model", "model", "--methods", ",".join(names), "--budgets",
                      random.choice(["40", "40,64", "16,17", "64,064", "1", "", "0"]), "--threads", "1"]
        if random.random() < 0.5:
            self.words += ["--questions", "questions"]
        else:
            self.words += [*self.documents(), "--count", random.choice(["1", "2", "0"])]
        if random.random() < 0.6:
            self.words += ["--json", "out"]
            self.may_change = {"out"}
        if random.random() < 0.3:
            self.words += ["--set", f"{random.choice(names)}.{random.choice(['window', 'page', 'pool'])}=4"]
        for method in chosen:
            if random.random() < 0.5:
                self.words += self.of_eval(method)

    def of_eval(self, method):
        """A parameter of one method, set or varied; a profile where it needs one."""
        if not method["parameters"]:
            return []
        parameter = random.choice(method["parameters"])
        for needed in method["parameters"]:
            if needed["name"] == "profile" and random.random() < 0.7:
                parameter = needed

        def make():
            return self.profile(parameter, "model_") if parameter["name"] == "profile" else self.value(parameter, 0.1)
        if random.random() < 0.5:
            return ["--set", f"{method['name']}.{parameter['name']}={make()}"]
        return ["--vary", f"{method['name']}.{parameter['name']}={','.join(str(make()) for _ in range(random.randint(1, 3)))}"]

    def any_command(self):
        random.choice([self.compress, self.compress, self.compress, self.run, self.run, self.evaluate, self.evaluate,
                       self.calibrate, self.heads])()

    # --- what is hostile -------------------------------------------------------------------------------------------

    def arguments(self):
        """Words dropped, doubled, swapped and replaced."""
        self.any_command()
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(self.words))
            kind = random.randrange(5)
            if kind == 0:
                self.words[at] = random.choice(NASTY)
            elif kind == 1:
                del self.words[at]
            elif kind == 2:
                self.words.insert(at, random.choice(NASTY + ["--json", "--help", "--version", "--one-line", "--out", "list"]))
            elif kind == 3:
                other = random.randrange(len(self.words))
                self.words[at], self.words[other] = self.words[other], self.words[at]
            else:
                self.words += self.words[at:at + 2]
            if not self.words:
                return
        self.words = [word.replace("\0", "") for word in self.words]
        self.json_on_stdout = False
        self.may_change = set(self.words)  # anything may have become the output's name
        self.limits.append((resource.RLIMIT_CPU, CPU_SECONDS))

    def parameters(self):
        random.choice([self.compress, self.compress, self.compress, self.run, self.calibrate])()

    def paths(self):
        """An input or output that is no ordinary file."""
        self.any_command()
        options = [i for i, word in enumerate(self.words)
                   if word in ("--in", "--out", "--prompt", "--questions", "--json", "--model", "--text", "--tasks")]
        options = [i for i in options if i + 1 < len(self.words)]
        if options:
            at = random.choice(options)
            if self.words[at] == "--json" and self.json_on_stdout:
                return
            path = random.choice(PATHS)
            self.words[at + 1] = path
            if self.words[at] in ("--out", "--json"):
                self.may_change = {path, "target", "layer"} if path in ("link", "dangling") else {path}
        self.stdin = random.choice([b"", b"text", b"\xff" * 100, (self.folder / "questions").read_bytes()])

    def damage(self):
        """Files with wrong bytes or wrong values."""
        self.any_command()
        profiles = [word.split("=")[1] for word in self.words if word.startswith("profile=")]
        profiles = [name for name in profiles if name in ("profile", "gates", "model_profile", "model_gates")]
        candidates = {"compress": ["layer"], "run": ["model/config.json", "model/tokenizer.model", "model/model.safetensors",
                                                     "prompt"],
                      "eval": ["questions", "tasks", "text", "model/config.json"],
                      "calibrate": ["tasks", "text", "model/config.json"],
                      "heads": ["questions", "tasks", "model/config.json"]}[self.words[0]]
        candidates += 4 * profiles
        name = random.choice(candidates)
        content = (self.folder / name).read_bytes()
        as_json = name in ("model/config.json", "tasks", "questions", *profiles) and random.random() < 0.7
        self.files[name] = mutated_json(content) if as_json else mutated(content)
        if name == "layer" and random.random() < 0.5:
            tensors = layer(random.choice(["BF16", "F32"]))
            for victim in random.sample(sorted(tensors), 2):
                dtype, shape, values = tensors[victim]
                choice = random.randrange(4)
                if choice == 0:
                    del tensors[victim]
                elif choice == 1:
                    tensors[victim] = (dtype, list(reversed(shape)), values)
                elif choice == 2:
                    tensors[victim] = (random.choice(["U8", "I64", "F16", "F64"]), shape, values)
                else:
                    tensors[victim] = (dtype, shape, random.choice([b"\xff\xff", b"\x7f\x7f", b"\0\0"]) * (len(values) // 2))
            self.files[name] = safetensors(tensors)

    def profiles(self):
        """A profile that is another's, damaged, or no file."""
        self.methods = [method for method in self.methods
                        if any(parameter["name"] == "profile" for parameter in method["parameters"])]
        random.choice([self.damage, self.paths, self.run, self.compress, self.calibrate])()
        at = [i for i, word in enumerate(self.words) if word.startswith("profile=")]
        if at and random.random() < 0.3:
            self.words[at[0]] = f"profile={random.choice(PATHS + ['model_profile', 'model_gates'])}"
        text = (self.folder / "model_profile").read_bytes()
        self.stdin = random.choice([text, mutated_json(text), (self.folder / "model_gates").read_bytes(), b""])

    def streams(self):
        """Standard streams that are closed or full."""
        random.choice([self.any_command, self.listing])()
        if random.random() < 0.5:
            self.stdout = "full"
        else:
            self.closed = random.choice([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])

    def listing(self):
        self.words = random.choice([["list"], ["list", "--json"], ["--help"], ["--version"], ["run", "--help"]])
        self.json_on_stdout = "--json" in self.words

    def limited(self):
        """What a container forbids."""
        self.any_command()
        self.words[self.words.index("--threads") + 1] = random.choice(["1", "2", "0", "64", "1024"])
        kind = random.randrange(0 if self.memory_limits else 1, 4)
        if kind == 0:
            self.limits = [(resource.RLIMIT_AS, random.randint(80, 400) << 20)]
        elif kind == 1:
            self.limits = [(resource.RLIMIT_FSIZE, max(self.least_file, random.choice([0, 1, 100, 5000])))]
        elif kind == 2:
            self.limits = [(resource.RLIMIT_NOFILE, random.randint(4, 12))]
        else:
            self.limits = [(resource.RLIMIT_STACK, random.choice([256, 1024, 8192]) << 10)]

    def signals(self):
        self.any_command()
        for many in ("--count", "--samples"):
            if many in self.words:
                self.words[self.words.index(many) + 1] = "500"
        self.signal = (random.choice([signal.SIGINT, signal.SIGTERM]), random.uniform(0, 0.3))


AREAS = [Run.arguments, Run.arguments, Run.parameters, Run.parameters, Run.paths, Run.paths, Run.damage, Run.damage,
         Run.profiles, Run.streams, Run.limited, Run.signals]
