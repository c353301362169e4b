"""What llama.cpp prints: how it says that memory is short. Its logs' figures and metrics are not read yet."""

from kvplan.servers.logs import rows
from kvplan.servers.logs.failures import Failures, Wording
from kvplan.servers.logs.log import Logs

SOURCE = "llama.cpp 0.5.0 ggml/src/ggml-cuda/ggml-cuda.cu, common/fit.cpp"
failures = Failures(
    wordings=(Wording("oom_loading_weights", "unable to allocate CUDA0 buffer", "0.5.0", SOURCE, phase="load"),),
    frames=(),
    marks=(("llama_model_loader: loaded meta data", "load"),),
    ready=("server is listening on",),
    starts=("llama_model_loader: loaded meta data",),
    parts={},
    files=(
        "llama-server",
        "llama.cpp",
        "ggml_backend_",
        "ggml_cuda_init",
        "llama_init_from_model",
        "llama_model_load",
        "llama_kv_cache",
    ),
    own_marks=True,
)
logs = Logs((), rows.plain_figures, rows.plain, commands=("llama-server ",))
metrics = None
bench = None
