"""KV connectors: the effect of --kv-transfer-config and --kv-offloading-size on vLLM's pool, and their host memory.

Source: vLLM 0.33 config/kv_transfer.py, config/vllm.py (_post_init_kv_transfer_config, rules of the hybrid manager),
distributed/kv_transfer/kv_connector (factory.py and each connector), v1/kv_offload, v1/simple_kv_offload; for earlier
releases config/vllm.py and factory.py.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import GIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Number, Version
from kvplan.servers.words.arguments import EngineArgs

ROLES: Final = ("kv_producer", "kv_both", "kv_consumer")  # in the order of vLLM's own error message
NATIVE, SIMPLE, MULTI = "OffloadingConnector", "SimpleCPUOffloadConnector", "MultiConnector"
LMCACHE, LMCACHE_SERVER = "LMCacheConnectorV1", "LMCacheMPConnector"
FLAG: Final = "--kv-transfer-config"
KEYS: Final = frozenset({
    "kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config",
    "kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy",
})  # fmt: skip
OLD_KEYS: Final = frozenset({"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"})


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of connector in vLLM.

    groups  whether windows and states keep separate groups with it (it subclasses SupportsHMA)
    since   the first release read that registers it; until: the first that no longer does
    unsized  why its memory is not sized; "" if it is
    """

    groups: bool
    since: Number
    until: Number | None = None
    unsized: str = ""


KINDS: Final[Mapping[str, Kind]] = {
    NATIVE: Kind(True, (0, 11)),
    SIMPLE: Kind(True, (0, 19)),
    MULTI: Kind(True, (0, 9)),
    LMCACHE: Kind(False, (0, 9)),
    LMCACHE_SERVER: Kind(False, (0, 14)),
    "NixlConnector": Kind(True, (0, 9)),
    "NixlPullConnector": Kind(True, (0, 24)),
    "NixlPushConnector": Kind(True, (0, 24)),
    "MooncakeConnector": Kind(True, (0, 14)),
    "MooncakeStoreConnector": Kind(True, (0, 21)),
    "ExampleConnector": Kind(False, (0, 14)),
    "SharedStorageConnector": Kind(False, (0, 9), (0, 14)),
    "DecodeBenchConnector": Kind(True, (0, 14)),
    "P2pNcclConnector": Kind(False, (0, 9), (0, 24), "keeps tensors in flight in buffers of its own on GPU and host"),
    "MoRIIOConnector": Kind(True, (0, 14), None, "needs an AMD GPU's MoRI-IO"),
    "HiSparseConnector": Kind(True, (0, 30), None, "moves a sparse model's pool to the host"),
    "ExampleHiddenStatesConnector": Kind(True, (0, 17), None, "adds a cache of hidden states to the pool"),
    "FlexKVConnectorV1": Kind(False, (0, 18), None, "keeps host memory set by its own config file"),
    "HF3FSKVConnector": Kind(False, (0, 20), None, "keeps buffers in front of its file system"),
}


@dataclass(frozen=True, slots=True)
class Connector:
    """A requested connector.

    option  its name in error messages
    extra   its kv_connector_extra_config
    children  those of a MultiConnector
    """

    name: str
    option: str
    extra: Mapping[str, Any]
    buffer_device: str = "cuda"
    children: "tuple[Connector, ...]" = ()

    @property
    def parts(self) -> "tuple[Connector, ...]":
        """The connector itself, or the children of a MultiConnector."""
        return self.children if self.name == MULTI else (self,)

    @property
    def groups(self) -> bool:
        """True if the hybrid KV cache manager stays on; not with a MultiConnector without children."""
        return bool(self.parts) and all(KINDS[part.name].groups for part in self.parts)

    def count(self, key: str) -> int | None:
        """Whole number from the extra config."""
        value = self.extra.get(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < 2**53
            or value != int(value)
        ):
            problem = f"{key} is not a whole number of bytes or blocks ({printable(str(value), 40)!r})"
            raise UsageError(self.option, problem, "write one")
        return int(value)


def read(args: EngineArgs, release: Version) -> Connector | None:
    """Return the connector in effect, or None if there is none.

    Raise UsageError for what vLLM rejects, UnsupportedModelError for one whose memory is not sized.
    """
    if args.kv_offloading_size:
        return _by_size(args, release)
    if args.kv_transfer_config is None:
        return None
    return _checked(json.loads(args.kv_transfer_config), FLAG, release)


