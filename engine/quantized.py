"""Quantized weights: a checkpoint's tensors as the ones that are held, byte for byte as many, and products with them.

Layouts, each w [outputs, inputs]:

fp8         float8_e4m3fn values and a float32 scale for each tensor of the checkpoint, for each row, or for each block;
            w = value * scale. Source: compressed-tensors' float-quantized, Hugging Face's fp8, DeepSeek's block scales.
mxfp4       4-bit e2m1 values, two in a byte, and a power of two in a byte (e8m0) for each 32 of a row. Source: the
            OCP's microscaling formats (MX) 1.0, and gpt-oss as published.
nvfp4       the same values, an fp8 scale (e4m3) for each 16 of a row and a float32 one for each tensor; activations are
            not rounded, although the checkpoint has scales for that. Source: ModelOpt, compressed-tensors'
            nvfp4-pack-quantized.
awq, gptq   4-bit values in int32 words, and for each group of inputs a 16-bit scale and a 4-bit zero point;
            w = (value - zero) * scale. Source: the packing of AutoAWQ's gemm version and of GPTQModel.
int4        the same in compressed-tensors' pack-quantized; symmetric, every zero point is 8. Groups may be of inputs
            that are no neighbors (actorder): then columns are held in the order of their groups, and inputs reordered.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import assert_never

import torch
import torch.nn.functional as F

from engine.kernels import torch_backend
from engine.kernels.matrices import Fp8BlockMatrix as Fp8BlockMatrix  # the matrices that are loaded here
from engine.kernels.matrices import Fp8Matrix as Fp8Matrix
from engine.kernels.matrices import Int4Matrix as Int4Matrix
from engine.kernels.matrices import Matrix as Matrix
from engine.kernels.matrices import Mxfp4Matrix as Mxfp4Matrix
from engine.kernels.matrices import Nvfp4Matrix as Nvfp4Matrix
from engine.kernels.matrices import nibble_run
from engine.loader import WeightSource
from kvplan.core.errors import InvalidInputError, UnsupportedModelError, UsageError
from kvplan.models.quant import WEIGHT_ONLY, scheme_of
from kvplan.models.spec import ModelSpec, Scheme

ALL = slice(None)
FP8 = torch.float8_e4m3fn
PACK = 8  # 4-bit values in a word
MXFP4_GROUP = 32  # inputs that share a power of two
NVFP4_GROUP = 16  # inputs that share an fp8 scale
# What the parts of a layer in NVFP4 are called: values, their scales, the tensor's, the activations'.
NVFP4_SUFFIXES = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
NAN_POWER = 255  # the e8m0 scale that is no number
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word holds its first output, its second, ...
EIGHTS = 0x88888888 - 2**32  # a word of zero points of 8
SCALE_DTYPES = (torch.float16, torch.bfloat16)
# Variants of a method's packing that are read; the others are refused by name.
VARIANTS = {"awq": ("",), "gptq": ("", "gptq_v2")}
RUNS = (
    "the engine runs unquantized ones, dense layers in fp8, NVFP4 or 4 bits of AWQ, GPTQ or compressed-tensors, and "
    "experts in blocks of fp8, NVFP4, or MXFP4 as gpt-oss has them"
)
FP8_METHODS = ("fp8", "compressed-tensors", "modelopt")  # their tensors have the same names and meanings

Empty = Callable[..., torch.Tensor]  # a Builder's: allocates and remembers, as a weight or as a buffer


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a linear layer of the checkpoint: some of its rows (outputs), some of its columns."""

    name: str
    outputs: int
    inputs: int
    rows: slice = field(default_factory=lambda: ALL)
    columns: slice = field(default_factory=lambda: ALL)

    @property
    def local_rows(self) -> range:
        return range(self.outputs)[self.rows]

    @property
    def local_columns(self) -> range:
        return range(self.inputs)[self.columns]


