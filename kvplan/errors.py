"""Every error kvplan raises on purpose, each with the exit code the command line answers."""


class KvplanError(Exception):
    """Something the user can act on: the message is one line, `<object>: <what is wrong> (<value>); <next step>`."""

    exit_code = 2


class UsageError(KvplanError):
    """A flag or argument that cannot be read or does not go with another one."""


class InvalidInputError(KvplanError):
    """A file (config.json, weights, policy, trace) that is unreadable, malformed or contradicts itself."""


class UnsupportedModelError(KvplanError):
    """A model, layer kind, dtype or quantisation that kvplan cannot size and will not guess."""


class EnvironmentProblem(KvplanError):
    """The machine or the network is at fault: no GPU, driver, permission, Hub access, disk."""

    exit_code = 3


INTERRUPTED, TERMINATED = 130, 143  # exit codes after SIGINT and SIGTERM, as shells count them
