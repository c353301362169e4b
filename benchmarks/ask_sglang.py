"""Ask SGLang's own planning code about configs whose config class lies in the checkpoint, too.

    ORACLE/venv/bin/python benchmarks/ask_sglang.py SCRIPTS CASES.jsonl --models FOLDER -o ROWS.jsonl

SCRIPTS is the folder of the oracle's scripts, ORACLE the one its setup.sh made; what follows SCRIPTS goes to its
sglang/ask.py. A model type that neither Transformers nor SGLang has a class for gets one that keeps every key, with
configs for its parts: what a checkpoint's own class would hold. Processors are not asked, and states that a model
leaves to one of SGLang's own configs are as there.
"""

import json
import sys
import traceback
from pathlib import Path

PARTS = (
    "text_config", "llm_config", "language_config", "vision_config", "audio_config", "audio_encoder_config",
    "thinker_config",
)  # fmt: skip
BASES = {"mimo": "Qwen2Config"}  # as the remote class does
OWN = ("step3p5",)  # the checkpoint's class is taken, although Transformers has one


def plain(kind, base):
    """A class of config that keeps every key."""
    from transformers import AutoConfig, PretrainedConfig

    def config_of(part):
        if not isinstance(part, dict):
            return part
        try:
            return AutoConfig.for_model(**part)
        except (KeyError, TypeError, ValueError):
            return PretrainedConfig(**part)

    def init(self, **keys):
        base.__init__(self, **{key: config_of(value) if key in PARTS else value for key, value in keys.items()})

    name = "Plain_" + "".join(c if c.isalnum() else "_" for c in kind)
    return type(name, (base,), {"model_type": kind, "__init__": init})


def kinds(config):
    """Every model_type of a config and of its parts."""
    if isinstance(config, dict):
        yield from [config["model_type"]] if isinstance(config.get("model_type"), str) else []
        for part in config.values():
            yield from kinds(part)


def register(folders):
    """Plain classes for the types of all configs that nobody has a class for."""
    import transformers
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for folder in folders:
        for file in sorted(Path(folder).glob("*/config.json")):
            for kind in kinds(json.loads(file.read_text(encoding="utf-8"))):
                if kind in OWN or (kind not in CONFIG_MAPPING and kind not in _CONFIG_REGISTRY):
                    base = getattr(transformers, BASES.get(kind, "PretrainedConfig"))
                    transformers.AutoConfig.register(kind, plain(kind, base), exist_ok=True)


def main():
    scripts = Path(sys.argv.pop(1))
    own = sys.path[0]
    sys.path[:1] = [str(scripts / "sglang"), str(scripts / "common"), own]
    import ask
    import oracle_cases
    import pretend
    import sglang_weights

    sys.path.remove(own)  # it has files of modules' names

    arguments, cases = oracle_cases.finish(oracle_cases.parse(ask.__doc__, ask.EXAMPLE), pretend.SOURCE)

    def load(gpu):
        ask.load(gpu)
        register(arguments.models)

    def answer(case, configs):
        """The oracle's answer, with the bytes of the model's own parameters, or why they could not be made."""
        servers = []
        ask.Server = kept(OracleServer, servers)
        row = ask.answer(case, configs)
        try:
            row["weights"] = sglang_weights.weights(servers[0])
        except Exception as error:
            traceback.print_exc()
            row["weights"] = {"failed": ask.describe_failure(error)}
        return row

    OracleServer = ask.Server
    return oracle_cases.answer_all(arguments, cases, pretend.HEAD, load, answer, pretend.NOTES, ask.describe_failure)


def kept(server, servers):
    """The oracle's class of a server, whose instances are put in a list."""

    def init(self, *arguments):
        server.__init__(self, *arguments)
        servers.append(self)

    return type("Kept", (server,), {"__init__": init})


if __name__ == "__main__":
    sys.exit(main())
