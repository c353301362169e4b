"""The largest image, video or audio item that a model's processor makes, as vLLM counts it: tokens, patches, tiles.

vLLM budgets its encoder by the largest item of each enabled modality. Its size follows from the model's config.json and
from the processor's settings, which are not in config.json: constants here are those of the families' published
checkpoints; files in a model's folder override them, and --mm-processor-kwargs override those. Every number equals that
of vLLM 0.33's own processors, built from the same values (tests/facts/encoder_budgets.jsonl and processor_files.jsonl).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import lru_cache
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.servers.releases import Version
from kvplan.servers.words.item_limits import Limit

SOURCE: Final = "vLLM 0.33 multimodal/encoder_budget.py and its models' get_mm_max_tokens_per_item"


@dataclass(frozen=True, slots=True)
class Item:
    """The largest item of one modality.

    tokens   counted against the budget
    patches  tower patches of the profiled item, 0 if unknown
    width    elements per token of the tower's output; 0: the language model's hidden size
    made     tokens of the profiled item, if fewer than counted
    """

    tokens: int
    patches: int
    width: int = 0
    made: int = 0


@dataclass(frozen=True, slots=True)
class Processor:
    """Inputs to the sizes besides the model: its context, the release, limits and processor settings."""

    config: Mapping[str, Any]
    context: int
    release: Version
    limits: Mapping[str, Limit]
    kwargs: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)  # in the model's folder

    def limit(self, name: str) -> Limit:
        return self.limits.get(name, Limit())

    def scoped(self, scope: str) -> dict[str, Any]:
        """Requested processor settings of one modality: flat ones, overridden by those of its own scope."""
        flat = {key: value for key, value in self.kwargs.items() if not key.endswith("_kwargs")}
        own = self.kwargs.get(scope)
        return {**flat, **(own if isinstance(own, Mapping) else {})}

    def filed(self, scope: str) -> Mapping[str, Any]:
        """Settings of one modality in the model's folder."""
        own = self.files.get(scope)
        return own if isinstance(own, Mapping) else {}

    def settings(self, scope: str) -> dict[str, Any]:
        """Settings of one modality: those of the model's folder, overridden by requested ones."""
        return {**self.filed(scope), **self.scoped(scope)}

    def area(self, scope: str, usual: tuple[int, int]) -> tuple[int, int]:
        """(least, most) pixels: as requested, else from the model's folder, else usual."""
        return area(self.scoped(scope), *area(self.filed(scope), *usual, where=FILE))

    def limit_of_patches(self, usual: int) -> int:
        """Most patches that Kimi's processors make of an image."""
        media = self.filed("images_kwargs").get("media_proc_cfg")
        return count_of(media if isinstance(media, Mapping) else {}, "in_patch_limit", usual, FILE)

    @property
    def marks(self) -> bool:
        """True if separator tokens between an item's embeddings count too."""
        return self.release.has("items_by_batch") and not self.release.has("embeddings_counted")

    def vision(self, name: str, default: int) -> int:
        """Return a number from the vision tower's config."""
        values = self.config.get("vision_config")
        return count_in(values if isinstance(values, Mapping) else {}, name, default)

    def number(self, name: str, default: int) -> int:
        """Return a number from the model's own config."""
        return count_in(self.config, name, default)


def count_in(values: Mapping[str, Any], name: str, default: int) -> int:
    """Return a positive whole number from a config, or the default."""
    value = values.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


FLAG: Final = "--mm-processor-kwargs"
FILE: Final = "preprocessor_config.json"
NESTED: Final = "processor_config.json"


MOST_COUNT: Final = 10**10  # pixels or patches: an image of 100,000 by 100,000
MOST_TILES: Final = 1_000


def count_of(
    values: Mapping[str, Any], name: str, default: int, where: str = FLAG, largest: int = MOST_COUNT
) -> int:  # fmt: skip
    """Return a positive count from the processor's settings."""
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(where, f"{name} is not a positive count ({value!r})", "correct it")
    if value > largest:
        raise UsageError(where, f"{name} is beyond what can be sized ({value:,})", f"at most {largest:,} is")
    return value


# --- Qwen's resizing ------------------------------------------------------------------------------------------------


def area(settings: Mapping[str, Any], shortest: int, longest: int, where: str = FLAG) -> tuple[int, int]:
    """(least, most) pixels of an image: `size`, overridden by min_pixels and max_pixels."""
    size = settings.get("size")
    size = size if isinstance(size, Mapping) else {}
    low = count_of(settings, "min_pixels", count_of(size, "shortest_edge", shortest, where), where)
    high = count_of(settings, "max_pixels", count_of(size, "longest_edge", longest, where), where)
    return low, high


