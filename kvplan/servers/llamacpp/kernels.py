"""What ggml's CUDA devices compute, and the scratch memory of their attention kernels.

Source: ggml 0.25.3 (llama.cpp at commit 0c1e57098): `ggml_backend_cuda_device_supports_op`, fattn.cu (which kernel for
which shape, and which copy K and V to f16), as the project's reference for these rules plays them.
"""

from typing import Final, Literal

from kvplan.models.ggml_types import row_bytes
from kvplan.servers.llamacpp.graph import Tensor
from kvplan.servers.llamacpp.placement import DEVICE_ALIGNMENT, ROW_ELEMENTS, quantized
from kvplan.servers.llamacpp.settings import Device, padded

FLOATS: Final = frozenset({"F32", "F16", "BF16"})
# Head of K -> (head of V, divisor of the queries per KV head).
GROUPED_ONLY: Final = {192: (128, 8), 320: (256, 32), 512: (512, 1), 576: (512, 1)}
PLAIN_HEADS: Final = frozenset({40, 64, 72, 80, 96, 112, 128, 256})
CACHED: Final = FLOATS | {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
MATRICES: Final = FLOATS | {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_M", "IQ1_S", "IQ2_S",
    "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_XS",
}  # fmt: skip
ONLY_MATRICES: Final = frozenset({"MXFP4", "NVFP4", "IQ4_NL", "Q8_K"})
STORED: Final = FLOATS | {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}
VECTOR_HEADS: Final = (64, 128, 256)
ADA: Final = 890
TURING: Final = 750
OFFLOAD_BATCH: Final = 32  # an operation on a weight of the host moves to a GPU from so many tokens on

Kernel = Literal["none", "vector", "copies"]


def attention_kernel(device: Device, op: Tensor) -> Kernel:
    """The kind of kernel that computes a flash attention: none, one for single tokens, or one that copies to f16."""
    q, k, v, mask = op.src[:4]
    group, head, v_head = q.ne[2] // k.ne[2], k.ne[0], v.ne[0]
    grouped = group >= 2 and k.ne[1] % 256 == 0
    for tensor in (q, k, v, mask):
        if not quantized(tensor.kind) and any(tensor.nb[i] % 16 for i in (1, 2, 3)):
            grouped = False
    if head in PLAIN_HEADS:
        fits = v_head == head
    else:
        v_size, divisor = GROUPED_ONLY.get(head, (0, 1))
        fits = v_head == v_size and grouped and group % divisor == 0
    if not fits or k.kind not in CACHED or v.kind not in CACHED or mask.ne[2] != 1:
        return "none"
    if q.ne[0] > 256 or q.ne[0] % 64 or q.ne[0] == 192 or k.ne[1] % 256:
        return "copies"
    ada, single = device.capability >= ADA, q.ne[1] == 1
    if quantized(k.kind) or quantized(v.kind):
        vector = q.ne[1] <= (2 if ada or device.capability < TURING else 1)
    else:
        small = not (group > 4 and (q.ne[0] >= 256 or k.ne[1] >= 8192))
        vector = single and (not grouped or (ada and q.ne[3] == 1 and small))
    return "vector" if vector else "copies"


def attention_bytes(device: Device, op: Tensor) -> int:
    """Bytes of a flash attention's result, with the f16 copies of K and V that its kernel makes behind it."""
    k, v = op.src[1], op.src[2]
    kernel, end = attention_kernel(device, op), op.nbytes
    if kernel == "none":
        return end
    copy_k = copy_v = True
    if kernel == "vector":
        kinds = {"F16" if kind == "F32" else kind for kind in (k.kind, v.kind)}
        built = op.src[0].ne[0] in VECTOR_HEADS and kinds in ({"F16"}, {"BF16"}, {"Q8_0"}, {"Q4_0"})
        copy_k, copy_v = k.kind == "F32" or not built, v.kind == "F32" or not built
    # V that is the first part of K (MLA) is not copied again.
    same = v.view is not None and v.view is k.view
    if copy_k and k.kind != "F16":
        end = padded(end, DEVICE_ALIGNMENT) + k.elements * 2
    if copy_v and v.kind != "F16" and not same:
        end = padded(end, DEVICE_ALIGNMENT) + v.elements * 2
    return end


def device_size(device: Device, tensor: Tensor) -> int:
    """Bytes that a tensor takes on a CUDA device."""
    size = attention_bytes(device, tensor) if tensor.op == "FLASH_ATTN_EXT" else tensor.nbytes
    if quantized(tensor.kind) and tensor.ne[0] % ROW_ELEMENTS:
        size += row_bytes(tensor.kind, ROW_ELEMENTS - tensor.ne[0] % ROW_ELEMENTS)
    return size


def supports(device: Device, op: Tensor) -> bool:
    """True if a CUDA device computes an operation; where its sources lie is not asked here."""
    if not op.src:
        return True
    a = op.src[0]
    b = op.src[1] if len(op.src) > 1 else a
    match op.op:
        case "MUL_MAT" | "MUL_MAT_ID":
            if a.nb[0] != a.element_bytes or b.nb[0] != b.element_bytes or (b.kind == "F16" and a.kind != "F16"):
                return False
            return a.kind in MATRICES or a.kind in ONLY_MATRICES
        case "GET_ROWS":
            if a.kind in ("IQ4_NL", "MXFP4"):
                return a.ne[0] % 256 == 0
            return a.kind in MATRICES or a.kind == "I32"
        case "SET_ROWS":
            return a.kind == "F32" and op.kind in STORED
        case "UNARY":
            return a.contiguous
        case "CONCAT":
            return a.kind == b.kind and not quantized(a.kind)
        case "NORM" | "RMS_NORM" | "SUM_ROWS":
            return a.contiguous_rows
        case "FLASH_ATTN_EXT":
            return attention_kernel(device, op) != "none"
        case "SSM_SCAN":
            if op.src[3].ne[0] == 1:
                return a.ne[0] in (96, 128, 256) and a.ne[1] % 16 == 0
            return a.ne[0] == 16 and a.ne[1] == 1 and a.ne[2] % 128 == 0 and op.src[4].ne[1] == 1
        case "SSM_CONV":
            return a.ne[1] % 128 == 0
        case _:
            return True


def offloads(op: Tensor) -> bool:
    """True if a device takes over an operation whose weight lies on the host, for its batch's sake."""
    match op.op:
        case "GET_ROWS":
            return False
        case "MUL_MAT":
            return op.ne[1] >= OFFLOAD_BATCH
        case "MUL_MAT_ID" | "ROPE":
            return op.ne[2] >= OFFLOAD_BATCH
        case _:
            return op.ne[1] * op.ne[2] * op.ne[3] >= OFFLOAD_BATCH
