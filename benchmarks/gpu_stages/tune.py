"""benchmarks/tune_kernels.py in a stage: launch parameters of the shapes that are used most, as the time allows.

tiles.json in this stage's evidence is the checked-in table with the new entries over it: to be copied over
engine/kernels/tiles.json.
"""

from benchmarks import tune_kernels
from benchmarks.gpu import machine
from benchmarks.gpu_stages.stage import Task, parser, task
from engine.kernels.tiles import document_of


def run(stage: Task) -> int:
    """1 where nothing could be timed."""
    place = tune_kernels.Place(stage.folder, stage.folder / "tiles.json", machine(str(stage.device), None))
    search, new = tune_kernels.tune(place, str(stage.device), ("decode", "prefill", "latent"), stage.until_s)
    timed = [attempt.us for attempt in search.tried if attempt.us is not None]
    numbers = {"tried": len(search.tried), "timed": len(timed), "entries": document_of(new)["entries"]}
    stage.save(tune_kernels.summary(search, new), numbers)
    return int(not timed)


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="for the search (%(default)s)")
    raise SystemExit(run(task(own, computes=False)))
