"""A workload over a plan, in time: the engine's own scheduler and block manager with a clock in place of the model."""