def _by_size(args: EngineArgs, release: Version) -> Connector:
    """Return the connector for --kv-offloading-size, which replaces the one in --kv-transfer-config."""
    option = "--kv-offloading-size"
    extra: dict[str, Any] = {}
    if args.kv_transfer_config is not None:
        config = json.loads(args.kv_transfer_config)
        extra = dict(_extra_of(config, option))
    if args.kv_offloading_backend == "lmcache":
        if release.has("lmcache_server"):
            return Connector(LMCACHE_SERVER, option, extra)
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        return Connector(LMCACHE, option, {"lmcache.max_local_cpu_size": args.kv_offloading_size / ranks / GIB})
    connector = Connector(NATIVE, option, extra | {"cpu_bytes_to_use": args.kv_offloading_size})
    _check_extra(connector)
    return connector


def _extra_of(config: Mapping[str, Any], option: str) -> Mapping[str, Any]:
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise UsageError(option, "kv_connector_extra_config is not an object", "write {...}")
    return extra


def _checked(config: Any, option: str, release: Version) -> Connector:
    if not isinstance(config, dict):
        raise UsageError(option, "is not a JSON object", 'write {"kv_connector": "...", "kv_role": "kv_both"}')
    known = KEYS if release.has("fewer_connector_keys") else KEYS | OLD_KEYS
    if unknown := sorted(set(config) - known):
        problem = f"{printable(unknown[0], 60)} is an unexpected keyword argument of {release.label}"
        raise UsageError(option, problem, f"its keys are {', '.join(sorted(known))}")
    name, role = config.get("kv_connector"), config.get("kv_role")
    if name is None:
        raise UsageError(
            option, "Connector name is not set in KVTransferConfig (kv_connector)", "name one, or remove it"
        )
    if role is not None and role not in ROLES:
        raise UsageError(option, f"Unsupported kv_role: {printable(str(role), 40)}", f"use one of {', '.join(ROLES)}")
    if role is None:
        raise UsageError(option, "Please specify kv_role when kv_connector is set", f"add one of {', '.join(ROLES)}")
    if config.get("kv_connector_module_path"):
        raise UnsupportedModelError(
            option,
            f"{printable(str(name), 60)} is not one of vLLM's connectors; its memory is not modeled",
            "remove it",
        )
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not release.is_within(kind.since, kind.until):
        raise UsageError(
            option,
            f"Unsupported connector type: {printable(str(name), 60)} (in {release.label})",
            f"use one of {', '.join(sorted(_registered(release)))}",
        )
    if kind.unsized:
        raise UnsupportedModelError(option, f"{name} {kind.unsized}, which is not modeled", "remove it")
    extra = _extra_of(config, option)
    children: tuple[Connector, ...] = ()
    if name == MULTI:
        listed = extra.get("connectors")
        if not isinstance(listed, list):
            raise UsageError(
                option, "MultiConnector has no list of connectors", "add kv_connector_extra_config.connectors"
            )
        children = tuple(_checked(child, f"{option} (MultiConnector)", release) for child in listed)
        if any(child.name == MULTI for child in children):
            raise UnsupportedModelError(option, "a MultiConnector inside another is not modeled", "remove it")
    connector = Connector(name, option, extra, str(config.get("kv_buffer_device") or "cuda"), children)
    for part in connector.parts:
        _check_extra(part)
    return connector


def _registered(release: Version) -> Iterator[str]:
    for name, kind in KINDS.items():
        if not kind.unsized and release.is_within(kind.since, kind.until):
            yield name


def _check_extra(connector: Connector) -> None:
    """Reject settings in a connector's own config that vLLM rejects, or that are not sized."""
    extra, option = connector.extra, connector.option
    if connector.name == LMCACHE and extra.get("use_layerwise"):
        raise UnsupportedModelError(
            option, "use_layerwise allows only piecewise CUDA graphs, which is not modeled", "remove it"
        )
    if connector.name == NATIVE:
        if not connector.count("cpu_bytes_to_use"):
            raise UsageError(
                option, "cpu_bytes_to_use must be specified in kv_connector_extra_config", "add it, in bytes"
            )
        if extra.get("spec_name", "CPUOffloadingSpec") not in ("CPUOffloadingSpec", "TieringOffloadingSpec"):
            raise UsageError(option, f"Unsupported spec type: {printable(str(extra['spec_name']), 60)}", "remove it")
        if extra.get("canonical_layout"):
            raise UnsupportedModelError(option, "canonical_layout is not modeled", "remove it")
        if extra.get("block_size") is not None and extra.get("blocks_per_chunk") is not None:
            raise UsageError(option, "Specify only one of 'block_size' or 'blocks_per_chunk'", "use only one")
        if connector.count("blocks_per_chunk") == 0:
            raise UsageError(option, "'blocks_per_chunk' must be greater than 0", "write 1 or more")
    if connector.name == SIMPLE and extra.get("kv_offload_backend", "cpu") != "cpu":
        raise UnsupportedModelError(option, "kv_offload_backend on a disk is not modeled", "use cpu")


