"""vLLM's --compilation-config: which CUDA graphs it captures. The rest of it moves no memory that the pool depends on.

Source: vLLM 0.33 config/compilation.py (CompilationConfig, CUDAGraphMode), config/vllm.py (_set_cudagraph_sizes,
_normalize_piecewise_cudagraph_mode); the keys of 0.6 to 0.32 likewise.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.words.arguments import EngineArgs

Mode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
MODES: Final[tuple[Mode, ...]] = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
USUAL: Final[Mode] = "FULL_AND_PIECEWISE"
MOST_SIZES: Final = 4096
OPTION: Final = "--compilation-config"
# Keys without a bearing on the graphs: passes, caches, what is compiled.
OTHERS: Final = frozenset(
    {
        "backend", "cache_dir", "compile_cache_save_format", "compile_mm_encoder", "compile_ranges_endpoints",
        "compile_ranges_split_points", "compile_sizes", "cudagraph_copy_inputs", "cudagraph_num_of_warmups",
        "custom_ops", "debug_dump_path", "dynamic_shapes_config", "fast_moe_cold_start", "inductor_compile_config",
        "inductor_passes", "ir_enable_torch_wrap", "local_cache_dir", "pass_config", "splitting_ops",
        "use_inductor", "use_inductor_graph_partition",
    }
)  # fmt: skip
SIZED: Final = (
    "cudagraph_mode", "mode", "level", "use_cudagraph", "full_cuda_graph", "cudagraph_capture_sizes",
    "max_cudagraph_capture_size", "cudagraph_specialize_lora",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Graphs:
    """What is captured.

    mode     when a step runs a graph, and of which kind; a backend without support for it falls back to a lesser one
    sizes    batch sizes in tokens; None: the server's own
    largest  the largest of them, if it is given
    is_plain as without a config; the estimate was fitted on such servers
    both     graphs are captured with adapters and without
    """

    mode: Mode = USUAL
    sizes: tuple[int, ...] | None = None
    largest: int | None = None
    is_plain: bool = True
    both: bool = True

    def count(self, sizes: int, decoding: int) -> int:
        """Graphs of so many batch sizes, and of so many numbers of sequences that decode.

        Source: vLLM 0.33 v1/cudagraph_dispatcher.py (initialize_cudagraph_keys).
        """
        match self.mode:
            case "NONE":
                return 0
            case "PIECEWISE" | "FULL":
                return sizes
            case "FULL_DECODE_ONLY":
                return decoding
            case "FULL_AND_PIECEWISE":
                return sizes + decoding


def unmodeled(stated: Mapping[str, Any]) -> str | None:
    """Say why a config is rejected, and what to do; None: it is not."""
    if stated.get("cudagraph_mm_encoder"):
        return "cudagraph_mm_encoder captures graphs of the encoder, which is not modeled; remove it"
    unknown = [key for key, value in stated.items() if value is not None and key not in (*SIZED, *OTHERS)]
    unknown = [key for key in unknown if "mm_encoder" not in key and not key.startswith("encoder_cudagraph")]
    if unknown:
        return f"has no key {printable(unknown[0], 40)!r} that kvplan knows; remove it"
    try:
        parsed(stated)
    except ValueError as error:
        return str(error)
    return None


def parsed(stated: Mapping[str, Any]) -> Graphs:
    """Parse a config. Raise ValueError with the problem and the remedy."""
    name = str(stated.get("cudagraph_mode") or mode_by_level(stated)).upper().removeprefix("CUDAGRAPHMODE.")
    if name not in MODES:
        raise ValueError(f"cudagraph_mode is {printable(name, 40)!r}; use one of {', '.join(MODES)}")
    sizes, largest = stated.get("cudagraph_capture_sizes"), stated.get("max_cudagraph_capture_size")
    if sizes is not None:
        counts = sizes if isinstance(sizes, list) and 0 < len(sizes) <= MOST_SIZES else [0]
        if not all(type(size) is int and size > 0 for size in counts):
            raise ValueError("cudagraph_capture_sizes is not a list of batch sizes; write [1, 2, 4, 8]")
        sizes = tuple(sorted(set(counts)))
    if largest is not None and (type(largest) is not int or largest < 1):
        raise ValueError("max_cudagraph_capture_size is not a number of tokens; write 512")
    is_plain = name == USUAL and sizes is None
    both = stated.get("cudagraph_specialize_lora") is not False
    return Graphs(name, sizes, largest, is_plain, both)


def mode_by_level(stated: Mapping[str, Any]) -> Mode:
    """The mode of a config that does not say it: without compilation there are no piecewise graphs."""
    if stated.get("use_cudagraph") is False or off(stated.get("level")):
        return "NONE"
    if stated.get("full_cuda_graph"):
        return "FULL"
    if str(stated.get("level")) == "1":
        return "PIECEWISE"
    compiles = stated.get("mode") is None or str(stated["mode"]).upper() in ("3", "VLLM_COMPILE")
    return USUAL if compiles else "FULL_DECODE_ONLY"


def off(value: Any) -> bool:
    return value is not None and str(value).upper() in ("NONE", "0", "FALSE")


def of_args(args: EngineArgs) -> Graphs:
    """The graphs that the arguments ask for. Raise UsageError for a config that is not modeled."""
    graphs = of_text(args.compilation_config or "{}")
    largest = args.max_cudagraph_capture_size
    if graphs.largest is not None and largest not in (None, graphs.largest):
        raise UsageError(OPTION, "contradicts --max-cudagraph-capture-size", "use one of them")
    if graphs.sizes is not None and (largest or graphs.largest) not in (None, graphs.sizes[-1]):
        raise UsageError(OPTION, f"its largest size is {graphs.sizes[-1]}, and the maximum another", "use one of them")
    return graphs


@lru_cache(maxsize=64)
def of_text(text: str) -> Graphs:
    import json  # not needed without a config

    stated = json.loads(text)
    refused = unmodeled(stated)
    if refused is not None:
        problem, _, remedy = refused.partition("; ")
        raise UsageError(OPTION, problem, remedy)
    return parsed(stated)
