"""A fix in a line: its flags, and what the server then holds."""

from kvplan.core.files import printable
from kvplan.documents.cure import CureDocument

RANKS = "tensor_parallel_size"
NOTICED = ("max_num_seqs", "max_model_len")  # kinds whose numbers alone do not show the effect on users


def cure_text(cure: CureDocument, *, runs: bool = False) -> str:
    """ "--max-model-len 34720: 1.01 users of 34,720 tokens"; for a running server, also the effect on users."""
    text = effect_text(cure)
    return f"{text}; {cure['text']}" if runs and cure["effect"] and cure["kind"] in NOTICED else text


def effect_text(cure: CureDocument) -> str:
    if not cure["flags"]:
        return cure["text"]
    flags = " and ".join(printable(flag) for flag in cure["flags"])
    effect = cure["effect"]
    if effect is None:
        way = "" if any(" " in flag for flag in cure["flags"]) or cure["way"] == "add" else f"{cure['way']} "
        return f"{way}{flags}: {cure['text']}"
    ranks = next((flag.split()[-1] for flag in cure["flags"] if cure["kind"] == RANKS and " " in flag), None)
    on = "" if ranks in (None, "1") else f" on {ranks} GPUs"
    users = f"{effect['users']:,.1f}" if effect["users"] < 100 else f"{effect['users']:,.0f}"
    if 0.95 <= effect["users"] < 1.05:
        length = "that length" if len(cure["flags"]) == 1 and cure["kind"] == "max_model_len" else ""
        return f"{flags}: 1 user at {length or format(effect['max_model_len'], ',') + ' tokens'}{on}"
    return f"{flags}: {users} users at {effect['max_model_len']:,} tokens{on}"
