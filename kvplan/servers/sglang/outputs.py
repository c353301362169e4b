"""What SGLang prints: its log, its failures, its /metrics page and the results of its load generator."""

from kvplan.servers.sglang.bench import GENERATOR as bench
from kvplan.servers.sglang.failures import FAILURES as failures
from kvplan.servers.sglang.log import LOGS as logs
from kvplan.servers.sglang.metrics import METRICS as metrics

__all__ = ["bench", "failures", "logs", "metrics"]
