"""Simulation of a workload on a plan: the engine's own scheduler and block manager, with a clock for the model."""
