"""A framework for reinforcement learning: its settings of the rollout engine, as the command of that server.

Read as scripts (key=value or flags), YAML or a Python config; nothing is run. Sources: verl 1dda039
(trainer/config/rollout/rollout.yaml, workers/rollout/*/*_async_server.py), TRL f2cd577 (trainer/grpo_config.py,
generation/vllm_generation.py, scripts/vllm_serve.py), OpenRLHF 3c3be62 (cli/train_ppo_ray.py, trainer/ray/
vllm_engine.py), SkyRL a956457 (skyrl/train/config/config.py, inference_servers/utils.py), slime 624b824 (backends/
sglang_utils), NeMo-RL 7ea279a (models/generation/vllm/vllm_worker.py, examples/configs/grpo_math_1B.yaml), Unsloth
2026.10.9 (models/llama.py; unsloth_zoo/vllm_utils.py); 2026's.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field
from typing import Any, Final, NamedTuple

from kvplan.asked import ray, snippet
from kvplan.asked.left import parsed
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.base import SERVERS, flag_of, server_of, terms_of
from kvplan.servers.plans.plan import Colocated
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words import shell
from kvplan.servers.words.arguments import flags_of
from kvplan.servers.words.command import VARIABLE, Note, ServeCommand

_CONFIGS: Final = r"\b(?:GRPO|RLOO|OnlineDPO|XPO|NashMD|GSPOToken)Config\s*\("
_UNSLOTH: Final = r"\bFast\w*Model\.from_pretrained\s*\("
_DOTTED: Final = r"[+~]*([A-Za-z_]\w*(?:\.\w+)+)=(.*)"
SAME: Final = (
    "gpu_memory_utilization", "dtype", "enforce_eager", "max_num_batched_tokens", "max_model_len", "max_num_seqs",
    "enable_chunked_prefill", "enable_prefix_caching", "quantization", "data_parallel_size", "tensor_parallel_size",
    "pipeline_parallel_size", "cudagraph_capture_sizes", "speculative_config", "language_model_only", "kv_cache_dtype",
)  # fmt: skip
FEWER: Final = (  # that verl passes on to a server without levels of sleep
    "gpu_memory_utilization", "dtype", "enforce_eager", "max_num_seqs", "quantization", "tensor_parallel_size",
)  # fmt: skip
SAVER: Final = "enable_memory_saver"  # which frameworks set themselves
LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.33 has slots for (config/lora.py)


@dataclass(slots=True)
class Settings:
    """A framework's settings, and what was read of them: an engine's arguments by vLLM's names, and by its own."""

    stated: Mapping[str, Any]
    prefix: str
    server: str = DEFAULT
    adapters: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    @property
    def has_levels(self) -> bool:
        """True if its server has a sleep mode of its own; another's memory is released by a library."""
        return "enable_sleep_mode" in flags_of(self.server)

    def take(self, *names: str, default: Any = None) -> Any:
        """The first of some settings that is stated, else the default; null counts as not stated."""
        name = next((name for name in names if self.stated.get(name) not in (None, "")), None)
        if name is None:
            return default
        self.read.append(name)
        return self.stated[name]

    def number(self, *names: str, default: int) -> int:
        value = self.take(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise unread(f" {names[0]}", f"is not a whole number ({value!r})", "write its value")
        return value

    def is_on(self, *names: str, default: bool = False) -> bool:
        return self.take(*names, default=default) in (True, "true", "yes", "1")

    def take_all(self, prefix: str) -> None:
        """Arguments that the framework passes on as they are."""
        for name in self.stated:
            if name.startswith(prefix) and (value := self.take(name)) is not None:
                self.own[name.removeprefix(prefix)] = value


Level = int | None  # of its sleep: 1 keeps the weights on the host, 2 drops them; 0: never; None: GPUs of its own


class Framework(NamedTuple):
    """Where a framework's settings say what.

    mark             what only its texts have
    prefix           of the engine's settings; names: those that vLLM calls otherwise, and remedies' flags
    defaults         arguments that the framework sets
    model, adapters  settings of the model, and of its LoRA rank; gpus: of nodes, and of GPUs on each
    finish           reads what is its own; returns the level of its sleep
    """

    title: str
    mark: str
    prefix: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    model: tuple[str, ...]
    finish: "Callable[[Settings], Level]"
    adapters: tuple[str, ...] = ()
    gpus: tuple[str, str] = ("", "")


def unread(place: str, problem: str, remedy: str) -> UsageError:
    return UsageError(f"--from-command{place}", printable(problem, 160), remedy)


def framework_of(text: str) -> Framework | None:
    """The framework whose settings a text has, if any."""
    return next((framework for framework in FRAMEWORKS if re.search(framework.mark, text)), None)


def read_rollout(text: str, framework: Framework, options: Collection[str]) -> ServeCommand:
    """Parse the rollout engine of a framework's settings as its server's command."""
    settings = Settings(dict(settings_of(text, framework)), framework.prefix)
    if framework.title == "SkyRL" and not any(name.startswith(framework.prefix) for name in settings.stated):
        settings.prefix = "generator."  # of 2025's releases
    for name in SAME:
        settings.args[name] = settings.take(*(settings.prefix + own for own in (name, framework.names.get(name, name))))
    model, rank = settings.take(*framework.model), settings.number(*framework.adapters, default=0)
    settings.adapters = rank if rank > 0 and not settings.is_on("actor_rollout_ref.model.lora.merge") else 0
    level = framework.finish(settings)
    if model is None and "model" not in options:
        raise unread("", f"{framework.title}'s settings name no model", "name it as MODEL")
    passed = SAME if settings.has_levels else FEWER
    settings.args = {name: settings.args.get(name) for name in passed}
    missing = {name: value for name, value in framework.defaults.items() if settings.args.get(name, "") is None}
    settings.args |= missing
    words = [f"--model={model}"] if model else []
    command = parsed(server_of(settings.server).pasted().parse, [*words, *words_of(settings)], options)
    command.engine = settings.server
    own = f"--{SAVER.replace('_', '-')}"  # nobody wrote it
    command.ignored = [flag for flag in command.ignored if flag != own]
    if level is not None:
        shares = framework.title == "Unsloth" or (settings.adapters and not settings.has_levels)
        keeps = ("weights",) if shares else ()
        command.colocated = Colocated(framework.title, level, keeps)
        if level and settings.has_levels:
            command.args["enable_sleep_mode"] = True
    command.notes += map(Note, notes_of(framework, settings, missing, command))
    return command


def words_of(settings: Settings) -> Iterator[str]:
    share, flags = terms_of(settings.server).share_argument, flags_of(settings.server)
    names = {name: share if name == "gpu_memory_utilization" else name for name in SAME}
    adapters: dict[str, Any] = {}
    if settings.adapters and settings.has_levels:
        least = next((rank for rank in LORA_RANKS if rank >= settings.adapters), settings.adapters)
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": least}
    stated = {
        flag_of(settings.server, names[name]).lstrip("-").replace("-", "_"): value
        for name, value in settings.args.items()
        if names.get(name) in flags
    }
    for name, value in (stated | adapters | settings.own).items():
        if name == "cudagraph_capture_sizes" and isinstance(value, list):
            yield from (f"--{name.replace('_', '-')}", *map(str, value))
        else:
            yield from snippet.flag_words(name, value, settings.server)


def notes_of(
    framework: Framework, settings: Settings, missing: Mapping[str, Any], command: ServeCommand
) -> Iterator[str]:
    """What was read, what was not, how remedies are written there, and which GPUs the engine has."""
    title, counts = framework.title, [settings.take(name) for name in framework.gpus]
    yield f"{title}'s rollout engine; settings read: {', '.join(dict.fromkeys(settings.read)) or 'none'}"
    if missing:
        values = ", ".join(f"{name} {value}" for name, value in missing.items())
        yield f"by {title}'s defaults: {values}; other releases may have others"
    ignored: dict[str, int] = {}
    for name in settings.stated.keys() - set(settings.read):
        is_near = ("." in settings.prefix and name.startswith(settings.prefix)) or "vllm" in name
        group = name.removeprefix(settings.prefix) if is_near else name.rpartition(".")[0] or "others"
        ignored[group] = ignored.get(group, 0) if is_near else ignored.get(group, 0) + 1
    if ignored:
        texts = [f"{count} of {group}" if count else group for group, count in sorted(ignored.items())]
        yield f"settings without effect on the engine's memory, ignored: {', '.join(texts)}"
    if command.colocated is not None:
        doubled = "inference_engine_" if "inference_engine." in settings.prefix else ""
        owns = {name: settings.prefix + own.removeprefix(doubled) for name, own in framework.names.items()}
        texts = [f"--{name.replace('_', '-')} is {own}" for name, own in owns.items()]
        yield f"what an answer writes as a flag is one of {title}'s settings: {', '.join(texts)}"
    if title == "Unsloth":
        yield "Unsloth chooses --max-num-seqs and --max-num-batched-tokens by its own estimate: state what it prints"
    if title == "Unsloth" and command.colocated is not None and command.colocated.level:
        yield (
            f"in standby Unsloth sets the fraction: {STANDBY_SHARE} of 40 GiB or more, 0.855 of 25, 0.78 of 20, and "
            "0.76 to 0.71 of less; state that of a smaller GPU as --gpu-memory-utilization"
        )
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        ranks *= command.args.get(name) or 1
    gpus = (counts[0] or 1) * counts[1] if isinstance(counts[0] or 1, int) and isinstance(counts[1], int) else ranks
    if command.colocated is None:
        yield "its GPUs are its own: no trainer shares them, and it never sleeps"
    elif gpus != ranks:
        whole = gpus % ranks == 0 and gpus > ranks
        yield (f"{gpus} GPUs hold {gpus // ranks} engines of {ranks}: the figures are of one" if whole else
               f"{gpus} GPUs are no whole number of engines of {ranks} GPUs")  # fmt: skip


# --- settings of a text -----------------------------------------------------------------------------------------------


def settings_of(text: str, framework: Framework) -> Iterator[tuple[str, Any]]:
    """(name, value) of each setting of a script, a YAML file or a call in Python."""
    text = re.sub(r"\$\{HOME\}|\$HOME\b", "~", text)
    tree = snippet._parsed(text) if framework.title in ("TRL", "Unsloth") else None
    if framework.title == "Unsloth":
        yield from of_loader(tree, text)
        return
    if framework.title == "slime":  # flags in arrays, which a command names: "${SGLANG_ARGS[@]}"
        lines = re.sub(r"(?m)(?:^|\s)#.*$|\\$|\S*\[@\]\S*", " ", with_sums(text))
        lines = re.sub(r"(--sglang-cuda-graph-)bs((?:\s+(?:\d+|\$\(seq[\s\d]+\)))+)", largest, lines)
        yield from of_words([word.strip("()'\"") for word in lines.split()], framework)
        return
    if tree is not None and re.search(_CONFIGS, text):
        yield from of_calls(tree)
        return
    if tree is not None:  # a script whose docstring has its command
        text = ast.get_docstring(tree) or text
    if re.search(r"(?m)^\s*[\w.]+:(?:\s|$)", text) and not re.search(r"(?m)^[^#\n]*(?:\bpython|--\w|\w=\S)", text):
        from kvplan.asked.manifest import documents

        for document in documents(text, "--from-command"):
            yield from flat("", document)
        return
    for words in shell.split(with_sums(text)):
        yield from of_words(words, framework)


def largest(match: "re.Match[str]") -> str:
    """The largest of a list of graphs' sizes, such as `1 2 $(seq 8 8 256)`."""
    return f"{match[1]}max-bs {max(map(int, re.findall('[0-9]+', match[2])))} "


def typed(text: Any) -> Any:
    """A value as Hydra reads it: numbers, true and false in any case, null; text otherwise."""
    if not isinstance(text, str):
        return text
    plain = text.strip().strip("'\"")
    if plain.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(plain.lower())
    value = ray.typed(plain)
    return value if isinstance(value, int | float | dict | list) else plain


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a mapping, by dotted names, but references to other keys."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif prefix and not str(value).startswith("${"):
        yield prefix, typed(value)


def of_words(words: list[str], framework: Framework) -> Iterator[tuple[str, Any]]:
    """Settings of one command: key=value with dots, or the flags of those that have flags."""
    if "." in framework.prefix:
        matches = (re.fullmatch(_DOTTED, word, re.DOTALL) for word in words)
        yield from ((match[1], typed(match[2])) for match in matches if match is not None)
        return
    if not re.search(framework.mark, " ".join(words)):
        return
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield re.sub("[.-]", "_", name), typed(value if equals else following.startswith("--") or following)


def of_calls(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Keywords of the config, and the model that the trainer is given."""
    values = snippet._Values(snippet._names(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if re.match(_CONFIGS, f"{name}("):
            yield from ((key, values.of(key, value, ())) for key, value in keywords.items())
        model = keywords.get("model") if name.endswith("Trainer") else None
        if name == "from_pretrained" and node.args and "CausalLM" in ast.unparse(node.func):
            model = node.args[0]
        value = None if model is None else values.of("model", model, ())
        if isinstance(value, str) and not re.search(VARIABLE, value):
            yield "model_name_or_path", value


def of_loader(tree: ast.Module | None, text: str) -> Iterator[tuple[str, Any]]:
    """Keywords of Unsloth's loader, and whether the environment lets the engine sleep."""
    if tree is None:
        raise unread("", "contains no whole call of Unsloth's loader", "paste it up to its last parenthesis")
    values = snippet._Values(snippet._names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.match(_UNSLOTH, f"{ast.unparse(node.func)}("):
            named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            named |= {"model_name": node.args[0]} if node.args else {}
            yield from ((key, values.of(key, value, ())) for key, value in named.items())
    if re.search(r"UNSLOTH_VLLM_STANDBY\W+1\b", text):
        yield "unsloth_vllm_standby", True


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
        lines.append(re.sub(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)", value, line))
        number = r"\s*(?:export\s+)?(\w+)=[\"']?(?:\$\{\w+:-)?(\d{1,15})\}?[\"']?\s*(?:#.*)?$"
        if (match := re.match(number, lines[-1])) is not None:
            numbers[match[1]] = ast.Constant(int(match[2]))
    return "\n".join(lines)


# --- frameworks -------------------------------------------------------------------------------------------------------


def verl(settings: Settings) -> Level:
    """verl sleeps at level 2, at 1 if only adapters are sent again, or if the server has no levels."""
    name = str(settings.take(f"{VERL}name", default=DEFAULT))
    if name not in SERVERS:
        raise unread("", f"verl's rollout {name!r} is not sized", f"kvplan reads those of {', '.join(SERVERS)}")
    settings.server = name
    settings.take_all(f"{VERL}engine_kwargs.{name}.")
    experts = settings.number(f"{VERL}expert_parallel_size", default=1)
    if experts > 1:
        settings.own |= {"enable_expert_parallel": True} if settings.has_levels else {"ep_size": experts}
    hybrid = settings.is_on("actor_rollout_ref.hybrid_engine", default=True)
    if not hybrid or settings.number("rollout.nnodes", f"{VERL}nnodes", default=0) > 0:
        return None
    if not all(settings.is_on(f"{VERL}{key}", default=True) for key in ("free_cache_engine", "enable_sleep_mode")):
        return 0
    settings.own |= {} if settings.has_levels else {SAVER: True}  # with enable_weights_cpu_backup
    return 1 if settings.adapters or not settings.has_levels else 2


def skyrl(settings: Settings) -> Level:
    """SkyRL sleeps at level 2, at 1 if only adapters are sent again."""
    backend = settings.take(f"{settings.prefix}backend")
    settings.server = backend if backend in SERVERS else DEFAULT
    settings.take_all(f"{settings.prefix}engine_init_kwargs.")
    names = (f"{settings.prefix}{own}expert_parallel_size" for own in ("", "inference_engine_"))
    if settings.number(*names, default=1) > 1 and settings.has_levels:
        settings.own["enable_expert_parallel"] = True
    if not settings.is_on("trainer.placement.colocate_all", default=True):
        return None
    return 1 if settings.adapters else 2


def openrlhf(settings: Settings) -> Level:
    """OpenRLHF sleeps at level 1, if it is told to."""
    for name in ("enforce_eager", "enable_prefix_caching"):  # without the prefix in earlier releases
        settings.args[name] = settings.args[name] or settings.take(name)
    parts = [settings.take(name) for name in ("prompt_max_len", "generate_max_len")]  # of earlier releases
    total = sum(part or 1024 for part in parts) if any(parts) else 2048
    settings.args["max_model_len"] = settings.take("data_max_len", "max_len", default=total)
    is_async = settings.is_on("train_async_enable", "async_train")
    if is_async or not settings.is_on("train_colocate_all", "colocate_all_models"):
        return None
    return int(settings.is_on("vllm_enable_sleep"))


def trl(settings: Settings) -> Level:
    """TRL sleeps at level 2, if it is told to."""
    if not settings.stated:
        raise unread("", "contains no whole call of TRL's config", "paste it up to its last parenthesis")
    if not settings.is_on("use_vllm", default="vllm_mode" in settings.stated):
        raise unread("", "TRL generates without vLLM here (use_vllm is off)", "paste settings with use_vllm=True")
    if settings.take("vllm_mode") == "server":
        raise unread("", "vllm_mode is server: the engine is another command's", "paste its `trl vllm-serve ...`")
    prompt, completion = settings.take("max_prompt_length"), settings.take("max_completion_length")
    if settings.args["max_model_len"] is None and isinstance(prompt, int) and isinstance(completion, int):
        settings.args["max_model_len"] = prompt + completion  # of earlier releases
    if settings.take("generation_batch_size") is None:
        steps = settings.number("steps_per_generation", "gradient_accumulation_steps", default=1)
        batch = settings.number("per_device_train_batch_size", default=8)
        settings.args["max_num_seqs"] = batch * steps * (settings.args["tensor_parallel_size"] or 1)
    return 2 if settings.is_on("vllm_enable_sleep_mode") else 0


def slime(settings: Settings) -> Level:
    """slime's SGLang drops its weights where it releases memory: with --colocate, or told to."""
    settings.server = "sglang"
    settings.take_all("sglang_")
    for name in [name for name in settings.own if name.startswith(("router_", "server_", "mem_fraction_"))]:
        del settings.own[name]
    gpus, stages = settings.number("rollout_num_gpus_per_engine", default=1), settings.own.get("pp_size") or 1
    settings.args["tensor_parallel_size"] = gpus // stages
    if not settings.is_on("colocate"):
        return None
    settings.own[SAVER] = True
    return 2


def nemo_rl(settings: Settings) -> Level:
    """NeMo-RL sleeps at level 1 where generation shares the trainer's GPUs."""
    if (name := settings.take("policy.generation.backend", default=DEFAULT)) != DEFAULT:
        raise unread("", f"NeMo-RL's backend {name!r} is not sized", "kvplan reads vllm")
    settings.take_all("policy.generation.vllm_kwargs.")
    if settings.args["max_model_len"] is None:
        settings.args["max_model_len"] = settings.take("policy.max_total_sequence_length")
    ranks = settings.args["tensor_parallel_size"] or 1
    if (experts := settings.number(f"{NEMO}expert_parallel_size", default=1)) > 1:
        settings.own["enable_expert_parallel"] = True
        settings.args["data_parallel_size"] = max(1, experts // ranks)
    if settings.args["dtype"] == "fp8":
        settings.args |= {"dtype": "bfloat16", "quantization": "fp8"}
    return 1 if settings.is_on("policy.generation.colocated.enabled", default=True) else None


STANDBY_SHARE: Final = 0.87875  # of 40 GiB or more (unsloth_zoo/vllm_utils.py: 0.925 x 0.95); smaller GPUs have less


def unsloth(settings: Settings) -> Level:
    """Unsloth's engine shares its weights with the trainer; in standby the KV cache alone is released."""
    if not settings.is_on("fast_inference"):
        raise unread("", "Unsloth generates without vLLM here (fast_inference is off)", "paste fast_inference=True")
    settings.adapters = settings.adapters or 16
    in_4_bits = settings.is_on("load_in_4bit", default=True) and not settings.is_on("load_in_fp8")
    settings.args["quantization"] = "bitsandbytes" if in_4_bits else None
    settings.args["kv_cache_dtype"] = "fp8" if settings.is_on("float8_kv_cache") else None
    if not settings.is_on("unsloth_vllm_standby"):
        return 0
    settings.args["gpu_memory_utilization"] = STANDBY_SHARE
    return 1


VERL: Final = "actor_rollout_ref.rollout."
NEMO: Final = "policy.generation.vllm_cfg."
MEMORY: Final = {"gpu_memory_utilization": "gpu_memory_utilization"}
FRAMEWORKS: Final = (
    Framework(
        "Unsloth", r"\bfast_inference\s*=\s*True\b", "",
        {**MEMORY, "max_model_len": "max_seq_length", "max_lora_rank": "max_lora_rank",
         "quantization": "load_in_4bit"},
        {"gpu_memory_utilization": 0.5}, ("model_name",), unsloth, ("max_lora_rank",),
    ),
    Framework(
        "slime", r"--rollout-num-gpus-per-engine\b|--sglang-mem-fraction-static\b", "sglang_",
        {"gpu_memory_utilization": "mem_fraction_static", "enforce_eager": "disable_cuda_graph"}, {},
        ("hf_checkpoint",), slime, (), ("actor_num_nodes", "actor_num_gpus_per_node"),
    ),
    Framework(
        "NeMo-RL", r"\bpolicy\.generation\.|(?ms:^policy:.*^\s+generation:)", NEMO,
        {**MEMORY, "enforce_eager": "enforce_eager", "dtype": "precision",
         "tensor_parallel_size": "tensor_parallel_size", "pipeline_parallel_size": "pipeline_parallel_size"},
        {"gpu_memory_utilization": 0.6, "dtype": "bfloat16"}, ("policy.model_name",), nemo_rl, (),
        ("cluster.num_nodes", "cluster.gpus_per_node"),
    ),
    Framework(
        "TRL", rf"{_CONFIGS}|--use_vllm\b|--vllm_mode\b|(?m:^\s*use_vllm:)", "vllm_",
        {**MEMORY, "max_model_len": "max_model_length", "tensor_parallel_size": "tensor_parallel_size",
         "enable_sleep_mode": "enable_sleep_mode"},
        {"gpu_memory_utilization": 0.3, "max_num_batched_tokens": 4096}, ("model_name_or_path",), trl,
    ),
    Framework(
        "verl", r"\bactor_rollout_ref[.:]", VERL,
        {**MEMORY, "enforce_eager": "enforce_eager", "tensor_parallel_size": "tensor_model_parallel_size",
         "pipeline_parallel_size": "pipeline_model_parallel_size"},
        {"gpu_memory_utilization": 0.5, "dtype": "bfloat16", "max_num_batched_tokens": 8192, "max_num_seqs": 256,
         "tensor_parallel_size": 2},
        ("actor_rollout_ref.model.path",), verl,
        ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"),
        ("trainer.nnodes", "trainer.n_gpus_per_node"),
    ),
    Framework(
        "OpenRLHF", r"\bopenrlhf\.cli\b|--vllm[._]num_engines\b", "vllm_",
        {**MEMORY, "tensor_parallel_size": "tensor_parallel_size", "enable_sleep_mode": "enable_sleep"},
        {"gpu_memory_utilization": 0.95, "dtype": "bfloat16", "enable_prefix_caching": False},
        ("actor_model_name_or_path", "pretrain"), openrlhf, (), ("actor_num_nodes", "actor_num_gpus_per_node"),
    ),
    Framework(
        "SkyRL", r"\bskyrl_train\b|(?ms:^trainer:.*^generator:|^generator:.*^trainer:)|\bgenerator\.(?:inf|gpu_|num_)",
        "generator.inference_engine.",
        {**MEMORY, "enforce_eager": "enforce_eager", "dtype": "model_dtype",
         "tensor_parallel_size": "inference_engine_tensor_parallel_size",
         "pipeline_parallel_size": "inference_engine_pipeline_parallel_size",
         "data_parallel_size": "inference_engine_data_parallel_size"},
        {"gpu_memory_utilization": 0.8, "dtype": "bfloat16", "max_num_batched_tokens": 8192, "max_num_seqs": 1024},
        ("trainer.policy.model.path",), skyrl, ("trainer.policy.model.lora.rank",),
        ("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node"),
    ),
    Framework(
        "TRL", r"\btrl\s+vllm-serve\b|\btrl\.scripts\.vllm_serve\b", "", {}, {"gpu_memory_utilization": 0.9},
        ("model",), lambda settings: None,
    ),
)  # fmt: skip
