"""The physical limit of serving a dense model: what it cannot avoid to read and multiply, at the device's best rates.

A decode step reads every weight that takes part (all but an embedding table of its own, of which it looks up a row per
sequence) and multiplies each with the batch, so it takes at least the longer of weight bytes / bandwidth and
2 * parameters * sequences / matrix rate; and it reads the KV of all sequences, KV bytes / bandwidth. A prompt is held
against its products alone: 2 * parameters per token, and those of attention per pair of tokens that see each other.
Both rates are measured here: a copy's bytes read and written per second, and a large bfloat16 product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_stages.stage import row
from benchmarks.gpu_stages.timing import copy_bandwidths, matmul_rates
from engine import Engine
from kvplan.models.spec import FullAttention


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model must do, and how fast the device is at it.

    weights, kv_per_token  bytes; parameters: weights that take part
    bandwidth, matmul      bytes and floating-point operations per second, measured
    head                   of the parameters, those of the vocabulary: in a prompt only the last token meets them
    per_pair               operations of attention, in all layers, for each pair of tokens that see each other
    """

    weights: int
    parameters: int
    kv_per_token: int
    bandwidth: float
    matmul: float
    head: int = 0
    per_pair: int = 0

    def step_s(self, num_seqs: int, length: float) -> float:
        """Least seconds of a decode step of so many sequences, each of so many tokens."""
        in_layers = max(self.weights / self.bandwidth, 2 * self.parameters * num_seqs / self.matmul)
        return in_layers + num_seqs * length * self.kv_per_token / self.bandwidth

    def prefill_s(self, num_seqs: int, length: int) -> float:
        """Least seconds for the prompts of so many sequences, each of so many tokens."""
        products = 2 * (self.parameters - self.head) * length + 2 * self.head
        attention = self.per_pair * length * (length + 1) // 2
        return num_seqs * (products + attention) / self.matmul

    def batch_s(self, requests: Sequence[tuple[int, int]]) -> float:
        """Least seconds for requests of (prompt, output) tokens that all run at once, each until its last token.

        The prompts first, which give each its first token; then a step for each token that the longest output has more.
        """
        prompts = sum(self.prefill_s(1, prompt) for prompt, _ in requests)
        steps = 0.0
        for step in range(1, max(output for _, output in requests)):
            lens = [prompt + step for prompt, output in requests if output > step]
            steps += self.step_s(len(lens), sum(lens) / len(lens))
        return prompts + steps


def limits_of(engine: Engine) -> Limits:
    """From the engine's own tensors; every layer of these models remembers alike, so a block is of all of them."""
    model, memory, spec = engine.runner.model, engine.memory_report(), engine.spec
    weights = memory.weights - (0 if spec.tied else model.embedding.weight.nbytes)
    caches = [cache for layer in spec.layers for cache in layer if isinstance(cache, FullAttention)]
    return Limits(
        weights=weights,
        parameters=weights // model.embedding.weight.itemsize,
        kv_per_token=memory.block_bytes // engine.config.block_size,
        bandwidth=row("", "", copy_bandwidths(engine.device)).value,
        matmul=row("", "", matmul_rates(engine.device)).value,
        head=spec.vocab_size * spec.hidden_size,
        per_pair=sum(2 * spec.num_heads * (cache.head_dim + cache.head_dim_v) for cache in caches),
    )


def figures(limits: Limits) -> dict[str, float]:
    """For a stage's numbers."""
    return {
        "weights_read": limits.weights,
        "kv_per_token": limits.kv_per_token,
        "copy_bytes_per_s": limits.bandwidth,
        "matmul_flops": limits.matmul,
    }