def product(kernels: ModuleType, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [num_tokens, inputs] -> x @ w.T + bias [num_tokens, outputs], dtype of x."""
    y: torch.Tensor
    match matrix:
        case torch.Tensor():
            return F.linear(x, matrix, bias)
        case Fp8Matrix():
            y = kernels.fp8_linear(x, matrix.values, matrix.row_scales, input_scale=matrix.input_scale)
        case Fp8BlockMatrix():
            y = kernels.fp8_block_linear(x, matrix.values, matrix.scales, matrix.block)
        case Int4Matrix():
            x = x if matrix.order is None else x.index_select(-1, matrix.order)
            y = kernels.int4_linear(x, matrix.words, matrix.scales, matrix.zeros)
        case Mxfp4Matrix():
            raise AssertionError("MXFP4 outside the experts is refused before anything is loaded")
        case Nvfp4Matrix():
            y = kernels.nvfp4_linear(x, matrix.values, matrix.scales, matrix.part_scales, matrix.parts)
        case _:
            assert_never(matrix)
    return y if bias is None else y.add_(bias)


def widen(matrix: Matrix, out: torch.Tensor) -> torch.Tensor:
    """A quantized matrix's weights into out [outputs, inputs], rounded to its dtype once; returns out."""
    identity = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)
    return out.copy_(product(torch_backend, identity, matrix, None).T)


# --- what can be run --------------------------------------------------------------------------------------------------


def check_runs(spec: ModelSpec) -> None:
    """Refuse, by name and before anything is allocated, quantized weights that the engine does not run."""
    stored = spec.quantization
    if stored is None:
        return
    if not stored.known:
        raise _refusal(spec, stored.method)
    for index, weights in enumerate(spec.layer_weights):
        for weight in weights:
            scheme = scheme_of(stored, index, weight.sources or (weight.name,)) if weight.quantizable else None
            if scheme is None:
                continue
            runs = is_run_in_experts if weight.experts else is_run
            if not runs(stored.method, scheme):
                variant = f" {scheme.variant}" if scheme.variant else ""
                raise _refusal(spec, f"{stored.method}: {scheme.kind}{variant} of {weight.name}")


def is_run(method: str, scheme: Scheme) -> bool:
    match scheme.kind:
        case "fp8_tensor" | "fp8_channel":
            return method in FP8_METHODS
        case "fp8_block":
            return method in ("fp8", "compressed-tensors") and scheme.scale_bytes == 4 and not scheme.static
        case "awq" | "gptq":
            return method == scheme.kind and scheme.variant in VARIANTS[scheme.kind]
        case "nvfp4":
            is_wide = scheme.variant == WEIGHT_ONLY and not scheme.static
            is_known = method in NVFP4_SUFFIXES and scheme.group_size == NVFP4_GROUP
            return is_known and (is_wide or not scheme.variant)
        case "int4":
            return method == "compressed-tensors" and not scheme.inputs
        case _:
            return False


def is_run_in_experts(method: str, scheme: Scheme) -> bool:
    match scheme.kind:
        case "mxfp4":
            return method == "mxfp4"
        case "fp8_block" | "nvfp4":
            return is_run(method, scheme) and not scheme.variant
        case _:
            return False


def _refusal(spec: ModelSpec, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{spec.name}: its weights are quantized ({how}); {RUNS}")


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    scheme: Scheme | None, method: str, pieces: list[Piece], source: WeightSource, empty: Empty, buffer: Empty
) -> Matrix:
    """The pieces one below the other, as one matrix; what the checkpoint does not hold comes from `buffer`.

    scheme  None: plain, in the dtype that `empty` has when it is not told any
    """
    if scheme is None:
        return _values(pieces, source, empty)
    match scheme.kind:
        case "fp8_tensor" | "fp8_channel":
            return _fp8(scheme, pieces, source, empty, buffer)
        case "fp8_block":
            return _fp8_block(scheme, method, pieces, source, empty)
        case "nvfp4":
            return _nvfp4(scheme, method, pieces, source, empty)
        case "awq" | "gptq":
            return _int4(scheme, pieces, source, empty)
        case "int4":
            return _packed_int4(scheme, pieces, source, empty, buffer)
        case kind:
            raise AssertionError(f"{kind} is refused before anything is loaded")


def _sizes(pieces: list[Piece]) -> tuple[list[int], int]:
    """(rows of each piece, columns of all)."""
    (columns,) = {len(piece.local_columns) for piece in pieces}
    return [len(piece.local_rows) for piece in pieces], columns


def _values(pieces: list[Piece], source: WeightSource, empty: Empty, dtype: torch.dtype | None = None) -> torch.Tensor:
    rows, columns = _sizes(pieces)
    values = empty(sum(rows), columns, dtype=dtype)
    for view, piece in zip(values.split(rows), pieces, strict=True):
        source.fill(view, f"{piece.name}.weight", (piece.outputs, piece.inputs), (piece.rows, piece.columns))
    return values


