"""What vLLM prints: its log, its failures, its /metrics page and the results of its load generator."""

from kvplan.servers.vllm.bench import GENERATOR as bench
from kvplan.servers.vllm.failures import FAILURES as failures
from kvplan.servers.vllm.log import LOGS as logs
from kvplan.servers.vllm.metrics import METRICS as metrics

__all__ = ["bench", "failures", "logs", "metrics"]
