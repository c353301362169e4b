"""What the Triton kernels are tried on in the interpreter: small shapes, odd on purpose.

A case names everything about its inputs; interpreter_run.py builds and judges them. Loads neither torch nor
triton, so that the tests can list the cases.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import cycle, product
from typing import Literal

from kvplan.models.spec import Activation

# One slot, a block less one, a block, one more, several blocks, several KV tiles; 0 pads a CUDA graph's batch.
CONTEXT_LENS = (1, 15, 16, 17, 75, 130, 0)
# (queries of this step, context after it): alone, a whole block, one more, after a prefix, one query, padding
QUERIES = ((1, 1), (16, 16), (17, 17), (5, 37), (40, 130), (1, 75), (0, 0))


@dataclass(frozen=True, slots=True)
class Attention:
    """Inputs that decode and prefill have in common."""

    dtype: str = "float32"
    stored: str = ""  # "": as dtype
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 0  # 0: as head_dim
    block_size: int = 16
    layout: str = "NHD"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Decode(Attention):
    chunk: int = 0  # tokens of an item, a multiple of every tile; 0: the launcher's own plan
    lens: tuple[int, ...] = CONTEXT_LENS


@dataclass(frozen=True, slots=True)
class Prefill(Attention):
    queries: tuple[tuple[int, int], ...] = QUERIES


@dataclass(frozen=True, slots=True)
class Latent:
    dtype: str = "float32"
    heads: int = 16
    latent_dim: int = 512
    rope_dim: int = 64
    block_size: int = 16
    chunk: int = 0
    lens: tuple[int, ...] = (1, 17, 75, 0)


@dataclass(frozen=True, slots=True)
class Store:
    dtype: str = "float32"
    stored: str = ""
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 0
    block_size: int = 16
    layout: str = "NHD"


@dataclass(frozen=True, slots=True)
class StoreLatent:
    dtype: str = "float32"
    stored: str = ""
    width: int = 576


@dataclass(frozen=True, slots=True)
class Norm:
    dtype: str = "float32"
    shape: tuple[int, ...] = (3, 96)
    residual: bool = False
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class Rotate:
    dtype: str = "float32"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class RotateStore(Store):
    heads: int = 4
    rotary_dim: int = 64
    interleaved: bool = False
    norm: bool = False
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    kind: Activation
    dtype: str = "float32"
    inner: int = 1030  # past one block


@dataclass(frozen=True, slots=True)
class Route:
    """Which experts tokens go to: apart, as good as one another, of 0, no number."""

    dtype: str = "float32"
    experts: int = 16
    top_k: int = 4
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = False
    scale: float = 1.0
    nan: bool = False  # one logit of the last token is none


@dataclass(frozen=True, slots=True)
class Group:
    """Rows by their experts, of which some have none and one has most."""

    tokens: int = 5
    experts: int = 8
    top_k: int = 2
    block_m: int = 16
    ids: str = "int64"


@dataclass(frozen=True, slots=True)
class Moe:
    dtype: str = "float32"
    tokens: int = 5
    experts: int = 4
    top_k: int = 2
    hidden: int = 96
    inner: int = 40
    kind: Activation = "silu"
    biases: bool = False
    stored: str = ""  # how the matrices are; "": in dtype


@dataclass(frozen=True, slots=True)
class Lora:
    """What adapters add to a fused product: tokens of three adapters in turn and of none, in strided tensors."""

    dtype: str = "float32"
    tokens: int = 7
    inputs: int = 96
    outputs: tuple[int, ...] = (48, 80, 17)
    ranks: tuple[int, ...] = (16, 3, 8)  # of slots for 16
    first: int = -1  # the first token's slot; -1: none


@dataclass(frozen=True, slots=True)
class Int4:
    """Products with 4-bit weights: groups 1 is one scale for each output."""

    dtype: str = "float32"
    tokens: int = 5
    inputs: int = 256
    outputs: int = 40
    groups: int = 2
    scales: str = "float16"
    num_splits: int = 1


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Products with 4-bit weights in groups of 16, of one tensor or of several fused ones."""

    dtype: str = "float32"
    tokens: int = 5
    inputs: int = 208
    parts: tuple[int, ...] = (40, 24, 9)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations rounded to fp8, and with outputs their product with fp8 weights."""

    dtype: str = "float32"
    tokens: int = 5
    inputs: int = 80
    outputs: int = 0  # 0: the rounding alone
    has_scale: bool = False  # one scale for all rows
    nan: bool = False  # one number of the last row is none


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """Products with fp8 weights in blocks of (outputs, inputs)."""

    dtype: str = "float32"
    tokens: int = 5
    inputs: int = 256
    outputs: int = 40
    block: tuple[int, int] = (128, 128)
    num_splits: int = 0  # 0: the launcher's own
    nan: bool = False  # one weight of the last output is not a number


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens drawn: of all rows or of some, others' temperature being 0; with floors only a few may come."""

    dtype: str = "float32"
    vocab: int = 50
    some: bool = False
    floors: bool = False
    spread: float = 3.0  # of the logits; 0: all tokens are as likely
    nan: bool = False  # the last row is not of numbers


