"""The command that starts the planned Ollama server, with its variables; parameters of a model are its Modelfile's."""

from kvplan.servers.ollama.flags import VARIABLES
from kvplan.servers.plans.plan import Plan

program = ("ollama", "serve")
image = "ollama/ollama:{release}"
port = 11434
worker = 0


def words(plan: Plan) -> list[str]:
    values = {name: getattr(plan.request.args, argument) for name, (argument, _) in VARIABLES.items()}
    texts = {"on": "1", "off": "0"}
    stated = {name: texts.get(value, value) for name, value in values.items() if value not in (None, "auto")}
    return [*(f"{name}={value}" for name, value in stated.items()), *program]
