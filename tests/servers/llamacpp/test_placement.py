"""Which tensor lies where: worked by hand after llama.cpp's load_tensors (commit 0c1e57098)."""

from dataclasses import replace
from functools import cache

import pytest

from kvplan.core.errors import UsageError
from kvplan.models import catalog
from kvplan.models.ggml_types import tensor_bytes
from kvplan.models.gguf_model import GGUFModel, GGUFTensor, gguf_of
from kvplan.servers.llamacpp.placement import Placement, buffer_bytes, place
from kvplan.servers.llamacpp.settings import MIB, Device, Override, Settings
from kvplan.servers.llamacpp.shape import shape_of

GPU = Device(24_000 * MIB, 23_000 * MIB)
SMALL = replace(GPU, free=11_500 * MIB)


@cache
def model(name: str = "llama-3.1-8b") -> GGUFModel:
    return gguf_of(catalog.load(name))


def placed(settings: Settings, *devices: Device, name: str = "llama-3.1-8b") -> Placement:
    return place(model(name), shape_of(model(name)), settings, devices)


def where(placement: Placement, tensor: str) -> list[int | None]:
    return [position for entry, position in placement.tensors if entry.name == tensor]


def test_the_embedding_stays_on_the_host() -> None:
    assert where(placed(Settings(), GPU), "token_embd.weight") == [None]
    assert where(placed(Settings(), GPU), "output.weight") == [0]


def test_a_tied_output_is_stored_twice() -> None:
    tied = placed(Settings(), GPU, name="llama-3.2-1b")
    assert where(tied, "token_embd.weight") == [None, 0]
    assert where(placed(Settings(gpu_layers=0), GPU, name="llama-3.2-1b"), "token_embd.weight") == [None]


def test_layers_go_to_the_device_from_the_last_on_and_the_output_is_one() -> None:
    """Of 32 layers and the output, 10: layers 23 to 31 and the output."""
    placement = placed(Settings(gpu_layers=10), GPU)
    assert placement.layers == (None,) * 23 + (0,) * 9
    assert placement.output == 0


def test_devices_take_layers_by_their_free_memory() -> None:
    """33 in all, two thirds of 33 are 22."""
    assert placed(Settings(), GPU, SMALL).layers == (0,) * 22 + (1,) * 10


def test_devices_take_layers_by_stated_shares() -> None:
    """A quarter of 33 is 8.25: layers 0 to 8."""
    assert placed(Settings(split=(1, 3)), GPU, SMALL).layers == (0,) * 9 + (1,) * 23


def test_one_device_takes_all_without_a_split() -> None:
    placement = placed(Settings(split_mode="none", main_gpu=1), GPU, SMALL)
    assert placement.devices == (1,)
    assert set(placement.layers) == {0}


def test_the_first_pattern_that_matches_decides() -> None:
    rules = (Override(r"blk\.1\.ffn_up", None), Override("ffn_up", 1))
    placement = placed(Settings(overrides=rules), GPU, SMALL)
    assert where(placement, "blk.1.ffn_up.weight") == [None]
    assert where(placement, "blk.2.ffn_up.weight") == [1]
    assert where(placement, "blk.2.ffn_down.weight") == [0]


def test_layers_that_only_drafts_need_are_not_loaded() -> None:
    placement = placed(Settings(), GPU, name="glm-4.5-air")
    assert where(placement, "blk.46.attn_q.weight") == []
    assert where(placement, "blk.45.attn_q.weight") == [0]


def test_a_quantized_row_is_padded_once_on_a_device() -> None:
    """Rows of 3,328 elements lack 256 to a multiple of 512: one block of 144 bytes, then aligned to 128."""
    tensor = GGUFTensor("x", (3328, 10), "Q4_K", tensor_bytes("Q4_K", (3328, 10)))
    assert tensor.nbytes == 18_720
    assert buffer_bytes(tensor, 0) == 18_944  # 18,864 up to a multiple of 128
    assert buffer_bytes(tensor, None) == 18_720


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(split_mode="row"), "-sm row: CUDA devices have no split buffers in this llama.cpp; use -sm layer"),
        (Settings(split_mode="none", main_gpu=2), "-mg 2: there are 2 devices, numbered from 0"),
        (Settings(overrides=(Override("(", None),)), "-ot '(' is not a regular expression"),
    ],
)
def test_what_the_server_refuses_is_refused_by_name(settings: Settings, words: str) -> None:
    with pytest.raises(UsageError) as error:
        placed(settings, GPU, SMALL)
    assert str(error.value).startswith(words)
