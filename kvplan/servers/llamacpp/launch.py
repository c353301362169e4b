"""The command that starts exactly the planned llama.cpp server."""

from kvplan.models.catalog import model_id
from kvplan.servers.llamacpp.asked import USUAL_TYPE
from kvplan.servers.llamacpp.command import DRAFTING, OWN_LAYERS
from kvplan.servers.plans.plan import Plan
from kvplan.servers.words.arguments import flag_words

program = ("llama-server",)
image = "ghcr.io/ggml-org/llama.cpp:server-cuda"
port = 8080  # common/common.h
worker = 0


def words(plan: Plan) -> list[str]:
    """--fit chooses what is left out as it did here, if the memory is as planned; the context is stated."""
    request = plan.request
    stated = {"max_model_len": plan.capacity.tokens}
    file = request.spec.served_name
    named = ["--model", file if file.endswith(".gguf") else file_name(plan)]
    if (draft := request.draft) is not None:
        kind, is_file = request.args.draft_quant or USUAL_TYPE, draft.served_name.endswith(".gguf")
        name = draft.served_name if is_file else f"{model_id(draft).rpartition('/')[2]}-{kind}.gguf"
        named += ["--model-draft", name, "--spec-type", DRAFTING]
    if request.args.speculative_method is not None:
        named += ["--spec-type", OWN_LAYERS]
    return [*program, *named, *flag_words("llamacpp", request.release, request.args, stated)]


def file_name(plan: Plan) -> str:
    """A name for the file that is to be made: "Qwen3-8B-Q4_K_M.gguf"."""
    return f"{model_id(plan.request.spec).rpartition('/')[2]}-{plan.settings.dtype}.gguf"
