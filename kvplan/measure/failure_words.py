"""What a person's sentence clearly says about a failure when no log line in the text does.

"OOM during CUDA graph capture" names the phase of start-up; "it does not start, OOM" names none and is ignored.
"""

import re
from collections.abc import Iterator
from typing import Final

LONGEST_SENTENCE: Final = 1_500  # a longer line is a log that lost its newlines

_OOM: Final = re.compile(
    r"(?i)(?<![a-z0-9_])oom(?:s|ed|ing|'s)?(?![a-z0-9_]|[- ]killer|-prevention)|OutOfMemory|"
    r"out[- ]of[- ]?(?:gpu |cuda |device |v?ram )?memory|insufficient (?:free |gpu )?memory"
)
_BEFORE_A_PHASE: Final = (
    r"(?:oom|out of memory|OutOfMemoryError|memory error)\b.{0,40}\b(?:during|while|when|in|at)\b.{0,20}"
)
_SAMPLER: Final = re.compile(r"(?i)sampler[- ]warm|warm\w{0,7}[- ]up (?:the )?sampler")
_CAPTURE: Final = re.compile(
    r"(?i)(?:during|at|in|by|while|when|phase|large|caus\w{1,3})\b.{0,30}"
    r"(?:cuda[- ]?graphs? captur|captur\w{1,4} (?:the |of )?(?:cuda|model)|graph[- ]captur)|graph[- ]capture[- ]oom|"
    r"\boom(?:ed|s)? (?:at|during|in|on) (?:graph )?capture\b"
)
_EAGER: Final = re.compile(
    r"(?i)\bworks? (?:fine )?(?:with|when|if|using)\b.{0,40}(?:enforce[-_ ]eager|eager mode|disable-cuda-graph)"
)
_LOADING: Final = re.compile(
    rf"(?i){_BEFORE_A_PHASE}(?:weights?[- ]loading|loading (?:the )?(?:model )?weights?|load_weights)"
)
_PROFILE: Final = re.compile(
    rf"(?i){_BEFORE_A_PHASE}(?:memory[-_ ]profil|profil(?:e|ing)[-_ ]run|initial (?:memory )?profil)"
)
_PREFILL: Final = re.compile(
    r"(?i)\bprefill(?:ing)?[- ](?:stage |phase )?oom|oom\b.{0,20}\b(?:during|in|at)\b.{0,10}\bprefill"
)
_SERVING: Final = re.compile(
    r"(?i)(?:\boom\b|out of (?:gpu )?memory|OutOfMemoryError)\b.{0,30}\b(?:during|while|in|at)\b.{0,10}"
    r"\b(?:inference|inferenc\w{1,3}|serving|generat\w{2,3})\b"
)
_RETRACT: Final = re.compile(
    r"(?i)(?:kv|cache|pool|request|decode)\b.{0,80}\bretract(?:s|ed|ion|ions|ing)?\b|"
    r"\bretract(?:s|ed|ion|ions|ing)?\b.{0,80}\b(?:request|kv|pool)"
)
_KV_CHECK: Final = re.compile(
    r"(?i)\b(?:oom\w{0,3}|fail\w{0,3}|crash\w{0,3}|dies|stops?)\b.{0,30}\bkv[-_ ]?cache check\b|"
    r"\bkv[-_ ]?cache check\b.{0,30}\b(?:fail|refus|oom)"
)
_FAILS: Final = r"(?:not support(?:ed)?|unsupported|n't support(?:ed)?|crash\w{0,3}|fails?)"
_KV_DTYPE: Final = re.compile(
    rf"(?i){_FAILS}\b.{{0,60}}(?:kv[-_ ]cache[-_ ]dtype|fp8 kv[-_ ]?cache)|"
    rf"(?:kv[-_ ]cache[-_ ]dtype|kv[-_ ]?cache fp8|fp8 kv[-_ ]?cache)\b.{{0,40}}{_FAILS}"
)
# As a shell prints it, in English and Chinese, or as a person says it; not ray's list of "potential root causes".
_KILLED: Final = re.compile(
    r"(?i)^(?!.*(?:root causes|SIGSEGV|SIGKILL)).*\boom[- ]killer\b|(?:^|[\]\s])(?:Killed|\u5df2\u6740\u6b7b)\s*$"
)
_HOST: Final = re.compile(
    r"(?i)\b(?:ram|cpu(?: memory| ram)?|host(?: memory| ram)?|system (?:memory|ram))[- ](?:oom|out[- ]of[- ]memory)\b|"
    r"\b(?:runs?|ran|running) out of (?:host|system|cpu) (?:memory|ram)\b"
)


# What a line may say, and the words that say it.
WORDS: Final[dict[str, re.Pattern[str]]] = {
    "kill": _KILLED,  # the OS killed a process, as it does when host memory runs out
    "host": _HOST,  # host memory ran out, not GPU memory
    "memory": _OOM,  # memory ran out
    "retraction": _RETRACT,  # requests were retracted because the KV cache was full
    "kv check": _KV_CHECK,  # the server's check of the KV cache against one request failed
    "kv dtype": _KV_DTYPE,  # a KV cache dtype fails
}


def tells_of(what: str, line: str) -> bool:
    """True if a line says this of `WORDS`; for a dtype a command that only contains the flag does not count."""
    return WORDS[what].search(line) is not None and (what != "kv dtype" or line.count(" --") <= 1)


def parts_told(line: str) -> Iterator[str]:
    """Phases of start-up that a sentence about running out of memory names, under the names in `FRAMES`."""
    if _SAMPLER.search(line):
        yield "oom_sampler_warmup"
    if _CAPTURE.search(line) or _EAGER.search(line):
        yield "capture"
    if _LOADING.search(line):
        yield "load"
    if _PROFILE.search(line):
        yield "profile"
    if _PREFILL.search(line):
        yield "prefill"
    if _SERVING.search(line):
        yield "serving"
