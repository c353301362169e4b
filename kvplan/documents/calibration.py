"""What `reconcile --calibrate` and `kvplan calibrate` write: kvplan/calibration@1."""

from kvplan.servers.plans.calibration import CalibrationDocument

__all__ = ["CalibrationDocument"]
