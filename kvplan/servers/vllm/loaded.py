"""How vLLM loads a model whose config can be read in two ways."""

from dataclasses import replace

from kvplan.servers.plans import Request


def loaded(request: Request) -> tuple[Request, list[str]]:
    """The request with the model as vLLM 0.33 loads it, and a note; usually unchanged.

    A quantization_config without quant_method (ModelOpt's own form) is passed over: layers are built in the
    model's dtype. Source: vLLM 0.33 transformers_utils/model_arch_config_convertor.py (_normalize_quantization_config).
    """
    spec = request.spec
    if spec.quantization is None or spec.quantization.named or request.args.quantization:
        return request, []
    note = (
        "quantization_config names no quant_method: vLLM builds the layers unquantized, which quantized tensors do not "
        'fit; add "quant_method" to config.json'
    )
    return replace(request, spec=replace(spec, quantization=None)), [note]
