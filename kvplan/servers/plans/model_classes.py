"""Whether a server has a class for a model: one of its registry, Transformers' in its place, or none.

Source: vLLM 0.33 model_executor/models/registry.py (inspect_model_cls), SGLang 0.5.23 srt/model_loader/utils.py
(get_model_architecture); asked of both with configs of each kind (tests/servers/test_model_classes.py).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.releases import names_in

TRANSFORMERS: Final = Path(__file__).with_name("transformers.txt")  # 5.19's that name a switch for their attention
SETTABLE: Final = "settable"  # its attention can be exchanged, although the class does not say so


def standing(
    request: Request, names: Mapping[str, str], others: Iterable[str] = (), *, settable: bool = False,
    absent: bool = False, plugin: str = "",
) -> Refusal | str:  # fmt: skip
    """A refusal of a model without a class, or a note on one that was not compared; empty for all others.

    names     the newest release's registry, with a word on each name; an earlier release is not refused for it
    others    classes that stand for the architecture
    settable  Transformers' class need not say that its attention can be exchanged
    absent, plugin  no release has the class, or a plug-in of this name registers it
    """
    spec, name, release = request.spec, request.spec.architecture, request.release
    if absent:
        return missing(name or spec.model_type)
    _, _, last = names.get(name, "").partition("until ")
    if last and release.number > tuple(map(int, last.split("."))):
        return unsupported(f"it does not run {name}; {last} was the last to do so")
    if not name or last or not release.is_compared:
        return ""
    listed = spec.config.get("architectures")
    stated = [str(item) for item in listed] if isinstance(listed, list) else []
    words = {names[item].partition(" ")[0] for item in (name, *stated, *others) if item in names}
    if "compared" in words:
        return ""
    note = f"not compared for {release.label}: {name}"
    if "" in words:
        return f"{note}, sized by its config and the rules for all classes"
    if plugin:
        return f"{note}, which a plug-in of {plugin} adds"
    word = names_in(TRANSFORMERS).get(name)
    if word == "" or (word == SETTABLE and settable):  # states do not run by way of Transformers' attention interface
        return missing(name) if spec.has_states else f"{note}, for which Transformers' class runs"
    own = spec.config.get("auto_map")
    if isinstance(own, Mapping) and any(str(key).startswith("AutoModel") for key in own):
        return f"{note}, for which the checkpoint's own code may run (auto_map)"
    return missing(name)


def missing(name: str) -> Refusal:
    return unsupported(f"there is no class for {name}; use another server, or correct architectures in its config")