@dataclass(frozen=True, slots=True)
class Nucleus:
    """What top_k and top_p keep: of all rows or of some, others being left whole."""

    dtype: str = "float32"
    vocab: int = 50
    some: bool = False
    spread: float = 3.0  # of the logits; 0: all tokens are as likely
    bad: bool = False  # the last rows are not of numbers, or all -inf


@dataclass(frozen=True, slots=True)
class Best:
    """The best token of rows: apart, the same one several times, infinite, no number."""

    dtype: str = "float32"
    vocab: int = 50


Case = (
    Decode
    | Prefill
    | Latent
    | Store
    | StoreLatent
    | Norm
    | Rotate
    | RotateStore
    | Gate
    | Route
    | Group
    | Moe
    | Lora
    | Int4
    | Nvfp4
    | Fp8Rows
    | Fp8Block
    | Draw
    | Nucleus
    | Best
)

DTYPES = (("float32", ""), ("float16", ""), ("bfloat16", ""), ("bfloat16", "float8_e4m3fn"))
KINDS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")


def case_id(case: Case) -> str:
    """The kind and every field that is not its default: decode[head_dim=80,chunk=64]."""
    changes = [f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != f.default]
    return f"{type(case).__name__.lower()}[{','.join(changes)}]".replace(" ", "")


def _decode() -> list[Case]:
    return [
        *(
            Decode(dtype, stored, head_dim=head_dim, chunk=chunk)
            for (dtype, stored), head_dim, chunk in (*product(DTYPES, (64,), (0, 64)), (DTYPES[2], 128, 64))
        ),
        *(Decode(heads=heads, kv_heads=1, lens=(1, 37)) for heads in (1, 2, 3, 5, 6, 7, 8)),
        *(Decode(heads=heads, kv_heads=4, lens=(1, 37)) for heads in (4, 32)),
        *(Decode("bfloat16", head_dim=head_dim, chunk=64, lens=(1, 75)) for head_dim in (80, 96, 256)),
        *(Decode(head_dim=192, head_dim_v=128, chunk=chunk, lens=(17, 75)) for chunk in (0, 64)),
        *(Decode(block_size=size, lens=(1, size - 1, size, size + 1, 2 * size)) for size in (32, 64, 128)),
        *(Decode(layout="HND", dtype=dtype, stored=stored) for dtype, stored in DTYPES[:1] + DTYPES[3:]),
        *(Decode(window=window, chunk=chunk) for window, chunk in product((1, 16, 65, 200), (0, 64))),
        *(Decode(softcap=20.0, chunk=chunk) for chunk in (0, 64)),
        *(Decode(sinks=True, chunk=chunk) for chunk in (0, 64)),
        Decode("bfloat16", heads=16, window=90, sinks=True, chunk=64),
        Decode("float16", window=24, softcap=20.0),
        Decode(kv_heads=1, lens=(300,)),  # three items of at least 128 tokens: what a device of one processor runs
        Decode(chunk=32, lens=(900, 31)),  # more parts than are merged at once
        Decode("bfloat16", "float8_e4m3fn", window=24, softcap=20.0, sinks=True, chunk=64),
        # Values of odd heads are read one by one, of others two by two.
        *(Decode("float16", "float8_e4m3fn", head_dim=d, chunk=64, lens=(1, 75)) for d in (16, 33, 80, 256)),
        Decode("float32", "float8_e4m3fn", head_dim=192, head_dim_v=128, lens=(17, 75)),
        *(Decode("bfloat16", "float8_e4m3fn", block_size=n, lens=(1, n - 1, n, n + 1, 2 * n)) for n in (32, 64, 128)),
    ]