def _fill_scales(
    out: torch.Tensor,
    source: WeightSource,
    name: str,
    shape: tuple[int, ...],
    part: tuple[slice, ...] = (),
    *,
    positive: bool = True,
) -> None:
    """Scales as they are stored, of which none may be damaged: a model of such ones runs, and says anything."""
    source.fill(out, name, shape, part)
    if source.dtype_of(name) is None:  # nothing is stored: they are made up, or have no memory
        return
    out = out.float()  # of fp8 torch compares none
    good = out.isfinite() & (out > 0) if positive else out.isfinite()
    if not bool(good.all()):
        wrong = "are 0, negative or no finite numbers" if positive else "are no finite numbers"
        raise InvalidInputError(
            f"{source.place(name)} holds scales that {wrong} ({int((~good).sum())} of {good.numel()}, "
            f"{out[~good][0].item():g} first); download it again, or quantize the model anew"
        )


def _fp8(scheme: Scheme, pieces: list[Piece], source: WeightSource, empty: Empty, buffer: Empty) -> Fp8Matrix:
    rows, _ = _sizes(pieces)
    values = _values(pieces, source, empty, FP8)
    if scheme.kind == "fp8_channel":
        row_scales = empty(sum(rows), dtype=torch.float32)
        for view, piece in zip(row_scales.split(rows), pieces, strict=True):
            _fill_scales(view, source, f"{piece.name}.weight_scale", (piece.outputs,), (piece.rows,))
    else:
        row_scales = buffer(sum(rows), dtype=torch.float32)
        scales = _one_each(pieces, "weight_scale", source, empty)
        for view, scale in zip(row_scales.split(rows), scales.split(1), strict=True):
            view.copy_(scale.expand_as(view))
    if not scheme.static:
        return Fp8Matrix(values, row_scales)
    input_scales = _one_each(pieces, "input_scale", source, empty)
    # The largest of the fused tensors', where the first was: one copy of the activations serves all, and none is cut.
    input_scale = input_scales[0]
    input_scale.copy_(input_scales.amax())
    return Fp8Matrix(values, row_scales, input_scale)


def _one_each(pieces: list[Piece], suffix: str, source: WeightSource, empty: Empty) -> torch.Tensor:
    scales = empty(len(pieces), dtype=torch.float32)
    for view, piece in zip(scales.split(1), pieces, strict=True):
        _fill_scales(view, source, f"{piece.name}.{suffix}", (1,))
    return scales


