"""The options of `kvplan mcp`."""

from kvplan.cli.fields import Text, option
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class McpOptions:
    """Options of `kvplan mcp`: which tools, and whether they are only listed."""

    tools: Text = option("--tools NAMES", "Tools to offer, separated by commas. Default: all.")
    listing: bool = option("--list", "Print the tools with their schemas as JSON, and end.", False)