def _prefill() -> list[Case]:
    return [
        *(Prefill(dtype, stored) for dtype, stored in DTYPES),
        Prefill("bfloat16", head_dim=128),
        *(Prefill(heads=heads, kv_heads=1, queries=((5, 37), (33, 33))) for heads in (1, 2, 3, 5, 6, 7, 8)),
        *(Prefill("bfloat16", head_dim=head_dim, queries=((5, 37), (17, 75))) for head_dim in (80, 96, 256)),
        Prefill(head_dim=192, head_dim_v=128, queries=((5, 37), (17, 75))),
        *(Prefill(block_size=size, queries=((size - 1, size - 1), (9, size + 1))) for size in (32, 64, 128)),
        *(Prefill(layout="HND", dtype=dtype, stored=stored) for dtype, stored in DTYPES[:1] + DTYPES[3:]),
        *(Prefill(window=window) for window in (1, 16, 65, 200)),
        Prefill(softcap=20.0),
        Prefill(sinks=True),
        Prefill("bfloat16", window=24, sinks=True),
        Prefill("float16", window=24, softcap=20.0),
        Prefill("bfloat16", "float8_e4m3fn", window=24, softcap=20.0, sinks=True),
        # Tiles within a page of a GPU that copies them whole
        Prefill("bfloat16", block_size=64, window=24, sinks=True),
        Prefill("bfloat16", "float8_e4m3fn", block_size=128, layout="HND", queries=((17, 300), (5, 37), (0, 0))),
        Prefill("float16", head_dim=128, head_dim_v=64, block_size=64, queries=((17, 150), (5, 64))),
    ]


