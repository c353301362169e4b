"""The command that starts exactly what was planned, with the variables that its release is started with."""

from kvplan.models.catalog import model_id as model_id
from kvplan.planning.plan import Plan
from kvplan.servers import environment
from kvplan.servers.base import server_of


def serve_command(plan: Plan) -> list[str]:
    """The command as a list of words. What the plan depends on is pinned even where it is this release's default."""
    variables = environment.assignments(plan.request.release, plan.request.args)
    return [*variables, *server_of(plan.request.release.engine).launch(plan)]


def context_word(words: list[str], flag: str) -> str:
    """The context that a command asks for with its server's flag, as it is written there."""
    return words[words.index(flag) + 1]
