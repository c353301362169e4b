"""Log reader for SGLang: its messages, its argument list, the command that it quotes."""

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Final

from kvplan.core.files import printable
from kvplan.servers.logs.log import NOT_ASKED, Drafting, Logs, ServerLog
from kvplan.servers.plans.plan import Request
from kvplan.servers.sglang import log_rows, rules
from kvplan.servers.sglang.arguments import OTHERS
from kvplan.servers.sglang.command import EXPERTS, KNOWN, MODEL, NAMES, is_switch
from kvplan.servers.sglang.drafts import ALGORITHMS
from kvplan.servers.sglang.flags import FLAGS as OWN
from kvplan.servers.sglang.log_wordings import WORDINGS
from kvplan.servers.sglang.models import UNKNOWN_BACKEND
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs, lacking, plain_method, spellings
from kvplan.servers.words.command import flag_name, flag_text, is_value

LISTS: Final = ("server_args=ServerArgs(", "server_args={")  # of 0.5.23: resolved values, as a dictionary
# SGLang's name of an argument in its list -> kvplan's; for experts it lists a number of ranks.
LIST_NAMES: Final = {name: argument for name, argument in spellings("sglang").items() if argument != EXPERTS}
# Its flags -> the name in its list of arguments. Source: sglang 0.5 srt/server_args.py.
FLAGS: Final = {
    name: flag.names[0] for name, flag in ((name, OWN[argument]) for name, argument in NAMES.items())
    if name != flag.earlier
} | {"model": "model_path"}  # fmt: skip
# Its names of a 4-bit KV cache with a scale of a byte per 16 values, by release -> kvplan's.
FP4_KV: Final = dict.fromkeys(("fp4_e2m1", "fp4_mx_block16"), "nvfp4")
RANKS: Final = ("tp_size", "pp_size", "dp_size")  # read as defaults too: an option may contradict them
# A comparison reports DP attention and drafts separately, so they are not repeated.
SAID_ELSEWHERE: Final = ("enable_dp_attention", "speculative_")
# Its draft numbers -> the arguments they set.
DRAFT_NUMBERS: Final = {
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
}
RELEASE: Final = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?(?![0-9])")


def engine(log: ServerLog) -> str:
    """Return `sglang@0.4.3`; with no release, or one older than those known, the newest rules apply."""
    match = RELEASE.match(log.text("version") or "")
    if match is None or not rules.OLDEST <= (int(match[1]), int(match[2])) <= rules.NEWEST:
        return "sglang"
    return f"sglang@{match[0].removeprefix('v')}"


def label(log: ServerLog, request: Request) -> str:
    version = log.text("version")
    return "sglang" if version is None else f"sglang {version}"


def notes(log: ServerLog, args: EngineArgs, gpu_known: bool) -> list[str]:
    """Note the basis of a default mem_fraction_static if the log names no release whose rule is known."""
    if not gpu_known or args.mem_fraction_static is not None or engine(log) != "sglang":
        return []
    version = log.text("version")
    release = "its release" if version is None else f"a release that kvplan knows ({printable(version, 40)})"
    newest = "sglang@{}.{}".format(*rules.NEWEST)
    return [
        f"the {log.called} says neither mem_fraction_static nor {release}: the fraction is that of {newest}'s rule; "
        "--engine sglang@0.4.6, or whichever it was, or --mem-fraction-static says it"
    ]


# --- its arguments ----------------------------------------------------------------------------------------------------