def _fp8_block(scheme: Scheme, method: str, pieces: list[Piece], source: WeightSource, empty: Empty) -> Fp8BlockMatrix:
    assert scheme.block is not None
    tall, wide = scheme.block
    rows, columns = _sizes(pieces)
    for piece in pieces:
        need_whole(piece, "rows", piece.local_rows, piece.outputs, tall, "blocks")
        need_whole(piece, "columns", piece.local_columns, piece.inputs, wide, "blocks")
    for piece, size in zip(pieces[:-1], rows, strict=False):
        if size % tall:  # the next piece's first block would begin within this one's last
            raise UnsupportedModelError(
                f"{piece.name}: {size} rows before those of {pieces[-1].name} are no whole blocks of {tall}; "
                "the engine joins whole blocks only"
            )
    values = _values(pieces, source, empty, FP8)
    counts = [-(-size // tall) for size in rows]
    scales = empty(sum(counts), -(-columns // wide), dtype=torch.float32)
    suffix = "weight_scale_inv" if method == "fp8" else "weight_scale"
    for view, piece in zip(scales.split(counts), pieces, strict=True):
        whole = (-(-piece.outputs // tall), -(-piece.inputs // wide))
        part = (_divided(piece.local_rows, tall), _divided(piece.local_columns, wide))
        _fill_scales(view, source, f"{piece.name}.{suffix}", whole, part)
    return Fp8BlockMatrix(values, scales, scheme.block)


def _nvfp4(scheme: Scheme, method: str, pieces: list[Piece], source: WeightSource, empty: Empty) -> Nvfp4Matrix:
    values_of, scales_of, whole_of, inputs_of = NVFP4_SUFFIXES[method]
    rows, columns = _sizes(pieces)
    for piece in pieces:
        check_groups(piece, NVFP4_GROUP)
    values = empty(sum(rows), columns // 2, dtype=torch.uint8)
    scales = empty(sum(rows), columns // NVFP4_GROUP, dtype=FP8)
    for values_view, scales_view, piece in zip(values.split(rows), scales.split(rows), pieces, strict=True):
        shape, pairs = (piece.outputs, piece.inputs // 2), _divided(piece.local_columns, 2)
        source.fill(values_view, f"{piece.name}.{values_of}", shape, (piece.rows, pairs))
        shape, groups = (piece.outputs, piece.inputs // NVFP4_GROUP), _divided(piece.local_columns, NVFP4_GROUP)
        _fill_scales(scales_view, source, f"{piece.name}.{scales_of}", shape, (piece.rows, groups), positive=False)
    part_scales = _one_each(pieces, whole_of, source, empty)
    input_scales = None if scheme.variant else _one_each(pieces, inputs_of, source, empty)
    if method == "compressed-tensors":  # it divides by them
        part_scales.reciprocal_()
    return Nvfp4Matrix(values, scales, part_scales, input_scales, tuple(rows))


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def check_groups(piece: Piece, group: int) -> None:
    """Each rank's columns must be whole groups."""
    if piece.inputs % group:
        raise UnsupportedModelError(
            f"{piece.name}: {piece.inputs} inputs are no whole groups of {group}; the engine runs whole ones"
        )
    need_whole(piece, "inputs", piece.local_columns, 0, group, "groups")


def empty_mxfp4(empty: Empty, outputs: int, inputs: int, *, experts: int) -> Mxfp4Matrix:
    values = empty(experts, outputs, inputs // 2, dtype=torch.uint8)
    return Mxfp4Matrix(values, empty(experts, outputs, inputs // MXFP4_GROUP, dtype=torch.uint8))


def check_powers(scales: torch.Tensor, name: str, source: WeightSource) -> None:
    """Refuse e8m0 scales that are no numbers: a model of such ones runs, and says anything."""
    if source.dtype_of(name) is not None and bool((scales == NAN_POWER).any()):
        raise InvalidInputError(
            f"{source.place(name)} holds scales that are no numbers ({int((scales == NAN_POWER).sum())} of "
            f"{scales.numel()} are {NAN_POWER}); download it again, or quantize the model anew"
        )


# --- AWQ and GPTQ -----------------------------------------------------------------------------------------------------


def _int4(scheme: Scheme, pieces: list[Piece], source: WeightSource, empty: Empty) -> Int4Matrix:
    rows, columns = _sizes(pieces)
    group = min(scheme.group_size or pieces[0].inputs, pieces[0].inputs)
    for piece in pieces:
        _check_packs(piece, group)
    words = empty(columns // PACK, sum(rows), dtype=torch.int32)
    num_groups = columns // group if group < pieces[0].inputs else 1
    scales = empty(num_groups, sum(rows), dtype=_scale_dtype(pieces, source))
    zeros = empty(num_groups, sum(rows) // PACK, dtype=torch.int32)
    if words.is_meta:  # sizes alone are asked for
        return Int4Matrix(words, scales, zeros)
    views = zip(
        pieces, words.split(rows, 1), scales.split(rows, 1), zeros.split([n // PACK for n in rows], 1), strict=True
    )
    for piece, words_view, scales_view, zeros_view in views:
        whole = (piece.inputs // group, piece.outputs)
        groups = _divided(piece.local_columns, group) if group < piece.inputs else ALL
        _fill_scales(scales_view, source, f"{piece.name}.scales", whole, (groups, piece.rows), positive=False)
        packed_rows = _divided(piece.local_rows, PACK)
        _fill_zeros(zeros_view, scheme, piece, (whole[0], whole[1] // PACK), (groups, packed_rows), source)
        _check_group_order(piece, group, source, words.device)
        words_view.copy_(packed_words(_int4_values(scheme, piece, source, words.device), columns // num_groups))
    return Int4Matrix(words, scales, zeros)


def _packed_int4(scheme: Scheme, pieces: list[Piece], source: WeightSource, empty: Empty, buffer: Empty) -> Int4Matrix:
    """compressed-tensors' words along the inputs, scales by output, and zero points in words along the outputs."""
    rows, columns = _sizes(pieces)
    group = min(scheme.group_size or pieces[0].inputs, pieces[0].inputs)
    for piece in pieces:
        _check_packs(piece, group)
    words = empty(columns // PACK, sum(rows), dtype=torch.int32)
    num_groups = columns // group if group < pieces[0].inputs else 1
    scales = empty(num_groups, sum(rows), dtype=_scale_dtype(pieces, source, "weight_scale"))
    zeros = (empty if scheme.zeros else buffer)(num_groups, sum(rows) // PACK, dtype=torch.int32)
    order = buffer(columns, dtype=torch.int32) if scheme.variant else None
    if words.is_meta:
        return Int4Matrix(words, scales, zeros, order)
    orders = [_input_order(piece, group, source, words.device) for piece in pieces] if scheme.variant else []
    if any(not torch.equal(own, orders[0]) for own in orders):
        names = ", ".join(piece.name for piece in pieces)
        raise UnsupportedModelError(f"{names}: are one layer here, and group their inputs in different orders")
    for own in orders[:1]:
        order.copy_(own)  # type: ignore[union-attr]
    if not scheme.zeros:
        zeros.fill_(EIGHTS)
    views = zip(
        pieces, words.split(rows, 1), scales.split(rows, 1), zeros.split([n // PACK for n in rows], 1), strict=True
    )
    for piece, words_view, scales_view, zeros_view in views:
        _check_shape(piece, source)
        whole = (piece.outputs, piece.inputs // group)
        groups = _divided(piece.local_columns, group) if group < piece.inputs else ALL
        _fill_scales(scales_view.T, source, f"{piece.name}.weight_scale", whole, (piece.rows, groups))
        if scheme.zeros:
            part = (_divided(piece.local_rows, PACK), groups)
            source.fill(zeros_view.T, f"{piece.name}.weight_zero_point", (whole[0] // PACK, whole[1]), part)
        stored = torch.empty(len(piece.local_rows), columns // PACK, dtype=torch.int32, device=words.device)
        part = (piece.rows, _divided(piece.local_columns, PACK))
        source.fill(stored, f"{piece.name}.weight_packed", (piece.outputs, piece.inputs // PACK), part)
        values = unpacked(stored, IN_ORDER)
        values = (values if order is None else values[:, order]).T
        words_view.copy_(packed_words(values, columns // num_groups))
    return Int4Matrix(words, scales, zeros, order)


def _input_order(piece: Piece, group: int, source: WeightSource, device: torch.device) -> torch.Tensor:
    """The inputs of each group one after the other, as g_idx names each input's (actorder)."""
    if len(piece.local_columns) < piece.inputs:
        problem = f"tensor_parallel_size: groups of {piece.name} are of inputs from all over, and ranks share them"
        raise UsageError(f"{problem} as neighbors; use 1")
    index = torch.arange(piece.inputs, dtype=torch.int32, device=device) // group
    name = f"{piece.name}.weight_g_idx"
    if source.dtype_of(name) is not None:
        source.fill(index, name, (piece.inputs,))
    order = index.argsort(stable=True).int()
    if not torch.equal(index[order], torch.arange(piece.inputs, dtype=torch.int32, device=device) // group):
        raise InvalidInputError(f"{source.place(name)} names groups that have not {group} inputs each")
    return order


def _check_shape(piece: Piece, source: WeightSource) -> None:
    """The shape that a checkpoint states beside the words must be the config's."""
    name = f"{piece.name}.weight_shape"
    if source.dtype_of(name) is not None:
        stated = torch.empty(2, dtype=torch.int64)
        source.fill(stated, name, (2,))
        if stated.tolist() != [piece.outputs, piece.inputs]:
            raise InvalidInputError(
                f"{source.place(name)} says {stated.tolist()}, the config [{piece.outputs}, {piece.inputs}]; "
                "weights and config.json do not belong together"
            )


def _scale_dtype(pieces: list[Piece], source: WeightSource, suffix: str = "scales") -> torch.dtype:
    """The scales' own dtype, which the fused layers must have in common: none is rounded."""
    stored = {piece.name: source.dtype_of(f"{piece.name}.{suffix}") or torch.float16 for piece in pieces}
    dtypes = set(stored.values())
    if len(dtypes) > 1 or not dtypes <= set(SCALE_DTYPES):
        names = ", ".join(f"{name}.{suffix} {str(dtype).removeprefix('torch.')}" for name, dtype in stored.items())
        raise UnsupportedModelError(f"{names}: the engine runs 4-bit weights with scales of one 16-bit dtype")
    return dtypes.pop()


def _check_packs(piece: Piece, group: int) -> None:
    """Each rank's part must lie on whole words and whole groups."""
    if piece.inputs % group or piece.outputs % PACK or piece.inputs % PACK:
        raise UnsupportedModelError(
            f"{piece.name}: {piece.outputs} x {piece.inputs} does not divide into groups of {group} inputs and words "
            f"of {PACK} values; the engine runs whole ones"
        )
    need_whole(piece, "outputs", piece.local_rows, 0, PACK, "words")
    need_whole(piece, "inputs", piece.local_columns, 0, PACK, "words")
    if group < piece.inputs:
        need_whole(piece, "inputs", piece.local_columns, 0, group, "groups")


def need_whole(piece: Piece, what: str, share: range, end: int, size: int, units: str) -> None:
    """Refuse a rank's part that cuts through a unit; one that ends where the tensor does (`end`) does not."""
    if share.start % size or (share.stop % size and share.stop != end):
        raise UsageError(
            f"tensor_parallel_size: {what} {share.start} to {share.stop} of {piece.name} cut through the {units} of "
            f"{size} that its quantized weights are stored in; use fewer ranks"
        )


def _divided(share: range, size: int) -> slice:
    return slice(share.start // size, -(-share.stop // size))


def _fill_zeros(
    out: torch.Tensor,
    scheme: Scheme,
    piece: Piece,
    whole: tuple[int, int],
    part: tuple[slice, slice],
    source: WeightSource,
) -> None:
    """Zero points as they are meant, in the order of the outputs."""
    stored = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    source.fill(stored, f"{piece.name}.qzeros", whole, part)
    zeros = unpacked(stored, AWQ_ORDER if scheme.kind == "awq" else IN_ORDER)
    if scheme.kind == "gptq" and scheme.variant != "gptq_v2":
        # Stored less one. What is left of a zero point of 0 differs by packer, and some damaged its neighbors with it.
        if bool((zeros == 15).any()):
            raise InvalidInputError(
                f"{piece.name}.qzeros: holds a zero point of 0 less one, of which the format 'gptq' leaves no certain "
                "trace; convert the checkpoint to 'gptq_v2'"
            )
        zeros = zeros + 1
    out.zero_()
    for j in range(PACK):
        out |= zeros[:, j::PACK].int() << (4 * j)


def _check_group_order(piece: Piece, group: int, source: WeightSource, device: torch.device) -> None:
    """GPTQ's g_idx, where there is one, must say what the group size says."""
    name = f"{piece.name}.g_idx"
    if source.dtype_of(name) is None:
        return
    order = torch.empty(piece.inputs, dtype=torch.int32, device=device)
    source.fill(order, name, (piece.inputs,))
    if not torch.equal(order, torch.arange(piece.inputs, dtype=torch.int32, device=device) // group):
        raise UnsupportedModelError(
            f"{name}: groups inputs in the order of their activations (desc_act); the engine runs groups of {group} "
            "neighbors only"
        )


def _int4_values(scheme: Scheme, piece: Piece, source: WeightSource, device: torch.device) -> torch.Tensor:
    """[inputs, outputs] uint8: the rank's values, 0 to 15."""
    rows, columns = piece.local_rows, piece.local_columns
    name = f"{piece.name}.qweight"
    if scheme.kind == "awq":
        stored = torch.empty(len(columns), len(rows) // PACK, dtype=torch.int32, device=device)
        source.fill(stored, name, (piece.inputs, piece.outputs // PACK), (piece.columns, _divided(rows, PACK)))
        return unpacked(stored, AWQ_ORDER)
    stored = torch.empty(len(columns) // PACK, len(rows), dtype=torch.int32, device=device)
    source.fill(stored, name, (piece.inputs // PACK, piece.outputs), (_divided(columns, PACK), piece.rows))
    values = torch.empty(len(columns), len(rows), dtype=torch.uint8, device=device)
    for j in range(PACK):
        values[j::PACK] = (stored >> (4 * j)) & 15
    return values


def unpacked(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[n, m] int32 -> [n, 8m] uint8: the values along the rows, of which the j-th of a word is nibble order[j]."""
    values = torch.empty(words.shape[0], PACK * words.shape[1], dtype=torch.uint8, device=words.device)
    for j, nibble in enumerate(order):
        values[:, j::PACK] = (words >> (4 * nibble)) & 15
    return values


def packed_words(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """[inputs, outputs] uint8 -> [inputs / 8, outputs] int32 in Int4Matrix's order."""
    runs = values.unflatten(0, (-1, PACK, nibble_run(values.shape[0] // PACK, group_size)))
    words = torch.zeros(runs.shape[0], *runs.shape[2:], dtype=torch.int32, device=values.device)
    for j in range(PACK):
        words |= runs[:, j].int() << (4 * j)
    return words.flatten(0, 1)
