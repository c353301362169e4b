"""The largest image, video or sound that a model's processor makes, as vLLM counts it: tokens, patches, tiles.

vLLM budgets its encoder by the largest item of each input that is switched on. Its size follows from the model's
config.json and from the processor's settings, which are not in config.json: constants here are those of the families'
published checkpoints, the files of a model's folder go before them, and --mm-processor-kwargs before those. Every
number equals that of vLLM 0.33's own processors, built from the same values (tests/facts/encoder_budgets.jsonl and
processor_files.jsonl).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import lru_cache
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.servers.arguments import Limit
from kvplan.servers.releases import Version

SOURCE: Final = "vLLM 0.33 multimodal/encoder_budget.py and its models' get_mm_max_tokens_per_item"


@dataclass(frozen=True, slots=True)
class Item:
    """The largest item of one input.

    tokens   that the budget counts
    patches  of the tower that the profiled item has, 0 where unknown
    width    elements of a token as the tower hands it on; 0: the language model's hidden size
    """

    tokens: int
    patches: int
    width: int = 0


@dataclass(frozen=True, slots=True)
class Processor:
    """What the sizes depend on beside the model: its context, the release, limits and processor settings."""

    config: Mapping[str, Any]
    context: int
    release: Version
    limits: Mapping[str, Limit]
    kwargs: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)  # of the model's folder

    def limit(self, name: str) -> Limit:
        return self.limits.get(name, Limit())

    def scoped(self, scope: str) -> dict[str, Any]:
        """The processor's settings of one input: flat ones, and over them those of its own scope."""
        flat = {key: value for key, value in self.kwargs.items() if not key.endswith("_kwargs")}
        own = self.kwargs.get(scope)
        return {**flat, **(own if isinstance(own, Mapping) else {})}

    def filed(self, scope: str) -> Mapping[str, Any]:
        """The settings of one input that the model's folder holds."""
        own = self.files.get(scope)
        return own if isinstance(own, Mapping) else {}

    def settings(self, scope: str) -> dict[str, Any]:
        """The settings of one input: those of the model's folder, and over them those that are asked for."""
        return {**self.filed(scope), **self.scoped(scope)}

    def area(self, scope: str, usual: tuple[int, int]) -> tuple[int, int]:
        """(least, most) pixels: asked for, else as the model's folder says, else usual."""
        return area(self.scoped(scope), *area(self.filed(scope), *usual, where=FILE))

    def limit_of_patches(self, usual: int) -> int:
        """Patches that Kimi's processors make of an image at most."""
        media = self.filed("images_kwargs").get("media_proc_cfg")
        return count_of(media if isinstance(media, Mapping) else {}, "in_patch_limit", usual, FILE)

    @property
    def marks(self) -> bool:
        """Whether what stands between an item's embeddings counts too."""
        return self.release.has("items_by_batch") and not self.release.has("embeddings_counted")

    def vision(self, name: str, default: int) -> int:
        """A number of the vision tower's config."""
        values = self.config.get("vision_config")
        return count_in(values if isinstance(values, Mapping) else {}, name, default)

    def number(self, name: str, default: int) -> int:
        """A number of the model's own config."""
        return count_in(self.config, name, default)


def count_in(values: Mapping[str, Any], name: str, default: int) -> int:
    """A positive whole number of a config, else what is usual."""
    value = values.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


FLAG: Final = "--mm-processor-kwargs"
FILE: Final = "preprocessor_config.json"
NESTED: Final = "processor_config.json"


MOST_COUNT: Final = 10**10  # of pixels or patches: an image of 100,000 by 100,000
MOST_TILES: Final = 1_000


def count_of(
    values: Mapping[str, Any], name: str, default: int, where: str = FLAG, largest: int = MOST_COUNT
) -> int:  # fmt: skip
    """A positive count among the processor's settings."""
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
    """(least, most) pixels of an image: `size`, over it min_pixels and max_pixels."""
    size = settings.get("size")
    size = size if isinstance(size, Mapping) else {}
    low = count_of(settings, "min_pixels", count_of(size, "shortest_edge", shortest, where), where)
    high = count_of(settings, "max_pixels", count_of(size, "longest_edge", longest, where), where)
    return low, high


