"""The one resolver of GPU names: what people, drivers, Kubernetes and clouds call a GPU.

A name is a catalog name or alias (kvplan.hardware.gpu looks these up by itself), a product name as NVML or nvidia-smi
prints it, a node label or its value, a MIG slice, a Mac, a cloud instance, or any of these with a number of GPUs. Words
may stand in any order and without the vendor. A name that fits two GPUs is refused with both, one that fits none with
the closest.

Sources of labels: NVIDIA's GPU feature discovery (nvidia.com/gpu.product is the device's name with dashes), Google's
list of accelerators (cloud.google.com/gke-accelerator), Karpenter's instance-gpu-name.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

from kvplan.core import entries
from kvplan.core.errors import UnknownNameError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import GIB
from kvplan.hardware import apple, slices
from kvplan.hardware.gpu import GpuSpec, gpu, gpu_names
from kvplan.hardware.instances import Instance, gpu_of_family, instance, instances, key

# Labels' values that mean another GPU than the same words elsewhere.
GKE: Final[dict[str, str]] = {
    "nvidia-tesla-a100": "a100-40g", "nvidia-tesla-v100": "v100-16g", "nvidia-h100-mega-80gb": "h100-80g",
}  # fmt: skip
KARPENTER: Final[dict[str, str | None]] = {"v100": "v100-16g", "a100": None}  # of 40 or 80 GB
LABELS: Final = (
    "nvidia.com/gpu.product", "gpu.nvidia.com/model", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name", "node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type",
)  # fmt: skip
FAMILIES: Final = ("karpenter.k8s.aws/instance-family",)
BRANDS: Final = frozenset((
    "nvidia", "amd", "intel", "geforce", "rtx", "gtx", "tesla", "radeon", "instinct", "jetson", "gpu", "gpus", "card",
    "graphics", "generation", "edition", "blackwell", "r", "tm", "dgx", "hgx", "shared", "vram",
))  # fmt: skip
FORMS: Final = frozenset((
    "sxm", "sxm2", "sxm4", "sxm5", "sxm6", "oam", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7",
    "tensor", "core",
))  # fmt: skip
SAME: Final = {"mobile": "laptop", "notebook": "laptop", "maxq": "max-q"}
MOST_NAMED: Final = 6
# What is no GPU in the catalog: (pattern of the name, what it is, where it is served).
ELSEWHERE: Final = (
    (r"gaudi ?[123]?|hl-?\d{3}|hpu", "an Intel Gaudi accelerator", "Intel's plug-ins for Gaudi serve on it"),
    (r"(?:google |cloud )?tpu.*|v[2-7][ep](?:-.*)?|ct[56].*|trillium|ironwood", "a TPU", "JetStream serves on it"),
    (r"(?:aws )?(?:trainium|inferentia|neuron).*|(?:trn|inf)[12].*", "an AWS chip", "AWS's plug-ins serve on it"),
    (r"(?:huawei )?(?:ascend.*|910[abc]\d?|npu)", "an Ascend NPU", "Huawei's plug-ins for Ascend serve on it"),
    (r"cpu|x86(?:_64)?|xeon.*|epyc.*|graviton.*", "a CPU, not a GPU", "llama.cpp and Ollama serve on it"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Named:
    """What a name stands for; the count is None if no number was written, the instance if none was named."""

    spec: GpuSpec
    count: int | None = None
    instance: Instance | None = None


def read(text: str) -> Named:
    """A GPU with its number. Raises UsageError for a name without a meaning, or with two."""
    name = without_label(text)
    machine = instance(name)
    if machine is not None:
        return Named(gpu(machine.gpu), machine.count, machine)
    spec = find(name)
    if spec is not None:
        return Named(spec)
    for count, board in splits(name):
        machine = instance(board)
        if machine is not None:
            return Named(gpu(machine.gpu), count * machine.count, machine)
        spec = find(board)
        if spec is not None:
            return Named(spec, count)
    raise unknown(text)


def find(text: str) -> GpuSpec | None:
    """One GPU by its name; None: no name is like that. Raises UsageError for a name of several."""
    own = entries.resolve(entries.locate("gpus.yaml"), text.strip())
    if own is not None:
        return gpu(own)
    name = without_label(text)
    if name.lower() in GKE:
        return gpu(GKE[name.lower()])
    part = slices.split(name)
    if part is not None and part[0]:
        return slice_by(*part, text)
    chip = apple.split(name)
    if chip is not None:
        return mac_by(*chip, text)
    near = candidates(name)
    if not near and len(wide := wider(name)) > 1:
        raise ambiguous(text, wide)
    if len(near) > 1:
        raise ambiguous(text, near)
    return gpu(near[0]) if near else None


def without_label(text: str) -> str:
    """A label's value, as a tool prints it: "nvidia.com/gpu.product=NVIDIA-L4" is NVIDIA-L4, "RTX 5070 Ti, 16303 MiB"
    has 16gb, and "M1 (MPS)" is M1.
    """
    label, sign, value = text.strip().replace(": ", "=", 1).partition("=")
    name = value.strip().strip("\"'") if sign and label.strip() in LABELS else text.strip()
    name = re.sub(r"(?i)([\d,]*\d) ?MiB\b", lambda match: f"{round(int(match[1].replace(',', '')) / 1024)}gb", name)
    name = re.sub(r"(?i)\b(\d{1,3}\.\d+) ?GiB\b", lambda match: f"{round(float(match[1]))}gb", name)
    return re.sub(r"(?i)\bsm_?\d{2,3}\b|\((?![^()]*\d ?g)(?!r\)|tm\)|c\))[^()]*\)", " ", name).strip()


def counted(text: str) -> tuple[int | None, str]:
    """(number, GPU name) of a text that has both or names an instance; (None, the text) of any other."""
    try:
        named = read(text)
    except UsageError:
        return None, text
    if named.count is None:
        return None, text
    if named.instance is not None:
        return named.count, named.spec.name
    readings = splits(without_label(text))
    return next((count, board) for count, board in readings if count == named.count and find(board) == named.spec)


def splits(text: str) -> Iterator[tuple[int, str]]:
    """Ways to read a number of GPUs in a text: 8xh100, 8*h100, "8 h100", h100:8, h100x8."""
    number, times = r"([1-9][0-9]{0,3})", r"\s*[xX×*]\s*"
    for pattern, order in (
        (rf"(\S[^:]*?)\s*:\s*{number}", (2, 1)), (rf"(\S.*?){times}{number}", (2, 1)),
        (rf"{number}{times}(\S.*)", (1, 2)), (rf"{number}\s+(\S.*)", (1, 2)), (rf"gpu_{number}x_(\S.*)", (1, 2)),
    ):  # fmt: skip
        match = re.fullmatch(pattern, text.strip())
        if match is not None:
            yield int(match[order[0]]), match[order[1]]


# --- boards -----------------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """The words of a name in lower case, without vendors' and brands'."""
    plain = re.sub(r"\((?:r|tm|c)\)|[®™©]", " ", text.lower()).replace("max-q", "maxq")
    words = (SAME.get(word, word) for word in re.split(r"[\s_/,()\[\]-]+", plain) if word)
    return [word for word in words if word not in BRANDS]


def size_of(words: list[str]) -> tuple[int | None, list[str]]:
    """(the memory that a name states in GB, its other words): 80gb, 24g, or 24 gb."""
    text = " ".join(words)
    match = re.search(r"(?:^|\s)([1-9][0-9]{0,3})\s?(?:gb|gib|g)(?=\s|$)", text)
    if match is None:
        return None, words
    return int(match[1]), (text[: match.start()] + text[match.end() :]).split()


@cache
def spoken() -> tuple[dict[str, set[str]], dict[str, set[frozenset[str]]]]:
    """(own names by every spelling without spaces, sets of words by own name) of the boards in gpus.yaml."""
    spellings: dict[str, set[str]] = {}
    sets: dict[str, set[frozenset[str]]] = {}
    path = entries.locate("gpus.yaml")
    texts = entries.sections(path)
    for name, text in texts.items():
        device = re.findall(r'^  device_name: "([^"]*)"$', text, re.M)
        aliases = re.findall(r"^  aliases: \[(.*)\]$", text, re.M)
        phrases = [name, *device, *",".join(aliases).split(",")]
        stem = re.sub(r"-[0-9]+g$", "", name)
        if entries.resolve(path, stem) is None:  # of a name that says the memory
            phrases.append(stem)
        for phrase in filter(None, (part.strip().strip("'\"") for part in phrases)):
            words = words_of(phrase)
            for spelling in (joined(re.split(r"[\s_-]+", phrase.lower())), joined(words)):
                spellings.setdefault(spelling, set()).add(name)
            sets.setdefault(name, set()).add(frozenset(size_of(words)[1]))
    return spellings, sets


def joined(words: Iterable[str]) -> str:
    return re.sub(r"[^a-z0-9]", "", "".join(words))


def candidates(text: str) -> list[str]:
    """Own names of the boards that a text may mean, in the file's order."""
    spellings, sets = spoken()
    words = words_of(text)
    listed = next(filter(None, (entries.resolve(entries.locate("gpus.yaml"), sign.join(words)) for sign in "- ")), None)
    if listed is not None:
        return [listed]
    whole = joined(words)
    if whole in spellings:
        return within(spellings[whole], None)
    size, words = size_of(words)
    for phrase in (words, [word for word in words if word not in FORMS]):
        for spelling in dict.fromkeys((joined(phrase), singular(joined(phrase)))):
            if names := within(spellings.get(spelling, ()), size):
                return names
        if phrase and (names := within((name for name, own in sets.items() if frozenset(phrase) in own), size)):
            return names
    return []