def flags(log: ServerLog) -> dict[str, str]:
    """Arguments of its list, which has all of them, requested or resolved: all but defaults are facts."""
    stated = {name: text for name, text in log.flags.items() if text != defaults().get(name) or name in RANKS}
    named = {LIST_NAMES.get(name, name): _plain(text) for name, text in stated.items()}
    values = {name: _value(name, text) for name, text in named.items()}
    chunk, context = log.first("max_batched_tokens"), log.first("context")
    if context is not None:
        values["max_model_len"] = context.text.replace(",", "")
    if chunk is not None:
        values.setdefault("max_num_batched_tokens", chunk.text.replace(",", ""))
    if values.get("attn_dp_size", "1") not in ("1", "None"):  # value of --dp-size with DP attention in 0.5.23's list
        values |= {"data_parallel_size": values["attn_dp_size"], "enable_dp_attention": "True"}
    if values.get("kv_cache_dtype") in FP4_KV:
        values["kv_cache_dtype"] = FP4_KV[values["kv_cache_dtype"]]
    if "page_size" in log.flags:  # the server's actual page size, whatever the backend picks on another GPU
        for phase in ("prefill_attention_backend", "decode_attention_backend"):
            if values.get(phase, "None") == "None":
                values[phase] = log.flags.get("attention_backend", UNKNOWN_BACKEND)
    dropped = {*NOT_ASKED, *lacking("sglang")}
    return {
        name: text
        for name, text in values.items()
        if name in ARGUMENTS and name not in dropped and text not in ("auto", "", "None")
    }


def _value(name: str, text: str) -> str:
    """Translate SGLang's value to that of kvplan's argument: one of its switches may be the inverse."""
    flag = OWN.get(name)
    if flag is None or (name == "max_num_batched_tokens" and text == "-1"):
        return "" if flag is not None else text
    if flag.on is False:
        return {"True": "False", "False": "True"}.get(text, text)
    if isinstance(flag.on, str):
        return flag.on if text == "True" else ""
    return (flag.values or {}).get(text, text)


def _plain(text: str) -> str:
    return text.removeprefix("torch.")


@cache
def defaults() -> dict[str, str]:
    """What ServerArgs of 0.5.23 declares for each of its fields, as a log shows it."""
    lines = resources.files(__package__).joinpath("defaults.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" = ") for line in lines if not line.startswith("#"))
    return {name: text for name, _, text in pairs}


def draft(log: ServerLog) -> Drafting | None:
    algorithm = log.flags.get("speculative_algorithm")
    if algorithm is None:
        return None
    method = plain_method(algorithm.lower())
    method = ALGORITHMS.get(method.upper(), method)
    path = log.flags.get("speculative_draft_model_path", "None")
    if method == "eagle" and path in ("None", "", log.model):
        method = "mtp"
    texts = {name: log.flags.get(key, "") for key, name in DRAFT_NUMBERS.items()}
    counts = {name: int(text) for name, text in texts.items() if re.fullmatch("[1-9][0-9]{0,2}", text)}
    return Drafting(method, algorithm, counts)


# --- the command that started it --------------------------------------------------------------------------------------


def command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    values: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if not word.startswith("--"):
            continue
        name, value = flag_name(word)
        if value is None:
            value = following if is_value(following) and following != "-" else "True"
        values[FLAGS.get(name, name)] = value
    return values, _unsized(words)


def _unsized(words: Sequence[str]) -> list[str]:
    """Flags that are not modeled, as they were typed."""
    unsized = []
    for word in words:
        name = flag_name(word)[0] if word.startswith("--") and not is_value(word) else ""
        known = name in (*NAMES, *MODEL, "revision") or (name in OTHERS and not OTHERS[name].is_refused)
        if name and not known and not name.startswith(SAID_ELSEWHERE):
            unsized.append(flag_text(word))
    return unsized


def argument_of(name: str) -> str:
    return NAMES.get(name, name)


def takes_value(name: str) -> bool:
    return not is_switch(name) if name in KNOWN else not name.startswith(("enable_", "disable_", "no_", "skip_"))


LOGS: Final = Logs(
    wordings=WORDINGS,
    lists=LISTS,
    list_names=("attn_dp_size", "enable_dp_attention", "speculative_algorithm", "speculative_draft_model_path"),
    commands=("-m sglang.launch_server ", "sglang serve "),
    first_words=("Load weight begin. avail mem=", "Load weight end."),
    once=LISTS,
    engine=engine,
    label=label,
    names=LIST_NAMES,
    flags=flags,
    command=command,
    argument_of=argument_of,
    takes_value=takes_value,
    draft=draft,
    notes=notes,
    figures=log_rows.figures,
    rows=log_rows.rows,
    given=log_rows.given,
)
