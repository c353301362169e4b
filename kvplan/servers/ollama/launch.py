"""The command that starts exactly the planned Ollama server: its variables; a model's parameters are its Modelfile's."""

from kvplan.servers.ollama.variables import ARGUMENTS
from kvplan.servers.plans.plan import Plan
from kvplan.servers.words.arguments import DEFAULTS

program = ("ollama", "serve")
image = "ollama/ollama:{release}"
port = 11434
worker = 0


def words(plan: Plan) -> list[str]:
    args = plan.request.args
    stated = {name: value for name in DEFAULTS if (value := getattr(args, name)) not in (DEFAULTS[name], "auto")}
    variables = [f"{name}={stated[argument]}" for name, (argument, _) in ARGUMENTS.items() if argument in stated]
    return [*(word.replace("FLASH_ATTENTION=on", "FLASH_ATTENTION=1").replace("=off", "=0") for word in variables),
            *program]  # fmt: skip