def _others() -> list[Case]:
    return [
        *(Latent(dtype, chunk=chunk) for dtype, chunk in product(("float32", "bfloat16"), (0, 32))),
        Latent("float16", heads=5, lens=(16, 33)),
        Latent("bfloat16", heads=5, chunk=48, lens=(75,)),  # an item that begins within a tile
        Latent(heads=70, block_size=64, lens=(64, 65)),
        Latent(heads=4, latent_dim=96, rope_dim=8, chunk=32),
        Latent(lens=(0, 300)),
        *(Store(dtype, stored) for dtype, stored in DTYPES),
        *(Store(dtype, "float8_e4m3fn") for dtype in ("float32", "float16")),
        *(Store(dtype, stored, layout="HND") for dtype, stored in DTYPES[2:]),
        Store("float32", "bfloat16", kv_heads=3, head_dim=80),
        Store("bfloat16", kv_heads=1, head_dim=192, head_dim_v=128, block_size=64),
        *(StoreLatent(dtype) for dtype in ("float32", "bfloat16")),
        StoreLatent("float32", "bfloat16", width=40),
        *(
            Norm(dtype, residual=residual, unit_offset=offset)
            for dtype, residual, offset in product(("float32", "float16", "bfloat16"), (False, True), (False, True))
        ),
        Norm("bfloat16", shape=(5, 3, 80)),
        Norm("bfloat16", shape=(5, 3, 80), residual=True),
        Norm(shape=(2, 2880), residual=True),
        Norm(shape=(70, 1, 64), unit_offset=True),
        *(
            Rotate(dtype, interleaved=interleaved)
            for dtype, interleaved in product(("float32", "float16", "bfloat16"), (False, True))
        ),
        *(Rotate(head_dim=80, rotary_dim=40, interleaved=interleaved) for interleaved in (False, True)),
        Rotate(heads=33, kv_heads=1, head_dim=256, rotary_dim=256),
        *(RotateStore(dtype, stored, norm=norm) for (dtype, stored), norm in product(DTYPES, (False, True))),
        RotateStore("bfloat16", layout="HND", interleaved=True),
        RotateStore("float32", "bfloat16", kv_heads=3, heads=6, head_dim=80, rotary_dim=32, norm=True),
        RotateStore(
            "bfloat16", "float8_e4m3fn", head_dim=80, rotary_dim=40, interleaved=True, norm=True, unit_offset=True
        ),
        RotateStore("bfloat16", heads=33, kv_heads=1, head_dim=192, head_dim_v=128, rotary_dim=192, block_size=64),
        RotateStore("float16", heads=2, kv_heads=40, rotary_dim=2),
        *(Gate(kind, dtype) for kind, dtype in product(KINDS, ("float32", "bfloat16"))),
        *(Route(dtype, renormalize=True) for dtype in ("float32", "float16", "bfloat16")),
        Route(experts=1, top_k=1),
        Route("bfloat16", experts=60, top_k=4),  # Qwen1.5-MoE
        Route("bfloat16", experts=160, top_k=6, groups=8, top_groups=3, scale=16.0),  # DeepSeek-V2
        Route("bfloat16", 256, 8, "sigmoid", True, 8, 4, renormalize=True, scale=2.5),  # DeepSeek-V3
        Route("bfloat16", experts=512, top_k=10, renormalize=True),  # Qwen3-Next
        Route(experts=12, top_k=12, scoring="sigmoid", correction=True),  # all of them
        Route(experts=30, top_k=4, groups=3, top_groups=2, correction=True, scoring="sigmoid"),
        Route(experts=12, top_k=4, groups=6, top_groups=2, correction=True),  # all of each group
        Route(nan=True),
        Route("bfloat16", 32, 4, "sigmoid", True, 4, 2, renormalize=True, nan=True),
        *(Group(tokens, experts, top_k) for tokens, experts, top_k in ((1, 1, 1), (1, 8, 1), (5, 8, 2), (33, 100, 7))),
        *(Group(tokens=tokens, block_m=128, ids=ids) for tokens in (1024, 1025) for ids in ("int32", "int64")),
        Group(tokens=700, experts=40, top_k=6, block_m=64),
        *(Moe(dtype) for dtype in ("float32", "float16", "bfloat16")),
        Moe(kind="clamped_swiglu", biases=True),
        Moe(tokens=1, experts=8, top_k=1),
        *(Moe(dtype, inner=64, stored="mxfp4") for dtype in ("float32", "float16", "bfloat16")),
        Moe("bfloat16", tokens=40, experts=2, hidden=160, inner=96, biases=True, stored="mxfp4"),
        Moe(kind="clamped_swiglu", hidden=32, inner=32, biases=True, stored="mxfp4"),
        *(Moe(dtype, hidden=208, inner=160, stored="fp8") for dtype in ("float32", "bfloat16")),
        Moe("bfloat16", tokens=40, experts=2, hidden=64, inner=64, biases=True, stored="fp8"),
        *(Moe(dtype, hidden=80, inner=48, stored="nvfp4") for dtype in ("float32", "bfloat16")),
        Moe("bfloat16", tokens=40, experts=2, hidden=64, inner=64, biases=True, stored="nvfp4"),
        *(Nvfp4(dtype, tokens) for dtype in ("float32", "float16", "bfloat16") for tokens in (1, 70)),
        Nvfp4("bfloat16", tokens=17, inputs=80, parts=(7,)),
        *(Moe("float16", inner=64, stored=stored) for stored in ("fp8", "fp8 as bytes")),
        Moe("bfloat16", tokens=40, experts=2, hidden=64, inner=64, biases=True),
        *(Lora(dtype) for dtype in ("float32", "float16", "bfloat16")),
        Lora(tokens=1),
        Lora("bfloat16", tokens=1, inputs=72, outputs=(64,), first=1),
        Lora(tokens=33, inputs=40, outputs=(3,), ranks=(1, 16, 2)),
        Lora("bfloat16", tokens=530, inputs=128, outputs=(64, 3)),  # in tiles of 64
        *(Int4(dtype) for dtype in ("float32", "float16", "bfloat16")),
        *(Int4("bfloat16", inputs=512, groups=groups) for groups in (1, 2, 16, 64)),  # of 512, 256, 32 and 8 inputs
        *(Int4(inputs=inputs, groups=groups) for inputs, groups in ((8, 1), (96, 3), (208, 1), (272, 2), (384, 8))),
        # A nibble's inputs: 64, in groups of 128 and 192; 32, of 96; 16, of 16 and all; an eighth of all, of 24
        *(Int4("bfloat16", inputs=i, groups=g) for i, g in ((1024, 8), (1536, 8), (768, 8), (384, 24), (640, 1))),
        *(Int4("bfloat16", tokens=70, inputs=i, groups=g) for i, g in ((1024, 4), (192, 8), (2048, 2))),
        *(Int4(tokens=tokens, outputs=outputs) for tokens, outputs in ((1, 8), (16, 64), (17, 72), (70, 136))),
        *(Int4(dtype, inputs=640, num_splits=splits) for dtype in ("float32", "bfloat16") for splits in (2, 3, 99)),
        Int4("float16", scales="bfloat16", tokens=130, outputs=136),
        *(
            Fp8Rows(dtype, has_scale=has_scale)
            for dtype in ("float32", "float16", "bfloat16")
            for has_scale in (False, True)
        ),
        Fp8Rows("bfloat16", inputs=5000),
        *(
            Fp8Rows(dtype, outputs=48, has_scale=has_scale)
            for dtype in ("float32", "bfloat16")
            for has_scale in (False, True)
        ),
        Fp8Rows("float16", outputs=32),
        *(Fp8Rows("bfloat16", has_scale=has_scale, nan=True) for has_scale in (False, True)),
        *(Fp8Rows("bfloat16", outputs=48, has_scale=has_scale, nan=True) for has_scale in (False, True)),
        Fp8Rows("bfloat16", inputs=72, outputs=40),  # of widths that fp8 products do not take: weights are widened
        *(Fp8Block(dtype, tokens) for dtype in ("float32", "float16", "bfloat16") for tokens in (1, 17, 70)),
        *(Fp8Block(dtype, inputs=208, outputs=137) for dtype in ("float32", "bfloat16")),  # the last blocks are cut off
        Fp8Block("bfloat16", inputs=16, outputs=3),
        Fp8Block("bfloat16", tokens=514, inputs=96, outputs=136),
        *(
            Fp8Block("bfloat16", tokens, inputs=144, outputs=100, block=block)
            for tokens in (5, 70)
            for block in ((64, 32), (32, 64), (16, 1000), (1000, 96))
        ),
        *(Fp8Block(dtype, inputs=656, num_splits=splits) for dtype in ("float32", "bfloat16") for splits in (2, 3, 99)),
        *(Fp8Block("bfloat16", tokens, inputs=400, num_splits=2, nan=True) for tokens in (5, 70)),
        # Weights are widened first: of many tokens, in odd rows, and in blocks that no tile lies within.
        Fp8Block(tokens=96),
        Fp8Block(inputs=200),
        *(Fp8Block(outputs=7, block=block) for block in ((1, 128), (128, 16), (1, 1))),
        *(Draw(vocab=vocab, floors=floors) for vocab in (1, 50, 4096, 4097, 20_000) for floors in (False, True)),
        *(Draw(vocab=vocab, some=True, floors=floors) for vocab in (50, 9000) for floors in (False, True)),
        *(Draw(vocab=9000, spread=spread) for spread in (0.0, 60.0)),
        *(Draw(vocab=9000, floors=floors, nan=True) for floors in (False, True)),
        *(Draw(dtype, vocab=5000, floors=floors) for dtype in ("float16", "bfloat16") for floors in (False, True)),
        *(Nucleus(dtype) for dtype in ("float32", "float16", "bfloat16")),
        *(Nucleus(dtype, some=True) for dtype in ("float32", "bfloat16")),
        *(Nucleus(vocab=vocab) for vocab in (1, 2, 4097)),
        Nucleus("bfloat16", vocab=9000),  # in which hundreds of tokens are equal
        *(Nucleus(spread=spread) for spread in (0.0, 1e-3, 60.0)),
        *(Nucleus(dtype, bad=True) for dtype in ("float32", "bfloat16")),
        *(Best(vocab=vocab) for vocab in (1, 50, 4096, 4097, 20_000)),
        *(Best(dtype, vocab=5000) for dtype in ("float16", "bfloat16")),
    ]


