"""Where weights come from: a Hugging Face directory of safetensors, or a seed; each tensor is filled in place, once.

A layer allocates its tensors and asks for what goes into them, so nothing ever exists twice and a rank reads its own
part of the file only. Pickled checkpoints are never opened.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.core.files import load_json, open_regular
from kvplan.models.checkpoint import INDEX_NAME, MAX_INDEX_BYTES

Part = tuple[slice, ...]
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names
# Are read as they are stored, or not at all.
INTEGERS_AND_FP8 = {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    name: dtype for dtype, name in INTEGERS_AND_FP8.items()
}
BLOCK_ELEMENTS = 1 << 24  # of a random tensor that are drawn at once: 32 MiB in bfloat16
FP8_MAX = 448.0  # largest float8_e4m3fn
SPREAD = 0.02  # standard deviation of random weights
FP8_SPREAD = 64.0  # of random fp8 values, before their scale: seven of them reach the largest, 448
INT4_SPREAD = (15 * 17 / 12) ** 0.5  # of sixteen values that are equally likely
MIDDLE = 0x77777777  # zero points of 7, or of 8 less one: either is the middle of sixteen values
E2M1_SPREAD = (137 / 16) ** 0.5  # of sixteen e2m1 values that are equally likely
E2M1_POWER = 127 - 7  # e8m0 of 2^-7, which makes 0.023 of that
CONSTANTS = {"weight_scale": SPREAD / FP8_SPREAD, "weight_scale_inv": SPREAD / FP8_SPREAD, "input_scale": 0.05} | {
    f"{part}_proj_scales": E2M1_POWER for part in ("gate_up", "down")
}
CONSTANTS |= {
    "weight_scale_2": SPREAD / E2M1_SPREAD, "weight_global_scale": E2M1_SPREAD / SPREAD, "input_global_scale": 20.0
}  # fmt: skip
# What a checkpoint may hold beside the decoder: tables that are computed here, other modalities, Qwen3-Next's layers
# that predict further tokens (mtp., which transformers and vLLM skip too).
IGNORED = re.compile(
    r"^mtp\.|rotary_emb\.inv_freq$|(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|embed_vision)\.|masked_bias$|"
    # Of quantized checkpoints: scales of an fp8 KV cache, which here has its own; a bound that activations are cut at.
    r"\.self_attn\.([qkv]_proj\.|attn\.)?([qkv]|output)_scale$|\.input_scale_ub$"
)
# What a multi-token prediction layer has and a plain one has not: only so is a layer after the last no mistake.
DRAFT = ("eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens")


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape less its last axes of one element."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


Others = Callable[[int | None], bool]


class WeightSource(Protocol):
    """Fills tensors that a layer has allocated."""

    def fill(self, out: torch.Tensor, name: str, shape: tuple[int, ...], part: Part = ()) -> None:
        """Put the `part` of the tensor called `name`, whose whole shape is `shape`, into out (any view).

        Floats are converted to out's dtype; integers and fp8 are what is stored, or refused. Axes of one element at the
        end of a stored shape count for nothing: scales are stored with and without them.
        """

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype the tensor is stored in; None for one that is not stored."""

    def place(self, name: str) -> str:
        """The tensor's file and its name there, for messages."""

    def finish(self, num_layers: int, others: Others | None = None) -> None:
        """Raise when something that belongs to the model was left over.

        others  whether a tensor, by its layer or None outside the layers, is another rank's
        """


class NoWeights:
    """For tensors without memory, built to be asked for their sizes."""

    def fill(self, out: torch.Tensor, name: str, shape: tuple[int, ...], part: Part = ()) -> None:
        return

    def dtype_of(self, name: str) -> torch.dtype | None:
        return None

    def place(self, name: str) -> str:
        return f"tensor {name!r}"

    def finish(self, num_layers: int, others: Others | None = None) -> None:
        return


