"""Models that a release of vLLM does not run, or whose caches are sized only from a later one on."""

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.start import Refusal, unsupported
from kvplan.servers.vllm.changes import since

# The last release that supported each architecture: only language models, as those are sized here. Source: vLLM 0.33
# model_executor/models/registry.py, which names the release when it rejects one.
LAST_RELEASE = {
    "MllamaForConditionalGeneration": (0, 10), "Phi4FlashForCausalLM": (0, 10), "Phi3SmallForCausalLM": (0, 9),
    "QWenLMHeadModel": (0, 23), "InternLMForCausalLM": (0, 23), "XverseForCausalLM": (0, 23),
    "BambaForCausalLM": (0, 23), "Dots1ForCausalLM": (0, 23), "MiniMaxForCausalLM": (0, 23),
    "MiniMaxText01ForCausalLM": (0, 23),
    "MiniMaxM1ForCausalLM": (0, 23), "BaiChuanForCausalLM": (0, 23), "BaichuanForCausalLM": (0, 23),
    "AquilaModel": (0, 24), "AquilaForCausalLM": (0, 24), "Grok1ForCausalLM": (0, 24), "Grok1ModelForCausalLM": (0, 24),
    "TeleChatForCausalLM": (0, 25), "PersimmonForCausalLM": (0, 25), "Plamo2ForCausalLM": (0, 26),
    "OuroForCausalLM": (0, 26), "ArcticForCausalLM": (0, 28), "MPTForCausalLM": (0, 28), "MptForCausalLM": (0, 28),
    "RWForCausalLM": (0, 28), "StableLMEpochForCausalLM": (0, 28),
}  # fmt: skip


# Architectures in published configs that no release has a class for. Source: the same file.
NO_CLASS = ("LlavaLlamaForCausalLM",)

# The first release whose caches are sized this way, if earlier ones page them differently or lack the model.
FIRST_SIZED: dict[str, tuple[int, ...]] = {
    "MiniMaxM1ForCausalLM": (0, 11),
    "MiniMaxText01ForCausalLM": (0, 11),
    "MiniMaxForCausalLM": (0, 11),
    "Glm5NextForConditionalGeneration": (0, 31),
    "Glm5NextForCausalLM": (0, 31),
}


def check(spec: ModelSpec, release: Version, sm: int) -> None:
    """Reject a model whose caches a release sizes in a way that is not modeled."""
    first = FIRST_SIZED.get(spec.architecture)
    if spec.is_pooled and sm // 10 != 9:  # other kernels read whole rows
        first = since("pooled_pages")
    if first is not None and release.number < first:
        raise UnsupportedModelError(
            spec.name,
            f"how vLLM {release.number[0]}.{release.number[1]} pages the caches of {spec.architecture} is not modeled",
            f"use --engine vllm@{first[0]}.{first[1]}",
        )


def refusal(spec: ModelSpec, release: Version) -> Refusal | None:
    """Return a refusal of an architecture that only earlier releases run, or none does."""
    if spec.architecture in NO_CLASS:
        return unsupported(f"there is no class for {spec.architecture}")
    last = LAST_RELEASE.get(spec.architecture)
    if last is None or release.number <= last:
        return None
    return unsupported(f"it does not run {spec.architecture}; {last[0]}.{last[1]} was the last to do so")
