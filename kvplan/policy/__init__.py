"""Policies for deployments: the policy file, what its rules measure, and the judgment of plans."""