def widest(pixels: int, unit: int) -> tuple[int, int]:
    """(height, width) with the most tokens of `unit` x `unit` pixels within an area, no side over 200 times the other.

    Source: vLLM 0.33 qwen2_vl.py (get_image_size_with_most_features).
    """
    for tokens in range(max(1, pixels // unit**2), 0, -1):
        short = next(d for d in range(math.isqrt(tokens), 0, -1) if tokens % d == 0)
        if tokens // short <= 200 * short:
            return unit * short, unit * (tokens // short)
    return unit, unit


def resized(height: int, width: int, unit: int, low: int, high: int, frames: int = 1) -> tuple[int, int]:
    """The sides that Qwen's processors give an image, or each frame of a video.

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
    """The sides of a dummy, none larger than what the limit says."""
    height, width = sides
    return min(height, limit.height or height), min(width, limit.width or width)


QWEN2_PIXELS: Final = (56 * 56, 12_845_056)  # Qwen/Qwen2-VL-7B-Instruct, Qwen/Qwen2.5-VL-7B-Instruct
QWEN2_FRAMES, QWEN2_LONGER = 14, 16  # of a video, at most: from 0.11 on, and before
QWEN3_PIXELS: Final = (65_536, 16_777_216)  # Qwen/Qwen3-VL-8B-Instruct, Qwen/Qwen3.5-27B
QWEN3_VIDEO: Final = (4_096, 25_165_824)  # their video_preprocessor_config.json
QWEN3_TIMES: Final = 12.5  # tokens for one of a video, until its timestamps were left out


def qwen2_vl(processor: Processor) -> dict[str, Item]:
    patch, merge, pair = processor.vision("patch_size", 14), processor.vision("spatial_merge_size", 2), 2
    unit = patch * merge
    low, high = processor.area("images_kwargs", QWEN2_PIXELS)
    sides = widest(high, unit)

    def tokens(size: tuple[int, int], bounds: tuple[int, int], frames: int) -> int:
        tall, wide = resized(*size, unit, *bounds)
        return math.ceil(frames / pair) * (tall // patch) * (wide // patch) // merge**2

    video = processor.area("videos_kwargs", QWEN2_PIXELS)
    frames, most = 1, QWEN2_FRAMES if processor.release.has("shorter_videos") else QWEN2_LONGER
    room = processor.context
    if not processor.release.has("items_by_batch"):  # a video had its place beside an image
        room -= tokens(sides, (low, high), 1)
    while frames < most and tokens(sides, video, frames + 1) <= room:
        frames += 1
    film, image = processor.limit("video"), processor.limit("image")
    frames_kept = min(frames, film.num_frames or frames)
    return {
        "image": Item(tokens(sides, (low, high), 1), merge**2 * tokens(within(sides, image), (low, high), 1)),
        "video": Item(tokens(sides, video, frames), merge**2 * tokens(within(sides, film), video, frames_kept)),
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
    width = processor.vision("out_hidden_size", 0)
    stages = processor.config.get("vision_config")
    deep = stages.get("deepstack_visual_indexes") if isinstance(stages, Mapping) else None
    width *= 1 + (len(deep) if isinstance(deep, list) else 0)
    video_size = resized(*moving, unit, *video, pair)
    counted = film if processor.release.has("video_without_timestamps") else int(film * QWEN3_TIMES)
    return {
        "image": Item(
            tokens(still, bounds, 1), merge**2 * tokens(within(still, processor.limit("image")), bounds, 1), width
        ),
        "video": Item(counted, merge**2 * tokens(within(video_size, processor.limit("video")), video, pair), width),
    }


# --- other families -------------------------------------------------------------------------------------------------

GEMMA3_CROPS: Final = (
    256,
    4,
    1.2,
)  # smallest crop, most crops, least ratio of sides: transformers' Gemma3ProcessorKwargs


def gemma3(processor: Processor) -> dict[str, Item]:
    tokens, side = processor.number("mm_tokens_per_image", 256), processor.vision("image_size", 896)
    settings = processor.scoped("images_kwargs")  # not the folder's: vLLM takes transformers' defaults
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


GEMMA4_TOKENS: Final = (70, 140, 280, 560, 1120)  # that an image may have
GEMMA4_FRAMES, GEMMA4_FRAME, GEMMA4_MARKS = 32, 70, 8  # frames of a video, tokens of one, and those around it
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
    tiles += tiles > 1  # and the whole image
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


KIMI_K3: Final = (65_536, (7_041, 1_861))  # in_patch_limit of moonshotai/Kimi-K3, and the sides with most tokens


@lru_cache(maxsize=64)
def widest_navit(patch: int, most: int) -> tuple[int, int]:
    """The (height, width) with most tokens. Source: vLLM 0.33 models/kimi_k3 (get_max_image_size)."""
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
GLM5_FRAMES, GLM5_TIME = 640, 5  # frames, and tokens of a time stamp: a start-up log has 32,242 in all


def glm5_next(processor: Processor) -> dict[str, Item]:
    unit, most = 2 * (processor.vision("patch_size", 14) * processor.vision("spatial_merge_size", 2)) ** 2, None
    if processor.kwargs.get("max_pixels") is not None:
        most = count_of(processor.kwargs, "max_pixels", 1) // unit
    image, film = most or GLM5_IMAGE, most or GLM5_VIDEO
    pairs = GLM5_FRAMES // 2
    return {
        "image": Item(image, 4 * image),
        "video": Item(film + pairs * (2 + GLM5_TIME) + 2, 4 * film),
    }


# --- tiles, sounds and queries ----------------------------------------------------------------------------------------

WHISPER_TOKENS: Final = (
    750  # of the longest sound: 30 s of 16 kHz in hops of 160, halved by a convolution and a pooling
)


def qwen2_audio(processor: Processor) -> dict[str, Item]:
    return {"audio": Item(WHISPER_TOKENS, 0)}


def blip_2(processor: Processor) -> dict[str, Item]:
    side, patch = processor.vision("image_size", 224), processor.vision("patch_size", 14)
    return {"image": Item(processor.number("num_query_tokens", 32), (side // patch) ** 2 + 1)}


def best_canvas(height: int, width: int, canvases: list[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of an image's pixels, and of those the one that wastes least.

    Source: transformers 5.19 image_processing_utils.py (select_best_resolution).
    """

    def pixels_kept(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - canvas[0] * canvas[1]

    return max(canvases, key=pixels_kept)


def canvases_of(processor: Processor) -> list[tuple[int, int]]:
    """The `image_grid_pinpoints` of a config."""
    listed = processor.config.get("image_grid_pinpoints")
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2] if isinstance(listed, list) else []
    return [(tall, wide) for tall, wide in pairs if type(tall) is int and type(wide) is int and min(tall, wide) > 0]


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of an image's patches on its canvas, less the border that keeps its shape.

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


ONEVISION: Final = (944, 1153)  # height and width of the image with most tokens, as vLLM has it
ONEVISION_FRAMES, ONEVISION_TILES, ONEVISION_MORE = 16, 9, 1.1  # frames of a video; tiles kept, and by how much more


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
    if settings.get("crop_to_patches") is False:  # then what vLLM counts and what it makes differ
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
    """Tiles of an image and its thumbnail: those of the grid whose shape is nearest, the larger for a large image.

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
    """Sides that vLLM makes of `max_pixels`, which the checkpoint's own files hold and no config.json does."""
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


KIMI_VL_SIDE: Final = 1024  # pixels of the dummy in vLLM's kimi_vl.py
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


def thinker(processor: Processor) -> Processor:
    """The part of Qwen-Omni that sees and hears."""
    config = processor.config.get("thinker_config")
    return replace(processor, config=config) if isinstance(config, Mapping) else processor


def qwen2_5_omni(processor: Processor) -> dict[str, Item]:
    return {**qwen2_vl(thinker(processor)), **qwen2_audio(processor)}


READERS: Final[Mapping[str, Callable[[Processor], dict[str, Item]]]] = {
    "blip-2": blip_2,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "glm5_next": glm5_next,
    "internvl": internvl,
    "kimi_k25": kimi_k25,
    "kimi_k3": kimi_k3,
    "kimi_vl": kimi_vl,
    "llama4": llama4,
    "llava": llava,
    "llava_llama": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "minimax_m3": minimax_m3,
    "minimax_m3_vl": minimax_m3,
    "mistral3": mistral3,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen2_5_vl": qwen2_vl,
    "qwen2_audio": qwen2_audio,
    "qwen2_vl": qwen2_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}
MOST: Final = {
    "blip-2": {"image": 1},
    "glm5_next": {"video": 1},
}  # items that a model takes at most, whatever the limit says
# Settings of a processor that change the size of its largest item. Others change none, or none that vLLM counts.
SIZING: Final = {
    "gemma3": ("do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size",
               "pan_and_scan_min_ratio_to_activate"),
    "gemma4": ("max_soft_tokens",),
    "glm5_next": ("max_pixels",),
    "llama4": ("max_patches",),
    "minimax_m3": ("max_pixels",),
    "minimax_m3_vl": ("max_pixels",),
    "mistral3": ("size", "longest_edge"),
    "qwen2_5_vl": ("min_pixels", "max_pixels", "size"),
    "qwen2_vl": ("min_pixels", "max_pixels", "size"),
    "qwen3_5": ("min_pixels", "max_pixels", "size"),
    "qwen3_5_moe": ("min_pixels", "max_pixels", "size"),
    "qwen3_vl": ("min_pixels", "max_pixels", "size"),
    "qwen3_vl_moe": ("min_pixels", "max_pixels", "size"),
}  # fmt: skip
