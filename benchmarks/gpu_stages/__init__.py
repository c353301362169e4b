"""What benchmarks/gpu.py runs: one module per stage, each a process of its own, and what runs and packs them.

A stage is started as `python -m benchmarks.gpu_stages.NAME ... --folder FOLDER --device DEVICE` from the repository's
root. It leaves its evidence in FOLDER, result.json among it (stage.py), and prints what its log should keep.
"""