class RandomWeights:
    """Random weights of the right size: matrices normal around 0, norms 1.

    A value follows from the seed, the tensor's name and its place in the whole tensor, so that the parts of all ranks
    are one model. It is drawn with a block of whole rows: in place where all of the block is wanted and lies together,
    as it does without tensor parallelism; else beside, one block at a time.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def fill(self, out: torch.Tensor, name: str, shape: tuple[int, ...], part: Part = ()) -> None:
        constant = self._constant(name, out.dtype)
        if constant is not None:
            out.fill_(constant)
            return
        rows = range(shape[0])[part[0] if part else slice(None)]
        block_rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
        for start in range(0, shape[0], block_rows):
            stop = min(start + block_rows, shape[0])
            first, last = bisect_left(rows, start), bisect_left(rows, stop)
            if first == last:
                continue
            target, block_shape = out[first:last], (stop - start, *shape[1:])
            is_fp8 = out.dtype == torch.float8_e4m3fn  # of which torch draws none
            if target.shape == block_shape and target.is_contiguous() and not is_fp8:
                self._draw(target, name, start)
            else:
                block = torch.empty(block_shape, dtype=torch.float32 if is_fp8 else out.dtype, device=out.device)
                inside = slice(rows[first] - start, rows[last - 1] - start + 1, rows.step)
                drawn = self._draw(block, name, start)[(inside, *part[1:])]
                target.copy_((drawn * (FP8_SPREAD / SPREAD)).clamp(-FP8_MAX, FP8_MAX) if is_fp8 else drawn)

    def dtype_of(self, name: str) -> torch.dtype | None:
        return None

    def place(self, name: str) -> str:
        return f"tensor {name!r}"

    def finish(self, num_layers: int, others: Others | None = None) -> None:
        return

    def _draw(self, block: torch.Tensor, name: str, start: int) -> torch.Tensor:
        """The block of rows from `start` on, in place; its seed is the same in every process, unlike hash(name)."""
        seed = blake2b(f"{self._seed} {name} {start}".encode(), digest_size=8).digest()
        generator = self._generator.manual_seed(int.from_bytes(seed, "big"))
        if block.dtype == torch.int32:  # eight 4-bit values each
            return block.random_(-(2**31), 2**31, generator=generator)
        if block.dtype == torch.uint8:  # two 4-bit values each
            return block.random_(0, 256, generator=generator)
        return block.normal_(0, SPREAD, generator=generator)

    @staticmethod
    def _constant(name: str, dtype: torch.dtype) -> float | None:
        """What all of a tensor is that is not drawn: norms, and what scales quantized values to usual sizes."""
        *_, last = name.split(".")
        match last:
            case "weight" if name.endswith("norm.weight"):
                return 1
            case "weight_scale" if dtype == torch.float8_e4m3fn:
                return 1  # and the tensor's own makes of it what is meant
            case "weight_scale" if dtype in (torch.float16, torch.bfloat16):  # of 4-bit integers
                return SPREAD / INT4_SPREAD
            case "scales":
                return SPREAD / INT4_SPREAD
            case "qzeros" | "weight_zero_point":
                return MIDDLE
            case _:
                return CONSTANTS.get(last)


class Checkpoint:
    """The safetensors files of a directory; names are given as in a plain text model ("model.layers.0...")."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}  # open, by file name
        self._file_of = self._find_tensors()
        self._prefix = self._find_prefix()
        self._unused = set(self._file_of)

    def fill(self, out: torch.Tensor, name: str, shape: tuple[int, ...], part: Part = ()) -> None:
        own = self._own_name(name)
        if own not in self._file_of:
            raise InvalidInputError(f"{self.directory}: tensor {own!r} is missing; the checkpoint is not complete")
        file = self._file_of[own]
        try:
            stored = self._open(file).get_slice(own)
            self._check(f"{self.directory / file}: tensor {own!r}", stored, shape, out.dtype)
            if not stored.get_shape():  # of a single value there are no slices
                out.fill_(self._open(file).get_tensor(own))
            else:
                whole = tuple(slice(p.start, p.stop) for p in part) or (slice(None),) * len(shape)
                strides = tuple(slice(None, None, p.step) for p in part) or ...  # a file is read without gaps
                out.copy_(stored[whole].flatten(len(shape) - 1)[strides])
        except SafetensorError as error:
            raise InvalidInputError(f"{self.directory / file}: tensor {own!r} cannot be read ({error})") from error
        self._unused.discard(own)

    def dtype_of(self, name: str) -> torch.dtype | None:
        own = self._own_name(name)
        if own not in self._file_of:
            return None
        path = self.directory / self._file_of[own]
        try:
            stored = self._open(path.name).get_slice(own).get_dtype()
        except SafetensorError as error:
            raise InvalidInputError(f"{path}: tensor {own!r} cannot be read ({error})") from error
        if stored not in TORCH_DTYPES:
            raise UnsupportedModelError(
                f"{path}: tensor {own!r} is stored as {stored}; the engine reads {', '.join(TORCH_DTYPES)}"
            )
        return TORCH_DTYPES[stored]

    def place(self, name: str) -> str:
        own = self._own_name(name)
        return f"{self.directory / self._file_of[own]}: tensor {own!r}"

    def _check(self, where: str, stored: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Refuse a tensor of another shape, or whose values a tensor of this dtype could not stand for."""
        actual, name = tuple(stored.get_shape()), stored.get_dtype()
        if _trimmed(actual) != _trimmed(shape) or 0 < len(actual) < len(shape):
            raise InvalidInputError(
                f"{where} has shape {list(actual)}, the config says {list(shape)}; "
                "weights and config.json do not belong together"
            )
        if dtype in INTEGERS_AND_FP8:
            if name != INTEGERS_AND_FP8[dtype]:
                raise InvalidInputError(
                    f"{where} is stored as {name}, the config's quantization_config says {INTEGERS_AND_FP8[dtype]}; "
                    "weights and config.json do not belong together"
                )
        elif name not in FLOATS:
            raise UnsupportedModelError(
                f"{where} is stored as {name}, as quantized weights are, and the config's quantization_config does "
                "not say so; the engine reads no others"
            )

    def finish(self, num_layers: int, others: Others | None = None) -> None:
        drafts = self._draft_layers(num_layers)
        left = sorted(name for name in self._unused if not self._is_beside_the_model(name, drafts))
        if others is not None:
            layers = {name: self._layer_and_part(name) for name in left}
            left = [name for name, layer in layers.items() if not others(None if layer is None else layer[0])]
        if left:
            raise InvalidInputError(
                f"{self.directory}: {len(left)} tensors have no place in the model the config describes "
                f"({', '.join(left[:3])}{', ...' if len(left) > 3 else ''}); "
                "weights and config.json do not belong together"
            )
        self._files.clear()

    def _is_beside_the_model(self, name: str, drafts: set[int]) -> bool:
        layer = self._layer_and_part(name)
        is_draft = layer is not None and layer[0] in drafts
        is_head = name == self._own_name("lm_head.weight")
        return is_draft or is_head or IGNORED.search(name) is not None or self._is_empty_bias(name)

    def _is_empty_bias(self, name: str) -> bool:
        """Whether this is the bias of zeros that some packers of GPTQ wrote for a layer without one."""
        if not name.endswith(".bias") or name.removesuffix("bias") + "qweight" not in self._file_of:
            return False
        return not self._open(self._file_of[name]).get_tensor(name).any()

    def _draft_layers(self, num_layers: int) -> set[int]:
        """The layers after the config's last that are known to predict further tokens, for which nothing runs here."""
        layers = filter(None, map(self._layer_and_part, self._file_of))
        return {index for index, part in layers if index >= num_layers and part in DRAFT}

    def _layer_and_part(self, name: str) -> tuple[int, str] | None:
        """(3, "self_attn") of "model.layers.3.self_attn.q_proj.weight"; None for a tensor outside the layers."""
        match = re.match(rf"{re.escape(self._prefix)}layers\.(\d+)\.(\w+)", name)
        return None if match is None else (int(match[1]), match[2])

    def _find_tensors(self) -> dict[str, str]:
        index = self.directory / INDEX_NAME
        if index.exists():
            try:
                names = load_json(index, MAX_INDEX_BYTES)["weight_map"]
                return {str(name): Path(file).name for name, file in names.items()}
            except (KeyError, AttributeError, TypeError) as error:
                raise InvalidInputError(f"{index}: is not an index of safetensors files ({error!r})") from error
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise InvalidInputError(
                f"{self.directory}: holds no .safetensors file; pickled weights are not read, convert them first"
            )
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (a safe_open is no dict)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.directory / file
            if path.exists():
                open_regular(path).close()  # a FIFO would be waited for
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise InvalidInputError(f"{path}: is named in {INDEX_NAME} and does not exist; download it") from error
            except (SafetensorError, OSError) as error:
                raise InvalidInputError(f"{path}: is damaged or truncated ({error}); download it again") from error
        return self._files[file]

    def _find_prefix(self) -> str:
        """What stands before "embed_tokens.weight": "model." in text models, longer inside multimodal ones; or before
        Nemotron-H's "embeddings.weight"."""
        for end in ("embed_tokens.weight", "embeddings.weight"):
            ends = [name for name in self._file_of if f".{name}".endswith(f".{end}") and not IGNORED.search(name)]
            if ends:
                return min(ends, key=len).removesuffix(end)
        raise InvalidInputError(f"{self.directory}: has no tensor ...embed_tokens.weight; this is no decoder's weights")

    def _own_name(self, name: str) -> str:
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        outer = self._prefix.removesuffix("model.") + name  # lm_head beside "model." or "language_model.model."
        return outer if outer in self._file_of else name
