"""Pipeline stages of weights outside the layers, if a server's class does not place them where they are used.

Source: vLLM 0.33's parameters on each of three stages, for an available config of every model_type; for others, its
model_executor/models (an embedding, a head or a norm created regardless of the stage).
"""

from dataclasses import replace

from kvplan.models.spec import Place, Weight

# Their classes create embedding, head and final norm on every stage.
EVERYTHING = frozenset(
    {
        "bloom", "chatglm", "dbrx", "falcon", "gemma", "gpt2", "gptj", "granitemoe", "granitemoehybrid",
        "granitemoeshared", "internlm2", "jamba", "mamba", "mamba2", "minicpm", "mixtral", "nemotron_h", "olmo_hybrid",
        "olmoe", "opt", "orion", "phimoe", "stablelm", "stablelm_epoch", "zamba2",
    }
)  # fmt: skip
# Groups that certain classes have on every stage.
GROUPS: dict[str, tuple[str, ...]] = {
    "deepseek_v4": ("mlp",),  # mixes the copies of the hidden state before the head
    "gemma4_text": ("embedding", "norm"),
    "lfm2": ("embedding",),
    "lfm2_moe": ("embedding",),
    "qwen3_next": ("lm_head",),
}


def placed(weight: Weight, model_type: str) -> Weight:
    """The weight with its pipeline stages."""
    if model_type in EVERYTHING or weight.group in GROUPS.get(model_type, ()):
        return replace(weight, place=Place.EVERY)
    return weight
