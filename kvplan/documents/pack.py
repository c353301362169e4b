"""What `kvplan pack --format json` prints: kvplan/pack@1; kvplan/packs@1 over several GPUs."""

from typing import Annotated, Literal, TypedDict


class PackedServer(TypedDict):
    """A server in its place. Sizes are bytes of one GPU."""

    name: str
    model: str
    engine: str
    argument: Annotated[str, "The flag of its share."]
    share: Annotated[float, "Of the whole GPU, or of what is free when it starts, as the flag has it."]
    free_before: Annotated[int, "What is free when it starts, before its own CUDA context."]
    context: int
    weights: int
    kv_cache: int
    held: Annotated[int, "What it holds from then on, with its context and its peaks."]
    users_needed: int
    users: Annotated[int, "All replicas together."]
    users_low: Annotated[int | None, "Where what is estimated takes the most it may."]
    command: Annotated[str, "Starts it, once the one before it is ready."]


class PackDocument(TypedDict):
    """Servers that share a GPU, in the order of their starts; where they do not fit: what each needs alone."""

    schema: Literal["kvplan/pack@1"]
    fits: bool
    gpu: str
    num_gpus: Annotated[int, "Each holds a rank of every server."]
    total: int
    in_use: int
    left: Annotated[int, "total - in_use - the servers' held; negative: what is missing."]
    servers: list[PackedServer]


class PackPool(TypedDict):
    """GPUs of one kind."""

    gpu: str
    count: int
    used: Annotated[int, "Those with a server."]


class PackGroup(TypedDict):
    """GPUs with the servers that share them, a rank of each on every GPU."""

    devices: Annotated[list[int], "From 0 for each kind of GPU."]
    pack: PackDocument


class PacksDocument(TypedDict):
    """Servers over several GPUs: at the lowest price if there are prices, then on the fewest GPUs."""

    schema: Literal["kvplan/packs@1"]
    fits: bool
    complete: Annotated[bool, "False: the search ended before it had tried every place."]
    dollars_per_hour: Annotated[float | None, "Of the GPUs in use; null without prices."]
    pools: list[PackPool]
    unplaced: Annotated[list[str], "Servers without a place."]
    enough: Annotated[str | None, "GPUs, as --gpu takes them, that would hold all servers."]
    groups: list[PackGroup]
