"""What a batch job asks its cluster for: the GPUs and nodes of #SBATCH lines, and the variables that state them.

Source: slurm.schedmd.com/sbatch.html, "Options" and "Output environment variables".
"""

import re
from contextlib import suppress

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.words.command import Note, Resources
from kvplan.servers.words.shell import Variables

_LINE = r"(?m)^[ \t]*#SBATCH[ \t]+-{1,2}([A-Za-z][\w-]*)[ \t=]*([^\s#]*)"
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "C": "constraint"}
_COUNTS = ("gpus-per-node", "gpus", "gpus-per-task")


def job_of(text: str) -> tuple[Variables, Resources | None, list[Note]]:
    """(variables of a job's script, its GPU if one is named, a note if what is named is none that is known)."""
    options = {_SHORT.get(key, key): value for key, value in re.findall(_LINE, text)}
    nodes = whole(options.get("nodes", "").partition("-")[0])
    gres = re.search(r"(?:^|,)gpu:?([^,]*)", options.get("gres", ""))
    key = "gres" if gres else next((key for key in _COUNTS if key in options), "")
    kind, _, number = (gres[1] if gres else options.get(key, "")).rpartition(":")
    kind, number = (kind, number) if number.isdecimal() else (number, "1")
    per_node = whole(number) // nodes if key == "gpus" else whole(number)
    if key == "gpus-per-task":
        tasks = options.get("ntasks-per-node")
        per_node *= whole(tasks) if tasks else max(1, whole(options.get("ntasks", "")) // nodes)
    variables: Variables = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
    if key:
        variables |= {"SLURM_GPUS_ON_NODE": str(per_node), f"SLURM_{key.upper().replace('-', '_')}": number}
    from kvplan.hardware.names import find

    name, flag = (kind, f"--{key}") if kind else (options.get("constraint", ""), "--constraint")
    with suppress(UsageError):
        if name and (spec := find(name)) is not None:
            return variables, Resources(spec.name, f"{flag}: {printable(name, 60)}", None, 1, 1), []
    unknown = Note(f"{flag}: {printable(name, 60)} names no one GPU that kvplan knows; add --gpu")
    return variables, None, [unknown] if kind else []  # a constraint may say something else


def whole(text: str) -> int:
    return max(int(text[:6]), 1) if text.isdecimal() else 1
