"""What deployments promise: the policy file, what its rules measure, and the judgment over plans."""