def widest(pixels: int, unit: int) -> tuple[int, int]:
    """(height, width) with the most tokens of `unit` x `unit` pixels for an area, with an aspect ratio of at most 200.

    Source: vLLM 0.33 qwen2_vl.py (get_image_size_with_most_features).
    """
    for tokens in range(max(1, pixels // unit**2), 0, -1):
        short = next(d for d in range(math.isqrt(tokens), 0, -1) if tokens % d == 0)
        if tokens // short <= 200 * short:
            return unit * short, unit * (tokens // short)
    return unit, unit


def resized(height: int, width: int, unit: int, low: int, high: int, frames: int = 1) -> tuple[int, int]:
    """Sides after the resize of Qwen's processors, for an image or each frame of a video.

    Source: transformers 5.19 qwen2_vl/image_processing_qwen2_vl.py and qwen3_vl/video_processing_qwen3_vl.py.
    """
    tall, wide = max(unit, round(height / unit) * unit), max(unit, round(width / unit) * unit)
    if frames * tall * wide > high:
        beta = math.sqrt(frames * height * width / high)
        return max(unit, math.floor(height / beta / unit) * unit), max(unit, math.floor(width / beta / unit) * unit)
    if frames * tall * wide < low:
        beta = math.sqrt(low / (frames * height * width))
        return math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return tall, wide


def within(sides: tuple[int, int], limit: Limit) -> tuple[int, int]:
    """Sides of a dummy item, capped by the limit."""
    height, width = sides
    return min(height, limit.height or height), min(width, limit.width or width)


QWEN2_PIXELS: Final = (56 * 56, 12_845_056)  # Qwen/Qwen2-VL-7B-Instruct, Qwen/Qwen2.5-VL-7B-Instruct
QWEN2_FRAMES, QWEN2_LONGER = 14, 16  # most frames of a video: from 0.11 on, and before
QWEN3_PIXELS: Final = (65_536, 16_777_216)  # Qwen/Qwen3-VL-8B-Instruct, Qwen/Qwen3.5-27B
QWEN3_VIDEO: Final = (4_096, 25_165_824)  # from their video_preprocessor_config.json
QWEN3_TIMES: Final = 12.5  # tokens per timestamp of a video, until timestamps were dropped


def qwen2_vl(processor: Processor, usual_patch: int = 14, frame: tuple[int, int] | None = None) -> dict[str, Item]:
    """Items of Qwen2-VL and Qwen2.5-VL.

    frame  (least, most) pixels of a frame of the profiled video, if they are not those that it is counted with
    """
    patch, merge, pair = processor.vision("patch_size", usual_patch), processor.vision("spatial_merge_size", 2), 2
    unit = patch * merge
    low, high = processor.area("images_kwargs", QWEN2_PIXELS)
    sides = widest(high, unit)

    def tokens(size: tuple[int, int], bounds: tuple[int, int], frames: int) -> int:
        tall, wide = resized(*size, unit, *bounds)
        return math.ceil(frames / pair) * (tall // patch) * (wide // patch) // merge**2

    video = processor.area("videos_kwargs", QWEN2_PIXELS)
    frames, most = 1, QWEN2_FRAMES if processor.release.has("shorter_videos") else QWEN2_LONGER
    room = processor.context
    if not processor.release.has("items_by_batch"):  # a video shared the batch with an image
        room -= tokens(sides, (low, high), 1)
    while frames < most and tokens(sides, video, frames + 1) <= room:
        frames += 1
    film, image = processor.limit("video"), processor.limit("image")
    frames_kept = min(frames, film.num_frames or frames)
    return {
        "image": Item(tokens(sides, (low, high), 1), merge**2 * tokens(within(sides, image), (low, high), 1)),
        "video": Item(
            tokens(sides, video, frames), merge**2 * tokens(within(sides, film), frame or video, frames_kept)
        ),
    }


def qwen3_vl(processor: Processor) -> dict[str, Item]:
    patch, merge, pair = processor.vision("patch_size", 16), processor.vision("spatial_merge_size", 2), 2
    unit = patch * merge
    bounds = processor.area("images_kwargs", QWEN3_PIXELS)
    video = processor.area("videos_kwargs", QWEN3_VIDEO)

    def tokens(size: tuple[int, int], bounds: tuple[int, int], frames: int) -> int:
        tall, wide = resized(*size, unit, *bounds, frames)
        return max(1, frames // pair) * (tall // patch) * (wide // patch) // merge**2

    still, moving = widest(bounds[1], unit), widest(video[1] // pair, unit)
    film = tokens(moving, video, pair)
    width = processor.vision("out_hidden_size", 0) * (1 + stages_of(processor))
    video_size = resized(*moving, unit, *video, pair)
    counted = film if processor.release.has("video_without_timestamps") else int(film * QWEN3_TIMES)
    return {
        "image": Item(
            tokens(still, bounds, 1), merge**2 * tokens(within(still, processor.limit("image")), bounds, 1), width
        ),
        "video": Item(
            counted,
            merge**2 * tokens(within(video_size, processor.limit("video")), video, pair),
            width,
            made=0 if counted == film else film,
        ),
    }


def stages_of(processor: Processor) -> int:
    """Layers of the tower whose outputs go beside its last one's."""
    vision = processor.config.get("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return len(deep) if isinstance(deep, list) else 0


# --- other families -------------------------------------------------------------------------------------------------

GEMMA3_CROPS: Final = (
    256,
    4,
    1.2,
)  # smallest crop, most crops, least ratio of sides: transformers' Gemma3ProcessorKwargs


def gemma3(processor: Processor) -> dict[str, Item]:
    tokens, side = processor.number("mm_tokens_per_image", 256), processor.vision("image_size", 896)
    settings = processor.scoped("images_kwargs")  # not the folder's: vLLM uses transformers' defaults
    crops = 0
    if settings.get("do_pan_and_scan"):
        smallest = count_of(settings, "pan_and_scan_min_crop_size", GEMMA3_CROPS[0])
        most = count_of(settings, "pan_and_scan_max_num_crops", GEMMA3_CROPS[1])
        ratio = settings.get("pan_and_scan_min_ratio_to_activate", GEMMA3_CROPS[2])
        tall, wide = within((side * most, side), processor.limit("image"))
        crops = cropped(tall, wide, smallest, most, float(ratio))
    counted = (tokens + 4 * processor.marks) * (1 + crops)
    return {"image": Item(counted, (1 + crops) * (side // processor.vision("patch_size", 14)) ** 2)}


def cropped(tall: int, wide: int, smallest: int, most: int, ratio: float) -> int:
    """Crops that Gemma 3 makes of an image. Source: vLLM 0.33 gemma3_mm.py (get_num_crops)."""
    long, short = max(tall, wide), min(tall, wide)
    if long / short < ratio:
        return 0
    crops = min(most, max(2, min(long // smallest, math.floor(long / short + 0.5))))
    return 0 if min(math.ceil(long / crops), short) < smallest else crops


def gemma3n(processor: Processor) -> dict[str, Item]:
    return {"image": Item(256, 256), "audio": Item(188, 0)}


GEMMA4_TOKENS: Final = (70, 140, 280, 560, 1120)  # possible tokens of an image
GEMMA4_FRAMES, GEMMA4_FRAME, GEMMA4_MARKS = 32, 70, 8  # video frames, tokens per frame, and separators
GEMMA4_AUDIO: Final = 750  # processor_config.json of google/gemma-4-E4B-it


def gemma4(processor: Processor) -> dict[str, Item]:
    pooled = processor.vision("pooling_kernel_size", 3) ** 2
    tokens, stated = processor.vision("default_output_length", 280), processor.kwargs.get("max_soft_tokens")
    if stated is None and isinstance(processor.kwargs.get("images_kwargs"), Mapping):
        stated = processor.kwargs["images_kwargs"].get("max_soft_tokens")
    if stated in GEMMA4_TOKENS and processor.release.has("chosen_items"):
        tokens = stated
    frames = frames_kept = min(GEMMA4_FRAMES, processor.limit("video").num_frames or GEMMA4_FRAMES)
    if not processor.release.has("chosen_items"):
        frames = GEMMA4_FRAMES
    items = {
        "image": Item(tokens, tokens * pooled),
        "video": Item(frames * (GEMMA4_FRAME + GEMMA4_MARKS), max(2, frames_kept) * GEMMA4_FRAME * pooled),
    }
    if processor.config.get("audio_config") is not None:
        items["audio"] = Item(count_of(processor.files, "audio_seq_length", GEMMA4_AUDIO, NESTED), 0)
    return items


LLAMA4_TILES: Final = 16  # meta-llama/Llama-4-Scout-17B-16E-Instruct


def llama4(processor: Processor) -> dict[str, Item]:
    side, patch = processor.vision("image_size", 336), processor.vision("patch_size", 14)
    vision = processor.config.get("vision_config")
    ratio = vision.get("pixel_shuffle_ratio") if isinstance(vision, Mapping) else None
    shuffle = float(ratio) if isinstance(ratio, int | float) and 0 < ratio <= 1 else 0.5
    of_tile = (side // patch) ** 2
    most = count_of(processor.settings("images_kwargs"), "max_patches", LLAMA4_TILES, largest=MOST_TILES)
    height, width = within((most * side, side), processor.limit("image"))
    tiles = tiled(height / side, width / side, most)
    tiles += tiles > 1  # plus the whole image
    marks = 2 + tiles if processor.marks else 0
    return {"image": Item(tiles * int(of_tile * shuffle**2) + marks, tiles * (of_tile + 1))}


def tiled(tall: float, wide: float, most: int) -> int:
    """Tiles of Llama 4's canvas for an image of so many tiles' height and width.

    Source: transformers 5.19 llama4/image_processing_llama4.py (find_supported_resolutions, get_best_fit).
    """
    canvases = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    scales = {(rows, columns): min(rows / tall, columns / wide) for rows, columns in canvases}
    larger = [scale for scale in scales.values() if scale >= 1]
    best = min(larger) if larger else max(scales.values())
    return min(rows * columns for (rows, columns), scale in scales.items() if scale == best)


MISTRAL3_SIDE: Final = 1540  # mistralai/Mistral-Small-3.1-24B-Instruct-2503


def mistral3(processor: Processor) -> dict[str, Item]:
    patch = processor.vision("patch_size", 14)
    merge = processor.number("spatial_merge_size", 2)
    size = processor.settings("images_kwargs").get("size")
    side = count_of(size, "longest_edge", MISTRAL3_SIDE) if isinstance(size, Mapping) else MISTRAL3_SIDE
    unit = patch * merge
    height, width = within((side, side), processor.limit("image"))
    rows = math.ceil(height / unit)
    tokens = rows * math.ceil(width / unit)
    return {"image": Item(tokens + rows * processor.marks, tokens * merge**2)}


def llava(processor: Processor) -> dict[str, Item]:
    tokens = (processor.vision("image_size", 336) // processor.vision("patch_size", 14)) ** 2
    return {"image": Item(tokens, tokens + 1)}


KIMI_SIDE: Final = 3000  # pixels of the dummy in vLLM's kimi_k25.py
KIMI_PATCHES: Final = 16_384  # in_patch_limit of moonshotai/Kimi-K2.5 and K2.6
KIMI_ONE_SIDE: Final = 512  # patch_limit_on_one_side


def navit(height: int, width: int, patch: int, merge: int, most: int) -> int:
    """Tokens of an image in Kimi's towers. Source: vLLM 0.33 kimi_k25_vision_fused.py (navit_resize_image)."""
    longest = KIMI_ONE_SIDE * patch
    fits = math.sqrt(most / (max(1.0, width // patch) * max(1.0, height // patch)))
    scale = min(1.0, fits, longest / width, longest / height)
    sides = (min(max(1, int(side * scale)), longest) for side in (height, width))
    return math.prod(math.ceil(side / (patch * merge)) for side in sides)


def kimi_k25(processor: Processor) -> dict[str, Item]:
    tokens = navit(
        KIMI_SIDE, KIMI_SIDE, processor.vision("patch_size", 14), 2, processor.limit_of_patches(KIMI_PATCHES)
    )
    return {"vision_chunk": Item(tokens, 4 * tokens)}


KIMI_K3: Final = (65_536, (7_041, 1_861))  # in_patch_limit of moonshotai/Kimi-K3, and the sides with the most tokens


@lru_cache(maxsize=64)
def widest_navit(patch: int, most: int) -> tuple[int, int]:
    """(height, width) with the most tokens. Source: vLLM 0.33 models/kimi_k3 (get_max_image_size)."""
    best, longest = (-1, 0, 0), KIMI_ONE_SIDE * patch
    for columns in range(KIMI_ONE_SIDE + 1):
        width = min((columns + 1) * patch - 1, longest)
        for rows in range(columns, KIMI_ONE_SIDE + 1):
            height = min((rows + 1) * patch - 1, longest)
            if (tokens := navit(height, width, patch, 2, most)) > best[0]:
                best = tokens, height, width
    return best[1:]


def kimi_k3(processor: Processor) -> dict[str, Item]:
    patch, most = processor.vision("patch_size", 14), processor.limit_of_patches(KIMI_K3[0])
    sides = KIMI_K3[1] if most == KIMI_K3[0] else widest_navit(patch, most)
    tokens = navit(*within(sides, processor.limit("image")), patch, 2, most)
    return {"image": Item(tokens, 4 * tokens)}


GLM5_IMAGE, GLM5_VIDEO = 8_000, 30_000  # vision tokens; vLLM 0.33 models/glm5next (_MAX_VIDEO_TOKENS)
GLM5_FRAMES, GLM5_TIME = 640, 5  # frames, and tokens of a timestamp: a start-up log has 32,242 in all


def glm5_next(processor: Processor) -> dict[str, Item]:
    unit, most = 2 * (processor.vision("patch_size", 14) * processor.vision("spatial_merge_size", 2)) ** 2, None
    if processor.kwargs.get("max_pixels") is not None:
        most = count_of(processor.kwargs, "max_pixels", 1) // unit
    image, film = most or GLM5_IMAGE, most or GLM5_VIDEO
    pairs = GLM5_FRAMES // 2
    return {"image": Item(image, 4 * image), "video": Item(film + pairs * (2 + GLM5_TIME) + 2, 4 * film)}


# --- tiles, sounds and queries ----------------------------------------------------------------------------------------

WHISPER_TOKENS: Final = (
    750  # for the longest audio: 30 s of 16 kHz in hops of 160, halved by a convolution and a pooling
)


def qwen2_audio(processor: Processor) -> dict[str, Item]:
    return {"audio": Item(WHISPER_TOKENS, 0)}


def blip_2(processor: Processor) -> dict[str, Item]:
    side, patch = processor.vision("image_size", 224), processor.vision("patch_size", 14)
    return {"image": Item(processor.number("num_query_tokens", 32), (side // patch) ** 2 + 1)}


def best_canvas(height: int, width: int, canvases: list[tuple[int, int]]) -> tuple[int, int]:
    """(height, width) that keeps the most of an image's pixels; among those, the one that wastes the least.

    Source: transformers 5.19 image_processing_utils.py (select_best_resolution).
    """

    def pixels_kept(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - canvas[0] * canvas[1]

    return max(canvases, key=pixels_kept)


def canvases_of(processor: Processor) -> list[tuple[int, int]]:
    """Parse the `image_grid_pinpoints` of a config."""
    listed = processor.config.get("image_grid_pinpoints")
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2] if isinstance(listed, list) else []
    return [(tall, wide) for tall, wide in pairs if type(tall) is int and type(wide) is int and min(tall, wide) > 0]


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of an image's patches on its canvas, without the padding border.

    Source: vLLM 0.33 llava_next.py (_get_num_unpadded_features).
    """
    if width / height > columns / rows:
        return rows - 2 * ((rows - int(round(height * (columns / width), 7))) // 2), columns
    return rows, columns - 2 * ((columns - int(round(width * (rows / height), 7))) // 2)


def llava_next(processor: Processor) -> dict[str, Item]:
    side, patch = processor.vision("image_size", 336), processor.vision("patch_size", 14)
    along, canvases = side // patch, [size for size in canvases_of(processor) if min(size) >= side]
    if not along or not canvases:  # no patch, or no tile
        return {}

    def grid(size: tuple[int, int]) -> tuple[int, int]:
        tall, wide = best_canvas(*size, canvases)
        return tall // side, wide // side

    def tokens(size: tuple[int, int]) -> int:
        rows, columns = (along * tiles for tiles in grid(size))
        rows, columns = unpadded(*size, rows, columns)
        return rows * columns + rows + along**2

    size = within(max(canvases, key=tokens), processor.limit("image"))
    return {"image": Item(tokens(size), (1 + math.prod(grid(size))) * (along**2 + 1))}


ONEVISION: Final = (944, 1153)  # height and width of the image with the most tokens in vLLM
ONEVISION_FRAMES, ONEVISION_TILES, ONEVISION_MORE = 16, 9, 1.1  # most video frames; tiles kept, and factor for more


def llava_onevision(processor: Processor) -> dict[str, Item]:
    side, patch = processor.vision("image_size", 384), processor.vision("patch_size", 14)
    along, canvases = side // patch, [size for size in canvases_of(processor) if min(size) >= side]
    if not along or not canvases:  # no patch, or no tile
        return {}
    size = within(ONEVISION, processor.limit("image"))
    tall, wide = best_canvas(*size, canvases)
    tiles = (tall // side) * (wide // side)
    rows, columns = unpadded(*size, along * (tall // side), along * (wide // side))
    ratio = math.sqrt(rows * columns / (ONEVISION_TILES * along**2))
    if ratio > ONEVISION_MORE:
        rows, columns = int(rows // ratio), int(columns // ratio)
    frame = math.ceil(along / 2) ** 2
    frames = max(1, min(ONEVISION_FRAMES, (processor.context - 1) // frame))
    frames = min(frames, processor.limit("video").num_frames or frames)
    return {
        "image": Item(rows * columns + rows + along**2, (1 + tiles) * along**2),
        "video": Item(frame * frames + 1, frames * along**2),
    }


INTERNVL: Final = (1, 12, 256)  # least and most tiles, and tokens of one: OpenGVLab/InternVL3-8B-hf


def internvl(processor: Processor) -> dict[str, Item]:
    vision = processor.config.get("vision_config")
    sides = vision.get("image_size") if isinstance(vision, Mapping) else None
    side = (
        sides[0] if isinstance(sides, list) and sides and type(sides[0]) is int else processor.vision("image_size", 448)
    )
    patches = vision.get("patch_size") if isinstance(vision, Mapping) else None
    patch = patches[0] if isinstance(patches, list) and patches and type(patches[0]) is int else 14
    settings = processor.settings("images_kwargs")
    if settings.get("crop_to_patches") is False:  # then vLLM's count and its actual tokens differ
        return {}
    low = count_of(settings, "min_patches", INTERNVL[0], largest=MOST_TILES)
    most = count_of(settings, "max_patches", INTERNVL[1], largest=MOST_TILES)
    tokens = processor.number("image_seq_length", INTERNVL[2])
    tiles = tiles_of(*within((side, most * side), processor.limit("image")), side, low, most)
    largest = most + (most > 1)
    room = processor.context - largest * tokens * (processor.limit("image").count > 0)
    frames = max(1, room // tokens)
    frames = min(frames, processor.limit("video").num_frames or frames)
    of_tile = (side // patch) ** 2 + 1
    return {"image": Item(tiles * tokens, tiles * of_tile), "video": Item(frames * tokens, frames * of_tile)}


def tiles_of(height: int, width: int, side: int, low: int, most: int) -> int:
    """Tiles of an image and its thumbnail, from the grid with the nearest aspect ratio, the larger one for a large
    image.

    Source: transformers 5.19 got_ocr2/image_processing_got_ocr2.py (get_optimal_tiled_canvas).
    """
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most // c + 1) if c * r >= low]
    best, nearest = 1, math.inf
    for columns, rows in sorted(grids, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and height * width > 0.5 * side**2 * columns * rows):
            best, nearest = columns * rows, distance
    return best + (best > 1)


MINIMAX_FRAMES: Final = 500  # of a video, at most


def minimax_m3(processor: Processor) -> dict[str, Item]:
    """Largest items from `max_pixels`, which is in the checkpoint's own files but not in config.json."""
    unit, still, film = 28, processor.settings("images_kwargs"), processor.settings("videos_kwargs")
    if still.get("max_pixels") is None or film.get("max_pixels") is None:
        return {}
    if still.get("max_long_side_pixel") is not None or film.get("max_long_side_pixel") is not None:
        return {}
    side = max(1, math.isqrt(most_pixels(processor, "images_kwargs")) // unit)
    tokens = max(1, most_pixels(processor, "videos_kwargs") // unit**2)
    frames = max(1, min(MINIMAX_FRAMES, processor.context // tokens * 2))
    image, video = processor.limit("image"), processor.limit("video")
    tall, wide = (sides // unit for sides in within((side * unit, side * unit), image))
    num_tokens = math.ceil(min(frames, video.num_frames or frames) / 2) * tokens
    return {
        "image": Item(side**2, 4 * max(1, tall) * max(1, wide)),
        "video": Item(math.ceil(frames / 2) * tokens, 4 * num_tokens),
    }


def most_pixels(processor: Processor, scope: str) -> int:
    return processor.area(scope, (1, 1))[1]


KIMI_VL_SIDE: Final = 1024  # pixels of the dummy image in vLLM's kimi_vl.py
KIMI_VL_PATCHES: Final = 4_096  # in_token_limit of moonshotai/Kimi-VL-A3B-Instruct


def kimi_vl(processor: Processor) -> dict[str, Item]:
    patch = processor.vision("patch_size", 14)
    most = count_of(processor.settings("images_kwargs"), "in_token_limit", KIMI_VL_PATCHES)
    height, width = within((KIMI_VL_SIDE, KIMI_VL_SIDE), processor.limit("image"))

    def tokens(height: int, width: int) -> int:
        if (patches := (width // patch) * (height // patch)) > most:
            scale = math.sqrt(most / patches)
            height, width = int(height * scale), int(width * scale)
        return math.ceil(height / (2 * patch)) * math.ceil(width / (2 * patch))

    return {"image": Item(tokens(height, width), 4 * tokens(height, width))}


# --- GLM-V ------------------------------------------------------------------------------------------------------------

GLM_IMAGE: Final = (12_544, 9_633_792)  # zai-org/GLM-4.1V-9B-Thinking, GLM-4.5V, GLM-OCR
GLM_VIDEO: Final = (12_544, 47_040_000)  # their video processor's, and transformers' Glm4vVideoProcessor
GLM_SIDE, GLM_MOST_FRAMES, GLM_PAIR = 9_999_999, 600, 2  # the image that is planned with, most frames, and of a patch
GLM_CLASS: Final = "Glm4vProcessor"


def whole_area(settings: Mapping[str, Any], usual: tuple[int, int], where: str = FLAG) -> tuple[int, int]:
    """(least, most) pixels over all frames of an item, from `size`."""
    size = settings.get("size")
    low, high = usual
    if not isinstance(size, Mapping):
        return usual
    return count_of(size, "shortest_edge", low, where), count_of(size, "longest_edge", high, where)


def glm_resized(sides: tuple[int, int], unit: int, area: tuple[int, int], frames: int) -> tuple[int, int]:
    """(height, width) of each frame. Source: transformers 5.19 glm4v/image_processing_glm4v.py (smart_resize)."""
    height, width = sides
    if min(sides) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    pixels = GLM_PAIR * round(frames / GLM_PAIR) * round(height / unit) * round(width / unit) * unit**2
    if pixels > area[1]:
        beta = math.sqrt(frames * height * width / area[1])
        return max(unit, math.floor(height / beta / unit) * unit), max(unit, math.floor(width / beta / unit) * unit)
    if pixels < area[0]:
        beta = math.sqrt(area[0] / (frames * height * width))
        return math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return round(height / unit) * unit, round(width / unit) * unit


def is_glm4v(processor: Processor) -> bool:
    """True unless the model has another processor: GLM-OCR has, and the folder of GLM-4.6V names it."""
    usual = None if processor.config.get("model_type") == "glm_ocr" else GLM_CLASS
    named = processor.filed("images_kwargs").get("processor_class", usual)
    return bool(processor.files.get("processor_class", named) == GLM_CLASS)


def glm4v(processor: Processor) -> dict[str, Item]:
    """The image and the video with the most tokens; the video's frames are those that fit the context with an image.

    Source: vLLM 0.33 glm4_1v.py (get_image_size_with_most_features, _get_max_video_frames).
    """
    if not processor.release.has("planned_frames"):
        return {}
    merge = processor.vision("spatial_merge_size", 2)
    unit = processor.vision("patch_size", 14) * merge
    image, film = processor.limit("image"), processor.limit("video")

    def planned(scope: str, usual: tuple[int, int]) -> tuple[int, int]:
        high = whole_area(processor.kwargs, whole_area(processor.filed(scope), usual, FILE))[1]
        return GLM_IMAGE[0], count_of(processor.kwargs, "max_pixels", high)

    def made(scope: str, usual: tuple[int, int]) -> tuple[int, int]:
        return whole_area(processor.scoped(scope), whole_area(processor.filed(scope), usual, FILE))

    def tokens(sides: tuple[int, int], area: tuple[int, int], frames: int) -> int:
        return math.ceil(frames / GLM_PAIR) * math.prod(glm_resized(sides, unit, area, frames)) // unit**2

    largest = glm_resized((GLM_SIDE, GLM_SIDE), unit, planned("images_kwargs", GLM_IMAGE), GLM_PAIR)
    still = tokens(within(largest, image), made("images_kwargs", GLM_IMAGE), GLM_PAIR)
    beside = tokens(largest, planned("images_kwargs", GLM_IMAGE), GLM_PAIR)
    if not is_glm4v(processor):  # GLM-4.6V and -OCR: a video's timestamps count too, which the tokenizer alone knows
        return {} if film.count else {"image": Item(beside, merge**2 * still)}

    def video(room: int) -> int:
        """Tokens of the video for so many tokens of context."""
        area, frames, record = planned("videos_kwargs", GLM_VIDEO), 1, 0
        for count in range(1, GLM_MOST_FRAMES + 1):
            counted = tokens(largest, area, max(GLM_PAIR, count))
            if record < counted <= room:
                frames, record = count, counted
        frames = max(GLM_PAIR, frames)
        frames = min(frames, max(GLM_PAIR, film.num_frames or frames))
        return tokens(within(largest, film), made("videos_kwargs", GLM_VIDEO), frames)

    room = processor.context - (beside if image.count else 0)
    return {
        "image": Item(still, merge**2 * still),
        "video": Item(video(room), merge**2 * video(processor.context)),  # profiled without an image beside it
    }


# --- sounds of any length, and Qwen-Omni ------------------------------------------------------------------------------

VOXTRAL_TOKEN: Final = 1_280  # samples: 16 kHz at 12.5 tokens a second, tekken.json of mistralai/Voxtral-Mini-3B-2507
VOXTRAL_CHUNK: Final = 480_000  # samples of 30 s; a sound's chunks are padded to it and encoded at once


def voxtral(processor: Processor) -> dict[str, Item]:
    """The longest sound: as many tokens as the context, whose chunks are encoded together.

    Source: vLLM 0.33 voxtral.py (get_max_audio_tokens, VoxtralEncoderModel.prepare_inputs_for_conv).
    """
    samples = processor.context * VOXTRAL_TOKEN
    samples = min(samples, processor.limit("audio").length or samples)
    audio = processor.config.get("audio_config")
    positions = count_in(audio if isinstance(audio, Mapping) else {}, "max_source_positions", 1_500)
    return {"audio": Item(processor.context, math.ceil(samples / VOXTRAL_CHUNK) * positions)}


def thinker(processor: Processor) -> Processor:
    """Return the processor of Qwen-Omni's vision and audio part."""
    config = processor.config.get("thinker_config")
    return replace(processor, config=config) if isinstance(config, Mapping) else processor


OMNI_FRAME: Final = (128, 768)  # least and most tokens of a frame that the processors make


def omni(processor: Processor, patch: int) -> dict[str, Item]:
    """Items of Qwen2-VL's rules, but a video's frames are smaller than those that it is counted with.

    Source: transformers 5.19 qwen3_omni_moe/processing_qwen3_omni_moe.py and qwen2_5_omni's (_defaults), whose size
    takes the place of that in the model's folder.
    """
    low, high = (tokens * (2 * patch) ** 2 for tokens in OMNI_FRAME)
    inner = thinker(processor)
    seen = qwen2_vl(inner, patch, area(processor.scoped("videos_kwargs"), low, high))
    width, merged = inner.vision("out_hidden_size", 0) * (1 + stages_of(inner)), inner.vision("spatial_merge_size", 2)
    return {
        **{name: replace(item, width=width, made=item.patches // merged**2) for name, item in seen.items()},
        **qwen2_audio(processor),
    }


def qwen2_5_omni(processor: Processor) -> dict[str, Item]:
    return omni(processor, 14)


def qwen3_omni(processor: Processor) -> dict[str, Item]:
    return omni(processor, 16) if processor.release.has("omni_sounds") else {}


def deepseek_v41(processor: Processor) -> dict[str, Item]:
    """An image of DeepSeek-V4.1: most patches whose rows, with a token at the end of each, and two more fit.

    Source: vLLM 0.33 models/deepseek_v41/common/mm_preprocess.py (get_image_size_with_most_features).
    """
    tokens, joined = processor.vision("max_image_tokens", 1024), processor.vision("downsample_ratio", 3)
    if tokens < 4:  # no row of an image has room
        return {}
    return {"image": Item(tokens, (tokens - 3) * joined**2)}  # in one row


READERS: Final[Mapping[str, Callable[[Processor], dict[str, Item]]]] = {
    **{
        reader.__name__: reader
        for reader in (
            deepseek_v41, gemma3, gemma3n, gemma4, glm4v, glm5_next, internvl, kimi_k25, kimi_k3, kimi_vl, llama4,
            llava, llava_next, llava_onevision, minimax_m3, mistral3, qwen2_5_omni, qwen2_audio, qwen2_vl, qwen3_vl,
            voxtral,
        )
    },
    "blip-2": blip_2, "glm4v_moe": glm4v, "glm_ocr": glm4v, "llava_llama": llava, "minimax_m3_vl": minimax_m3,
    "qwen2_5_vl": qwen2_vl, "qwen3_omni_moe": qwen3_omni,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen3_vl_moe"), qwen3_vl),
}  # fmt: skip
MOST: Final = {
    "blip-2": {"image": 1},
    "glm4v": {"video": 1},
    "glm4v_moe": {"video": 1},
    "glm5_next": {"video": 1},
    "glm_ocr": {"video": 1},
    "voxtral": {"audio": 5},
}  # items that a model takes at most, whatever the limit says
# Processor settings that change the size of the largest item. Others change nothing, or nothing that vLLM counts.
SIZING: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma3": ("do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size",
               "pan_and_scan_min_ratio_to_activate"),
    "gemma4": ("max_soft_tokens",),
    "llama4": ("max_patches",),
    "mistral3": ("size", "longest_edge"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), ("max_pixels", "size")),
    **dict.fromkeys(("glm5_next", "minimax_m3", "minimax_m3_vl"), ("max_pixels",)),
    **{
        name: ("min_pixels", "max_pixels", "size")
        for name, reader in READERS.items() if reader in (qwen2_vl, qwen3_vl, qwen3_omni)
    },
}  # fmt: skip
