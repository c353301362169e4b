"""What a batch job asks its cluster for: the GPUs and nodes of #SBATCH lines, and the variables that state them.

Source: slurm.schedmd.com/sbatch.html, "Options" (--gres, --gpus, --gpus-per-node, --gpus-per-task, --nodes) and "Output
environment variables".
"""

import re
from contextlib import suppress
from typing import NamedTuple

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.words.command import Note, Resources
from kvplan.servers.words.shell import Variables

_LINE = r"(?m)^[ \t]*#SBATCH[ \t]+-{1,2}([A-Za-z][\w-]*)[ \t=]*([^\s#]*)"
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "C": "constraint"}
_COUNTS = ("gpus-per-node", "gpus", "gpus-per-task")


class Job(NamedTuple):
    """Variables of the job's script, its GPU if one is named, and a note if what is named is no known one."""

    variables: Variables
    resources: Resources | None = None
    notes: tuple[Note, ...] = ()


def job_of(text: str) -> Job:
    options = {_SHORT.get(key, key): value for key, value in re.findall(_LINE, text)}
    nodes = whole(options.get("nodes", "").partition("-")[0])
    gres = next((part for part in options.get("gres", "").split(",") if part.partition(":")[0] == "gpu"), None)
    key = "gres" if gres is not None else next((key for key in _COUNTS if key in options), "")
    kind, _, number = (gres or "gpu:" + options.get(key, "")).removeprefix("gpu").strip(":").rpartition(":")
    kind, number = (kind, number) if number.isdecimal() else (number, "1")
    per_node = whole(number) // nodes if key == "gpus" else whole(number)
    if key == "gpus-per-task":
        per_node *= whole(options.get("ntasks-per-node") or options.get("ntasks", ""))
    variables: Variables = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
    if key:
        variables |= {"SLURM_GPUS_ON_NODE": str(per_node), f"SLURM_{key.upper().replace('-', '_')}": number}
    return Job(variables, *gpu_of(kind or options.get("constraint", ""), f"--{key if kind else 'constraint'}"))


def whole(text: str) -> int:
    return max(int(text[:6]), 1) if text.isdecimal() else 1


def gpu_of(kind: str, key: str) -> tuple[Resources | None, tuple[Note, ...]]:
    """The GPU that a cluster's own name for it stands for; a constraint may say something else."""
    from kvplan.hardware.names import find

    with suppress(UsageError):
        if kind and (spec := find(kind)) is not None:
            return Resources(spec.name, f"{key}: {printable(kind, 60)}", None, 1, 1), ()
    if not kind or key == "--constraint":
        return None, ()
    return None, (Note(f"{key}: {printable(kind, 60)} names no one GPU that kvplan knows; add --gpu"),)
