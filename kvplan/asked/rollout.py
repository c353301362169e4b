"""A framework for reinforcement learning: its settings of the rollout engine, as the command of that server.

Read as scripts (key=value or flags), YAML or a Python config; nothing is run. Sources: verl 1dda039
(trainer/config/rollout/rollout.yaml, workers/rollout/*/*_async_server.py), TRL f2cd577 (trainer/grpo_config.py,
generation/vllm_generation.py, scripts/vllm_serve.py), OpenRLHF 3c3be62 (cli/train_ppo_ray.py, trainer/ray/
vllm_engine.py), SkyRL a956457 (skyrl/train/config/config.py, inference_servers/utils.py); 2026's.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Any, Final

from kvplan.asked import ray, snippet
from kvplan.asked.left import parsed
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.base import server_of
from kvplan.servers.plans.plan import Colocated
from kvplan.servers.words import shell
from kvplan.servers.words.command import VARIABLE, Note, ServeCommand

_CONFIGS: Final = r"(?:GRPO|RLOO|OnlineDPO|XPO|NashMD|GSPOToken)Config"
_DOTTED: Final = r"[+~]*([A-Za-z_]\w*(?:\.\w+)+)=(.*)"
_MARKS: Final[Mapping[str, str]] = {  # framework -> what only its texts have
    "verl": r"\bactor_rollout_ref[.:]",
    "OpenRLHF": r"\bopenrlhf\.cli\b|--vllm[._]num_engines\b",
    "SkyRL": r"\bskyrl_train\b|(?ms:^trainer:.*^generator:|^generator:.*^trainer:)|\bgenerator\.(?:inf|gpu_|num_)",
    "trl vllm-serve": r"\btrl\s+vllm-serve\b|\btrl\.scripts\.vllm_serve\b",
    "TRL": r"--use_vllm\b|--vllm_mode\b|(?m:^\s*use_vllm:)",
}
TITLES: Final = {"trl vllm-serve": "TRL"}
SAME: Final = (
    "gpu_memory_utilization", "dtype", "enforce_eager", "max_num_batched_tokens", "max_model_len", "max_num_seqs",
    "enable_chunked_prefill", "enable_prefix_caching", "quantization", "data_parallel_size", "tensor_parallel_size",
    "pipeline_parallel_size", "cudagraph_capture_sizes", "speculative_config", "language_model_only", "kv_cache_dtype",
)  # fmt: skip
SGLANG: Final = {
    "gpu_memory_utilization": "mem_fraction_static", "enforce_eager": "disable_cuda_graph",
    "max_num_seqs": "max_running_requests", "tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size",
    "dtype": "dtype", "quantization": "quantization", "kv_cache_dtype": "kv_cache_dtype",
}  # fmt: skip


def framework_of(text: str) -> str | None:
    """The framework whose settings a text has, if any."""
    if re.search(rf"\b{_CONFIGS}\s*\(", text):
        return "TRL"
    return next((name for name, mark in _MARKS.items() if re.search(mark, text)), None)


@dataclass(slots=True)
class Engine:
    """A rollout engine: its arguments by vLLM's names, and how it shares its GPUs.

    prefix    of the engine's own settings
    own       arguments by the server's own names
    read      the settings that were read, and `defaults` the arguments that the framework itself sets
    level     of its sleep: 1 keeps the weights on the host, 2 drops them; 0: it stays awake; None: GPUs of its own
    gpus      of all engines; None: not stated
    written   flags of remedies, as the framework's settings
    """

    settings: Mapping[str, Any]
    prefix: str
    server: str = "vllm"
    args: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    level: int | None = None
    keeps: tuple[str, ...] = ()
    gpus: int | None = None
    notes: list[str] = field(default_factory=list)
    written: Mapping[str, str] = field(default_factory=dict)

    def take(self, *names: str, default: Any = None) -> Any:
        """The first of some settings that is stated, else the default; null counts as not stated."""
        for name in names:
            value = self.settings.get(name)
            if value is not None and value != "":
                self.read.append(name)
                return value
        return default

    def number(self, *names: str, default: int) -> int:
        value = self.take(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"--from-command {names[0]}", f"is not a whole number ({printable(str(value), 40)!r})",
                             "write its value")  # fmt: skip
        return value

    def is_on(self, *names: str, default: bool = False) -> bool:
        return self.take(*names, default=default) in (True, "true", "yes", "1")

    def argument(self, name: str, *settings: str, default: Any = None) -> None:
        """One of vLLM's arguments, by the framework's names for it."""
        value = self.take(*settings)
        if value is None and default is not None:
            self.defaults[name] = value = default
        if value is not None:
            self.args[name] = value

    def take_all(self, renamed: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        """Arguments under its prefix, by vLLM's names or the framework's own."""
        names: dict[str, list[str]] = {name: [self.prefix + name] for name in SAME}
        for own, name in renamed.items():
            names[name].append(self.prefix + own)
        for name, settings in names.items():
            self.argument(name, *settings, default=defaults.get(name))

    def count_gpus(self, nodes: str, per_node: str, default: int | None = None) -> None:
        counts = self.take(nodes, default=1), self.take(per_node, default=default)
        self.gpus = counts[0] * counts[1] if all(isinstance(count, int) for count in counts) else None

    def take_kwargs(self, prefix: str) -> None:
        """Arguments that the framework passes on as they are."""
        for name in self.settings:
            if name.startswith(prefix) and (value := self.take(name)) is not None:
                self.own[name.removeprefix(prefix)] = value

    def with_adapters(self, rank: int) -> None:
        """One adapter, whose base weights are not sent again: they are kept while it sleeps."""
        if rank > 0 and self.server == "vllm":
            ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)
            least = next((size for size in ranks if size >= rank), rank)
            self.own |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": least}


def read_rollout(text: str, framework: str, options: Collection[str]) -> ServeCommand:
    """Parse the rollout engine of a framework's settings as its server's command."""
    settings = dict(settings_of(text, framework))
    engine = Engine(settings, PREFIXES.get(framework, "vllm"))
    READERS[framework](engine, text)
    title, model = TITLES.get(framework, framework), engine.own.pop("model", None)
    if model is None and "model" not in options:
        raise UsageError("--from-command", f"{title}'s settings name no model", "name it as MODEL")
    words = list(words_of(engine))
    command = parsed(server_of(engine.server).pasted().parse, [f"--model={model}", *words] if model else words, options)
    command.engine = engine.server
    if engine.level is not None:
        command.colocated = Colocated(title, engine.level, engine.keeps)
        if engine.level and engine.server == "vllm":
            command.args["enable_sleep_mode"] = True
    command.notes += map(Note, notes_of(engine, title, command))
    return command


def words_of(engine: Engine) -> Iterator[str]:
    names = SGLANG if engine.server == "sglang" else {name: name for name in SAME}
    values = {names[name]: value for name, value in engine.args.items() if name in names} | engine.own
    for name, value in values.items():
        if name == "cudagraph_capture_sizes" and isinstance(value, list):
            yield from (f"--{name.replace('_', '-')}", *map(str, value))
            continue
        yield from snippet.flag_words(name, value, engine.server)


def notes_of(engine: Engine, title: str, command: ServeCommand) -> Iterator[str]:
    """What was read, what was not, and which GPUs the engine has."""
    read = dict.fromkeys(engine.read)
    yield f"{title}'s rollout engine; settings read: {', '.join(read) or 'none, all by default'}"
    if engine.defaults:
        values = ", ".join(f"{name} {value}" for name, value in engine.defaults.items())
        yield f"by {title}'s defaults: {values}; other releases may have others"
    others: dict[str, int] = {}
    near = []
    for name in engine.settings:
        group = name.rpartition(".")[0]
        if name not in read and name.startswith(engine.prefix):
            near.append(name.removeprefix(engine.prefix) if "." in engine.prefix else name)
        elif name not in read:
            others[group] = others.get(group, 0) + 1
    if near or others:
        rest = [f"{count} of {group}" if group else f"{count} others" for group, count in others.items()]
        yield f"settings without effect on the engine's memory, ignored: {', '.join([*near, *rest])}"
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        ranks *= command.args.get(name) or 1
    if engine.gpus is not None and engine.gpus != ranks:
        yield (
            f"{engine.gpus} GPUs hold {engine.gpus // ranks} engines of {ranks}: the figures are of one"
            if engine.gpus % ranks == 0 and engine.gpus > ranks
            else f"{engine.gpus} GPUs are no whole number of engines of {ranks} GPUs"
        )
    if engine.level is None:
        yield "its GPUs are its own: no trainer shares them, and it never sleeps"
    yield from engine.notes
    if engine.written:
        names = ", ".join(f"{flag} is {setting}" for flag, setting in engine.written.items())
        yield f"what an answer writes as a flag is one of {title}'s settings: {names}"


# --- settings of a text -----------------------------------------------------------------------------------------------


def settings_of(text: str, framework: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of each setting of a script, a YAML file or a call in Python."""
    text = re.sub(r"\$\{HOME\}|\$HOME\b", "~", text)
    tree = snippet._parsed(text) if framework == "TRL" else None
    if tree is not None and not re.search(rf"{_CONFIGS}\s*\(", text):  # a script whose docstring has its command
        text, tree = ast.get_docstring(tree) or text, None
    if tree is not None:
        yield from of_calls(tree)
    elif re.search(r"(?m)^\s*[\w.]+:(?:\s|$)", text) and not re.search(r"(?m)^[^#\n]*(?:\bpython|--\w|\w=\S)", text):
        from kvplan.asked.manifest import documents

        for document in documents(text, "--from-command"):
            yield from flat("", document)
    else:
        for words in shell.split(with_sums(text)):
            yield from of_words(words, framework)


