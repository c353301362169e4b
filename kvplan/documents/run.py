"""What `kvplan profile` writes as run.json: kvplan/run@1."""

from kvplan.measure.run_types import Manifest as RunDocument

__all__ = ["RunDocument"]
