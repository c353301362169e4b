"""What deployments promise: the policy file, what its rules measure, and the judgement over plans."""