def typed(text: Any) -> Any:
    """A value as Hydra reads it: numbers, true and false in any case, null; text otherwise."""
    if not isinstance(text, str):
        return text
    plain = text.strip().strip("'\"")
    lower = plain.lower()
    if lower in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(lower)
    value = ray.typed(plain)
    return value if isinstance(value, int | float | dict | list) else plain


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a mapping, by dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif prefix and not (isinstance(value, str) and value.startswith("${")):  # a reference to another key
        yield prefix, typed(value)


def of_words(words: list[str], framework: str) -> Iterator[tuple[str, Any]]:
    """Settings of one command: key=value with dots, or the flags of those that have flags."""
    if framework in ("verl", "SkyRL"):
        for word in words:
            match = re.fullmatch(_DOTTED, word, re.DOTALL)
            if match is not None:
                yield match[1], typed(match[2])
        return
    marks = {"OpenRLHF": r".*openrlhf\.cli.*|--vllm.*", "TRL": r"--use_vllm.*|--vllm_.*"}
    if not any(re.fullmatch(marks.get(framework, r".*vllm.serve"), word) for word in words):
        return
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            stated = value if equals else True if following.startswith("--") else following
            yield re.sub("[.-]", "_", name), typed(stated)


def of_calls(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Keywords of the config, and the model that the trainer is given."""
    names = snippet._names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name.endswith("Trainer") and "model" in keywords:
            model = snippet._Values(names).of("model", keywords["model"], ())
            if isinstance(model, str) and not re.search(VARIABLE, model):
                yield "model_name_or_path", model
        elif re.fullmatch(_CONFIGS, name):
            values = snippet._Values(names)
            yield from ((key, values.of(key, value, ())) for key, value in keywords.items())
        elif name == "from_pretrained" and node.args and "CausalLM" in ast.unparse(node.func):
            yield "model_name_or_path", snippet._Values(names).of("model", node.args[0], ())


def with_sums(text: str) -> str:
    """A script whose arithmetic, `$((a + b))`, is replaced where all numbers in it are assigned once in the text."""
    numbers: dict[str, ast.expr] = {}

    def value(match: "re.Match[str]") -> str:
        expression = re.sub(r"\$\{?(\w+)\}?", r"\1", match[1]).strip()
        try:
            return str(int(snippet._evaluated(ast.parse(expression, mode="eval").body, numbers)))
        except (snippet._NotLiteral, SyntaxError, ValueError, TypeError, ArithmeticError):
            return match[0]

    lines = []
    for line in text.splitlines():
        line = re.sub(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)", value, line)
        match = re.match(r"\s*(?:export\s+)?(\w+)=[\"']?(?:\$\{\w+:-)?(\d{1,15})\}?[\"']?\s*(?:#.*)?$", line)
        if match is not None:
            numbers[match[1]] = ast.Constant(int(match[2]))
        lines.append(line)
    return "\n".join(lines)


# --- frameworks -------------------------------------------------------------------------------------------------------

VERL: Final = "actor_rollout_ref.rollout."
FLAGS: Final = {"gpu_memory_utilization": "--gpu-memory-utilization", "enforce_eager": "--enforce-eager"}
VERL_NAMES: Final = {
    "tensor_model_parallel_size": "tensor_parallel_size", "pipeline_model_parallel_size": "pipeline_parallel_size",
}  # fmt: skip
VERL_DEFAULTS: Final = {
    "gpu_memory_utilization": 0.5, "dtype": "bfloat16", "max_num_batched_tokens": 8192, "max_num_seqs": 256,
    "tensor_parallel_size": 2,
}  # fmt: skip


def verl(engine: Engine, text: str) -> None:
    """verl sleeps at level 2, at 1 if only adapters are sent again; SGLang then keeps the weights on the GPU."""
    name = engine.take(f"{VERL}name", default="vllm")
    engine.server = {"vllm": "vllm", "sglang": "sglang"}.get(str(name).replace("vllm_omni", ""), "")
    if not engine.server:
        raise UsageError("--from-command", f"verl's rollout {printable(str(name), 40)!r} is not sized",
                         "kvplan reads those of vllm and sglang")  # fmt: skip
    engine.take_all(VERL_NAMES, VERL_DEFAULTS)
    tensor = {"--tensor-parallel-size": f"{VERL}tensor_model_parallel_size"}
    engine.written = {flag: VERL + name for name, flag in FLAGS.items()} | tensor
    engine.take_kwargs(f"{VERL}engine_kwargs.{engine.server}.")
    engine.own["model"] = engine.take("actor_rollout_ref.model.path")
    if engine.number(f"{VERL}expert_parallel_size", default=1) > 1:
        engine.own["enable_expert_parallel" if engine.server == "vllm" else "ep_size"] = (
            True if engine.server == "vllm" else engine.take(f"{VERL}expert_parallel_size")
        )
    rank = engine.number("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank", default=0)
    adapters = rank > 0 and not engine.is_on("actor_rollout_ref.model.lora.merge")
    engine.with_adapters(rank if adapters else 0)
    engine.count_gpus("trainer.nnodes", "trainer.n_gpus_per_node", default=8)
    apart = engine.number("rollout.nnodes", f"{VERL}nnodes", default=0) > 0
    if apart or not engine.is_on("actor_rollout_ref.hybrid_engine", default=True):
        engine.gpus = None
        return
    sleeps = engine.is_on(f"{VERL}free_cache_engine", default=True) and engine.is_on(
        f"{VERL}enable_sleep_mode", default=True
    )
    engine.level = 0 if not sleeps else 1 if adapters else 2
    if engine.server == "sglang" and sleeps:
        engine.own["enable_memory_saver"] = True
        engine.level, engine.keeps = 1, ("weights",) if adapters else ()  # enable_weights_cpu_backup


SKYRL: Final = "generator.inference_engine."
SKYRL_NAMES: Final = {
    "model_dtype": "dtype", "inference_engine_tensor_parallel_size": "tensor_parallel_size",
    "inference_engine_pipeline_parallel_size": "pipeline_parallel_size",
    "inference_engine_data_parallel_size": "data_parallel_size",
}  # fmt: skip
SKYRL_DEFAULTS: Final = {
    "gpu_memory_utilization": 0.8, "dtype": "bfloat16", "max_num_batched_tokens": 8192, "max_num_seqs": 1024,
}  # fmt: skip


def skyrl(engine: Engine, text: str) -> None:
    """SkyRL sleeps at level 2, at 1 if only adapters are sent again."""
    prefix = engine.prefix = SKYRL if any(name.startswith(SKYRL) for name in engine.settings) else "generator."
    backend = engine.take(f"{prefix}backend", default="vllm")
    engine.server = "sglang" if backend == "sglang" else "vllm"
    engine.take_all(SKYRL_NAMES, SKYRL_DEFAULTS)
    engine.written = {flag: prefix + name for name, flag in FLAGS.items()}
    engine.take_kwargs(f"{prefix}engine_init_kwargs.")
    engine.own["model"] = engine.take("trainer.policy.model.path")
    experts = engine.number(*(f"{prefix}{own}expert_parallel_size" for own in ("", "inference_engine_")), default=1)
    if experts > 1 and engine.server == "vllm":
        engine.own["enable_expert_parallel"] = True
    rank = engine.number("trainer.policy.model.lora.rank", default=0)
    engine.with_adapters(rank)
    if engine.is_on("trainer.placement.colocate_all", default=True):
        engine.level = 1 if rank > 0 else 2
        engine.count_gpus("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node")


def openrlhf(engine: Engine, text: str) -> None:
    """OpenRLHF sleeps at level 1, if it is told to."""
    engine.own["model"] = engine.take("actor_model_name_or_path", "pretrain")
    engine.argument("dtype", default="bfloat16")
    engine.argument("tensor_parallel_size", "vllm_tensor_parallel_size", default=1)
    engine.argument("gpu_memory_utilization", "vllm_gpu_memory_utilization", default=0.95)
    engine.argument("enforce_eager", "vllm_enforce_eager", "enforce_eager")
    engine.argument("enable_prefix_caching", "vllm_enable_prefix_caching", "enable_prefix_caching", default=False)
    dotted = any(name.startswith(("actor_model", "train_colocate")) for name in engine.settings)
    mark = "--vllm." if dotted else "--vllm_"
    engine.written = {FLAGS["gpu_memory_utilization"]: f"{mark}gpu_memory_utilization",
                      "--enable-sleep-mode": f"{mark}enable_sleep"}  # fmt: skip
    parts = [engine.take(name) for name in ("prompt_max_len", "generate_max_len")]
    if any(parts):  # of earlier releases
        engine.args["max_model_len"] = sum(part or 1024 for part in parts)
    else:
        engine.argument("max_model_len", "data_max_len", "max_len", default=2048)
    is_async = engine.is_on("train_async_enable", "async_train")
    if engine.is_on("train_colocate_all", "colocate_all_models") and not is_async:
        engine.level = int(engine.is_on("vllm_enable_sleep"))
        engine.count_gpus("actor_num_nodes", "actor_num_gpus_per_node", default=8)


def trl(engine: Engine, text: str) -> None:
    """TRL sleeps at level 2, if it is told to."""
    if not engine.is_on("use_vllm", default="vllm_mode" in engine.settings):
        raise UsageError("--from-command", "TRL generates without vLLM here (use_vllm is off)",
                         "paste settings with use_vllm=True")  # fmt: skip
    engine.own["model"] = engine.take("model_name_or_path")
    if engine.take("vllm_mode", default="colocate") == "server":
        raise UsageError("--from-command", "vllm_mode is server: the engine is another command's",
                         "paste its `trl vllm-serve ...`")  # fmt: skip
    tp = engine.number("vllm_tensor_parallel_size", default=1)
    engine.argument("gpu_memory_utilization", "vllm_gpu_memory_utilization", default=0.3)
    engine.argument("max_num_batched_tokens", default=4096)
    engine.args["tensor_parallel_size"] = tp
    names = {"--enable-sleep-mode": "vllm_enable_sleep_mode", "--tensor-parallel-size": "vllm_tensor_parallel_size"}
    engine.written = {FLAGS["gpu_memory_utilization"]: "vllm_gpu_memory_utilization"} | names
    context = engine.take("vllm_max_model_length", "vllm_max_model_len")
    prompt, completion = engine.take("max_prompt_length"), engine.take("max_completion_length")
    if context is None and isinstance(prompt, int) and isinstance(completion, int):  # of earlier releases
        context = prompt + completion
    if context is not None:
        engine.args["max_model_len"] = context
    if engine.take("generation_batch_size") is None:
        steps = engine.number("steps_per_generation", "gradient_accumulation_steps", default=1)
        engine.args["max_num_seqs"] = engine.number("per_device_train_batch_size", default=8) * tp * steps
    else:
        engine.notes.append("max_num_seqs follows from generation_batch_size and the processes; vLLM's own is taken")
    engine.level = 2 if engine.is_on("vllm_enable_sleep_mode") else 0


def trl_server(engine: Engine, text: str) -> None:
    engine.own["model"] = engine.take("model")
    engine.prefix = ""
    engine.take_all({}, {"gpu_memory_utilization": 0.9})


READERS: Final = {"verl": verl, "SkyRL": skyrl, "OpenRLHF": openrlhf, "TRL": trl, "trl vllm-serve": trl_server}

PREFIXES: Final = {"verl": VERL, "SkyRL": SKYRL}
