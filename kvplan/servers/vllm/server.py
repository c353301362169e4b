"""vLLM as the planner sees it: kvplan.servers.base.Server."""

from kvplan.models.spec import ModelSpec
from kvplan.servers.plans import Request
from kvplan.servers.releases import Version, told
from kvplan.servers.vllm import rules
from kvplan.servers.vllm.launch import command as launch
from kvplan.servers.vllm.rules import NEWEST, OLDEST, EngineArgs, Settings
from kvplan.servers.vllm.size import size
from kvplan.servers.vllm.terms import TERMS

__all__ = ["context", "labels", "launch", "name", "release", "rest_last", "seqs_cure", "settings", "size", "terms"]

name = "vllm"
rest_last = False
terms = TERMS


def release(numbers: tuple[int, ...] | None, words: list[str]) -> Version:
    return told(rules.version(NEWEST if numbers is None else (numbers[0], numbers[1])), words)


def labels() -> tuple[str, ...]:
    return ("vllm", *(f"vllm@0.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)))  # the newest first


def context(spec: ModelSpec) -> int:
    return spec.max_model_len


def seqs_cure(spec: ModelSpec, args: EngineArgs, max_num_seqs: int) -> str:
    return TERMS.seqs_flag


def settings(request: Request) -> Settings:
    return rules.resolve(request.spec, request.gpu, request.args, request.release)