def singular(word: str) -> str:
    """h100s is h100; 4080s is left, which is short for another card than the 4080."""
    return word[:-1] if re.fullmatch(r"[a-z].*[0-9]s", word) else word


def wider(text: str) -> list[str]:
    """Own names of the boards whose names have all words of a text and more: "rtx 6000" is short for three."""
    size, words = size_of(words_of(text))
    if not any(sign.isdigit() for word in words for sign in word):
        return []
    typed = frozenset(words)
    return within((name for name, own in spoken()[1].items() if any(typed < phrase for phrase in own)), size)


def within(names: Iterable[str], size: int | None) -> list[str]:
    """The names whose GPU has the stated memory, in the file's order; all of them if none is stated."""
    known = set(names)
    boards = [name for name in gpu_names() if name in known]
    return boards if size is None else [name for name in boards if gpu(name).nominal_memory == size * GIB]


# --- slices and Macs --------------------------------------------------------------------------------------------------


def slice_by(whole: str, profile: str, text: str) -> GpuSpec:
    """The MIG slice of a GPU; of "a100" and its kind that whose profile has this name."""
    spec = find(whole)
    if spec is None:
        raise unknown(text)
    chip = spec.name.split("-")[0]  # of one name, unless it is a brand: rtx
    family = [name for name in slices.WHOLE if name == spec.name or (name.split("-")[0] == chip and chip not in BRANDS)]
    known = family if joined(words_of(whole)) == chip else [spec.name]
    having = [name for name in known if profile in slices.profiles(name)]
    sizes = {slices.profiles(name)[profile].parts * 100 // slices.WHOLE[name].parts for name in having}
    if spec.name in having and len(sizes) == 1:
        return slices.slice_of(spec.name, profile)
    if len(having) == 1:
        return slices.slice_of(having[0], profile)
    if having:
        raise ambiguous(text, [f"{name}-{profile}" for name in having])
    own = [name for name in (spec.name, *family) if slices.profiles(name)]
    if not own:
        raise UsageError(
            f"gpu {printable(text, 60)!r}",
            f"{spec.name} cannot be divided into MIG slices",
            f"name it whole: {spec.name}",
        )
    raise UsageError(
        f"gpu {printable(text, 60)!r}", f"{own[0]} has no such slice", f"it has {', '.join(slices.profiles(own[0]))}"
    )


def mac_by(chip: str, size: int | None, text: str) -> GpuSpec:
    row = apple.CHIPS.get(chip)
    if row is None:
        raise UnknownNameError(
            f"gpu {printable(text, 60)!r}", "not in the catalog", f"chips of Macs are {', '.join(apple.CHIPS)}"
        )
    if size not in row.sizes:
        names = [f"{chip}-{own}g" for own in row.sizes]
        problem = "does not say how much memory it has" if size is None else f"no Mac with {chip} has {size} GB"
        raise UsageError(f"gpu {printable(text, 60)!r}", problem, f"write {', '.join(names[:-1])} or {names[-1]}")
    return apple.mac(chip, size)


# --- labels -----------------------------------------------------------------------------------------------------------


def gpu_of_label(label: str, value: str) -> str | None:
    """The own name of the GPU that a node's label names; None: it names none that is known, or several."""
    if label in FAMILIES:
        return gpu_of_family(value)
    if label not in LABELS:
        return None
    if label == "karpenter.k8s.aws/instance-gpu-name" and value in KARPENTER:
        return KARPENTER[value]
    try:
        return read(value).spec.name
    except UsageError:
        return None


# --- refusals ---------------------------------------------------------------------------------------------------------


def ambiguous(text: str, names: list[str]) -> UsageError:
    listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) <= MOST_NAMED else f"one of {', '.join(names)}"
    return UnknownNameError(f"gpu {printable(text, 60)!r}", f"fits {len(names)} GPUs", f"write {listed}")


