"""What the Triton kernels are tried on in the interpreter: small shapes, odd on purpose.

A case names everything about its inputs; tests/interpreter_run.py builds and judges them. Loads neither torch nor
triton, so that the tests can list the cases.
"""

from dataclasses import dataclass, fields, replace
from itertools import cycle, product

from kvplan.spec import Activation

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
    num_splits: int = 1  # 0: the launcher's choice
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
    num_splits: int = 1
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
class Gate:
    kind: Activation
    dtype: str = "float32"
    inner: int = 1030  # past one block


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


Case = Decode | Prefill | Latent | Store | StoreLatent | Norm | Rotate | Gate | Moe

DTYPES = (("float32", ""), ("float16", ""), ("bfloat16", ""), ("bfloat16", "float8_e4m3fn"))
KINDS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")


def case_id(case: Case) -> str:
    """The kind and every field that is not its default: decode[head_dim=80,num_splits=3]."""
    told = [f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != f.default]
    return f"{type(case).__name__.lower()}[{','.join(told)}]".replace(" ", "")


def _decode() -> list[Case]:
    return [
        *(
            Decode(dtype, stored, head_dim=head_dim, num_splits=splits)
            for (dtype, stored), head_dim, splits in product(DTYPES, (64, 128), (1, 3))
        ),
        *(Decode(heads=heads, kv_heads=1, lens=(1, 37)) for heads in (1, 2, 3, 5, 6, 7, 8)),
        *(Decode(heads=heads, kv_heads=4, lens=(1, 37)) for heads in (4, 32)),
        *(Decode("bfloat16", head_dim=head_dim, num_splits=3, lens=(1, 75)) for head_dim in (80, 96, 256)),
        *(Decode(head_dim=192, head_dim_v=128, num_splits=splits, lens=(17, 75)) for splits in (1, 3)),
        *(Decode(block_size=size, lens=(1, size - 1, size, size + 1, 2 * size)) for size in (32, 64, 128)),
        *(Decode(layout="HND", dtype=dtype, stored=stored) for dtype, stored in DTYPES[:1] + DTYPES[3:]),
        *(Decode(window=window, num_splits=splits) for window, splits in product((1, 16, 65, 200), (1, 3))),
        *(Decode(softcap=20.0, num_splits=splits) for splits in (1, 3)),
        *(Decode(sinks=True, num_splits=splits) for splits in (1, 3)),
        Decode("bfloat16", heads=16, window=24, sinks=True, num_splits=3),
        Decode("float16", window=24, softcap=20.0),
        Decode(num_splits=0, lens=(1, 75)),
        Decode("bfloat16", "float8_e4m3fn", window=24, softcap=20.0, sinks=True, num_splits=2),
    ]


def _prefill() -> list[Case]:
    return [
        *(Prefill(dtype, stored, head_dim=head_dim) for (dtype, stored), head_dim in product(DTYPES, (64, 128))),
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
    ]


def _others() -> list[Case]:
    return [
        *(Latent(dtype, num_splits=splits) for dtype, splits in product(("float32", "bfloat16"), (1, 3))),
        Latent("float16", heads=5, lens=(16, 33)),
        Latent(heads=70, block_size=64, lens=(64, 65)),
        Latent(heads=4, latent_dim=96, rope_dim=8, num_splits=2),
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
        *(Gate(kind, dtype) for kind, dtype in product(KINDS, ("float32", "bfloat16"))),
        *(Moe(dtype) for dtype in ("float32", "float16", "bfloat16")),
        Moe(kind="clamped_swiglu", biases=True),
        Moe(tokens=1, experts=8, top_k=1),
        Moe("bfloat16", tokens=40, experts=2, hidden=64, inner=64, biases=True),
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
    told = [{f.name: getattr(case, f.name) for f in fields(case)} for case in shared]
    return [
        *(Decode(**case, num_splits=splits, lens=(1, 33, 130)) for case in told for splits in (1, 3)),
        *(Prefill(**case, queries=((5, 37), (33, 33))) for case in told),
    ]


CASES: dict[str, Case] = {case_id(case): case for case in (*_decode(), *_prefill(), *_others())}
FULL_CASES: dict[str, Case] = {case_id(case): case for case in _every_combination()}