def _every_combination() -> list[Case]:
    """Dtypes, head sizes and features against each other, with 1, 3 and 8 query heads per KV head in turn."""
    features = (
        Attention(),
        Attention(window=24),
        Attention(softcap=20.0),
        Attention(sinks=True),
        Attention(window=65, softcap=20.0, sinks=True),
    )
    combinations = product(features, DTYPES, ((64, 16), (80, 32), (96, 16), (128, 64), (256, 16)))
    shared = [
        replace(feature, dtype=dtype, stored=stored, heads=heads, head_dim=head_dim, block_size=block_size)
        for (feature, (dtype, stored), (head_dim, block_size)), heads in zip(combinations, cycle((2, 6, 16)))
    ]
    field_values = [{f.name: getattr(case, f.name) for f in fields(case)} for case in shared]
    return [
        *(Decode(dtype, stored, head_dim=128, chunk=chunk) for dtype, stored in DTYPES for chunk in (0, 64)),
        *(Prefill(dtype, stored, head_dim=128) for dtype, stored in DTYPES),
        *(Decode(**case, chunk=chunk, lens=(1, 33, 130)) for case in field_values for chunk in (0, 64)),
        *(Prefill(**case, queries=((5, 37), (33, 33))) for case in field_values),
    ]


def covering(cases: Iterable[Case]) -> Iterator[Case]:
    """Of each kind, in order, the cases with a feature that no case before had; all sizes but the default are alike."""
    seen: set[tuple[type, str, object]] = set()
    for case in cases:
        values = [(f, getattr(case, f.name)) for f in fields(case) if f.name not in ("lens", "queries")]
        features = {
            (type(case), f.name, value if isinstance(value, str) else value == f.default) for f, value in values
        }
        if not features <= seen:
            yield case
        seen |= features


CASES: dict[str, Case] = {case_id(case): case for case in (*_decode(), *_prefill(), *_others())}
IN_EVERY_RUN = frozenset(map(case_id, covering(CASES.values())))
FULL_CASES: dict[str, Case] = {case_id(case): case for case in _every_combination()}