def unknown(text: str) -> UsageError:
    """The refusal of a name: what it is if it is no GPU of the catalog, else with the closest names."""
    subject, name = f"gpu {printable(text, 60)!r}", without_label(text)
    for pattern, kind, remedy in ELSEWHERE:
        if re.fullmatch(pattern, re.sub(r"[\s_]+", " ", name.lower())):
            return UnknownNameError(subject, f"is {kind}, of whose memory no rule is known", remedy)
    size, words = size_of(words_of(name))
    if size is not None and not words:
        same = [own for own in gpu_names() if gpu(own).nominal_memory == size * GIB and gpu(own).offered]
        remedy = f"write --gpu-memory {size}GiB for exactly this much" + (
            f", or a GPU of this size: {', '.join(same[:MOST_NAMED])}" if same else ""
        )
        return UnknownNameError(
            subject, "is a size, and no GPU has all of its published size to give: not in the catalog", remedy
        )
    near = wider(name) or entries.suggestions(entries.locate("gpus.yaml"), " ".join(words_of(name)) or name)
    near = near or entries.suggestions(entries.locate("gpus.yaml"), name)
    if re.search(r"\.[a-z0-9]*(?:xlarge|metal)|gpu-\d|^standard_|^[vb]m\.", name.lower()):
        from difflib import get_close_matches

        near = [instances()[match].name for match in get_close_matches(key(name), instances(), n=3, cutoff=0.5)]
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else "`kvplan gpus` lists the known ones; --gpu-memory 24GiB plans any other"
    )
    return UnknownNameError(subject, "not in the catalog", hint)