# --- what it changes in the pool --------------------------------------------------------------------------------------


def hybrid_manager_is_off(args: EngineArgs, release: Version) -> bool:
    """True if windows are kept in full: as requested, else if a connector does not support separate groups.

    Until 0.21 every connector turned the hybrid manager off; until 0.13 even against an explicit request.
    """
    stated, connector = args.disable_hybrid_kv_cache_manager, read(args, release)
    if connector is None or release.engine != "vllm":
        return bool(stated)
    if not release.has("connectors_keep_groups") and not release.has("groups_by_wish"):
        return True
    if stated is not None:
        return stated
    return not (release.has("connectors_keep_groups") and connector.groups)


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject a connector that vLLM rejects with this model or these flags."""
    connector = read(args, release)
    if connector is None:
        return
    asleep = next((part for part in connector.parts if not _sleeps(part)), None)
    if args.enable_sleep_mode and (asleep is not None or not connector.parts):
        raise UsageError(
            "--enable-sleep-mode", f"{asleep.name if asleep else MULTI} does not support sleep mode", "use only one"
        )
    dcp, tp = args.decode_context_parallel_size, args.tensor_parallel_size
    if dcp > 1 and any(part.name == "NixlConnector" for part in connector.parts):
        if dcp != tp:
            raise UsageError(
                f"decode_context_parallel_size {dcp}",
                f"must be 1 or equal to the NIXL transfer parallel size={tp}",
                "use one of them",
            )
        if not spec.is_mla:
            raise UsageError(
                f"decode_context_parallel_size {dcp}",
                "PD with decode_context_parallel_size > 1 is only supported for MLA models",
                "remove it",
            )
    mixes = len(spec.cache_kinds) > 1
    served = any(part.name == LMCACHE_SERVER for part in connector.parts)
    if mixes and served and release.has("connectors_keep_groups") and args.disable_hybrid_kv_cache_manager is None:
        raise UnsupportedModelError(
            connector.option,
            f"whether {LMCACHE_SERVER} leaves the hybrid KV cache manager on is up to the lmcache that is installed",
            "add --disable-hybrid-kv-cache-manager where it turns it off",
        )
    if args.disable_hybrid_kv_cache_manager is False and release.has("connectors_keep_groups") and not connector.groups:
        raise UsageError(
            "--no-disable-hybrid-kv-cache-manager",
            f"{_ungrouped(connector)} does not support the hybrid KV cache manager",
            "remove it",
        )
    if spec.has_states and mixes and hybrid_manager_is_off(args, release):
        raise UsageError(
            connector.option,
            f"{_ungrouped(connector)} turns the hybrid KV cache manager off, and {spec.name} cannot run without: "
            "Failed to promote local KV cache specs to one unified type",
            f"use one of {', '.join(name for name in _registered(release) if KINDS[name].groups and name != MULTI)}"
            if release.has("connectors_keep_groups")
            else "remove it",
        )


def _sleeps(connector: Connector) -> bool:
    """True if it supports a cache that is freed and reallocated (supports_sleep_mode)."""
    if connector.name in ("NixlConnector", "NixlPullConnector"):
        return bool(connector.extra.get("backends", ["UCX"]) == ["UCX"])
    return connector.name not in ("NixlPushConnector", "MooncakeStoreConnector")


def _ungrouped(connector: Connector) -> str:
    return next((part.name for part in connector.parts if not KINDS[part.name].groups), connector.name)


def notes(spec: ModelSpec, args: EngineArgs, release: Version) -> Iterator[str]:
    """Notes on effects of a connector that no row shows."""
    connector = read(args, release)
    if connector is None:
        return
    mixes = len(spec.cache_kinds) > 1
    if mixes and args.disable_hybrid_kv_cache_manager is None and hybrid_manager_is_off(args, release):
        yield f"{connector.name} turns the hybrid KV cache manager off: every layer keeps the whole context"
    for part in connector.parts:
        if part.name == LMCACHE_SERVER:
            yield f"{LMCACHE_SERVER}: the host memory is that of a separate `lmcache server`, as its --l1-size-gb says"
        if part.name == "MooncakeStoreConnector":
            yield "MooncakeStoreConnector: global_segment_size and local_buffer_size of its config file come on top"
        if part.name == NATIVE and part.extra.get("secondary_tiers"):
            yield "TieringOffloadingSpec: what its secondary tiers hold on disks and elsewhere is not modeled"
        if part.name == SIMPLE and args.enable_prefix_caching is False:
            yield f"{SIMPLE} keeps nothing: it requires prefix caching"
