"""Parts of a layer that the model's own tests reach on one kind of device only."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine import layers
from engine.kernels import torch_backend
from engine.layers import efficient_attention, last_queries_attend
from engine.memory import PeakMeter
from tests.support.small_engines import engine_for, greedy, random_tokens

SHAPES = [(1, 1), (7, 7), (1, 9), (4, 9), (8, 9)]  # queries, tokens of their context


def problem(query_len: int, context_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys of 24 elements, values of 16: as MLA's are."""
    source = torch.Generator().manual_seed(query_len)
    sizes = ((query_len, 24), (context_len, 24), (context_len, 16))
    q, k, v = (torch.randn(1, 3, *size, generator=source) for size in sizes)
    return q, k, v


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Query by query, each with the keys up to its own."""
    hidden = k.shape[2] - q.shape[2]
    rows = []
    for i in range(q.shape[2]):
        weights = (0.3 * q[:, :, i, None] @ k[:, :, : hidden + i + 1].mT).softmax(-1)
        rows.append(weights @ v[:, :, : hidden + i + 1])
    return torch.cat(rows, 2)


@pytest.mark.parametrize(("query_len", "context_len"), SHAPES)
def test_the_last_queries_of_a_context_see_what_comes_before_them(query_len: int, context_len: int) -> None:
    q, k, v = problem(query_len, context_len)
    assert torch.allclose(last_queries_attend(q, k, v, 0.3), by_hand(q, k, v), atol=1e-6)


class OnGpu(torch.Tensor):
    """A tensor that calls itself a GPU's."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.mark.parametrize(("width", "named"), [(24, True), (22, False)])
def test_a_gpu_is_told_one_kernel_where_that_takes_the_widths(
    width: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def efficient(q: torch.Tensor, *_: Any) -> torch.Tensor:
        calls.append("efficient")
        return q

    def any_kernel(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append("any")
        return q

    monkeypatch.setattr(layers, "efficient_attention", efficient)
    monkeypatch.setattr(F, "scaled_dot_product_attention", any_kernel)
    monkeypatch.setattr(torch, "arange", lambda *args, **_: torch.tensor(list(range(*args))))
    q, k, v = problem(4, 9)
    last_queries_attend(q[..., :width].as_subclass(OnGpu), k[..., :width], v, 0.3)
    assert calls == ["efficient" if named else "any"]


def test_the_kernel_is_called_as_torch_has_it() -> None:
    """On the meta device its arguments are checked and the result has a shape; nothing is computed."""
    q, k, v = (x.to("meta") for x in problem(4, 9))
    assert efficient_attention(q, k, v, 0.3).shape == (1, 3, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("query_len", "context_len"), [(600, 600), (600, 601), (77, 2000), (1, 40)])
def test_a_gpu_agrees_with_float64(dtype: torch.dtype, query_len: int, context_len: int) -> None:
    """With DeepSeek's widths, 192 and 128."""
    source = torch.Generator().manual_seed(1)
    sizes = ((query_len, 192), (context_len, 192), (context_len, 128))
    q, k, v = (torch.randn(1, 4, *size, generator=source).to(dtype) for size in sizes)
    output = last_queries_attend(q.cuda(), k.cuda(), v.cuda(), 192**-0.5).cpu()
    exact = last_queries_attend(q.double(), k.double(), v.double(), 192**-0.5)
    unit = {torch.float32: 2.0**-14, torch.bfloat16: 2.0**-7}[dtype]  # two roundings of weights and of the result
    spread = last_queries_attend(q.double(), k.double(), v.double().abs(), 192**-0.5)
    assert ((output.double() - exact).abs() <= unit * spread).all()


@pytest.mark.gpu
def test_no_mask_and_no_scores_are_held_on_a_gpu() -> None:
    q, k, v = (torch.zeros(1, 4, n, width, dtype=torch.bfloat16, device="cuda") for n, width in
               ((4096, 192), (8192, 192), (8192, 128)))  # fmt: skip
    last_queries_attend(q, k, v, 0.1)
    with PeakMeter(q.device) as meter:
        last_queries_attend(q, k, v, 0.1)
    # The result, and its sum in float32: a mask would be 32 MiB, and 64 more as numbers.
    assert meter.peak <= 4 * 4096 * 128 * (2 + 4) + 2**10


def test_decodes_and_prefills_of_a_step_are_written_where_the_output_projection_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for("llama")
    first, second = random_tokens(9, 14)
    engine.add_request(first, greedy(4))
    engine.step()
    engine.add_request(second, greedy(4))
    layer: Any = engine.runner.model.layers[0].attention
    places: list[int] = []
    project, decode, prefill = layer.o_proj, torch_backend.paged_decode, torch_backend.paged_prefill

    def read(x: torch.Tensor) -> Any:
        places.append(x.data_ptr())
        return project(x)

    def decoded(*args: Any, out: torch.Tensor, **more: Any) -> torch.Tensor:
        places.append(out.data_ptr())
        return decode(*args, out=out, **more)

    def prefilled(*args: Any, out: torch.Tensor, **more: Any) -> torch.Tensor:
        places.append(out.data_ptr() - out[0].nbytes)  # after the one row of the first
        return prefill(*args, out=out, **more)

    monkeypatch.setattr(layer, "o_proj", read)
    monkeypatch.setattr(torch_backend, "paged_decode", decoded)
    monkeypatch.setattr(torch_backend, "paged_prefill", prefilled)
    engine.step()
    assert len(set(places[:3])) == 1  # the first layer's decode, prefill and projection
