"""What `reconcile --calibrate` and `kvplan calibrate` write: kvplan/calibration@1."""

from kvplan.servers.calibration import CalibrationDocument

__all__ = ["CalibrationDocument"]
