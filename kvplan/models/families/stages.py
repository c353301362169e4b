"""Which pipeline stages hold what lies outside the layers, where a server's class does not put it where it is used.

Source: the parameters vLLM 0.33 holds on each of three stages, for a config of every model_type at hand; of others, its
model_executor/models (an embedding, a head or a norm that is made without asking for the stage).
"""

from dataclasses import replace

from kvplan.models.spec import Place, Weight

# Their classes make embedding, head and final norm on every stage.
EVERYTHING = frozenset(
    {
        "bloom", "chatglm", "dbrx", "falcon", "gemma", "gptj", "granitemoe", "granitemoehybrid", "granitemoeshared",
        "internlm2", "jamba", "mamba", "mamba2", "minicpm", "mixtral", "nemotron_h", "olmo_hybrid", "olmoe", "opt",
        "orion", "phimoe", "stablelm", "stablelm_epoch", "zamba2",
    }
)  # fmt: skip
# Groups of single classes that stand on every stage.
GROUPS: dict[str, tuple[str, ...]] = {
    "deepseek_v4": ("mlp",),  # what mixes the copies of the hidden state before the head
    "gemma4_text": ("embedding", "norm"),
    "lfm2": ("embedding",),
    "lfm2_moe": ("embedding",),
    "qwen3_next": ("lm_head",),
}


def placed(weight: Weight, model_type: str) -> Weight:
    """The weight with the stages that hold it."""
    if model_type in EVERYTHING or weight.group in GROUPS.get(model_type, ()):
        return replace(weight, place=Place.EVERY)
    return weight
