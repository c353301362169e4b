"""Commands that fail, and the remedies that they print."""

from typing import NamedTuple

LLAMA = "llama-3.1-8b --gpu h100-80g"
MEANS = "--prompt-tokens 300 --output-tokens 20 --num-requests 10"
LOAD = f"{MEANS} --rate 2"
PRICES = "h100-80g: 2.50\nl40s: 1.10\n"  # of prices.yaml, which some commands read
SIMULATE = f"simulate {LLAMA} --ctx 8k {LOAD}"


class Case(NamedTuple):
    """A command that fails, its printed remedy, and the options that follow each part of it: "-" removes one."""

    command: str
    remedy: str
    options: tuple[str, ...]


CASES = [
    # numbers and forms
    Case(
        f"estimate {LLAMA} --ctx 8,192",
        "write 8192; for several, put a space after each comma: '8, 192'",
        ("--ctx 8192", "--ctx '8, 192'"),
    ),
    Case(f"simulate {LLAMA} --ctx 8,192 {LOAD}", "write 8192", ("--ctx 8192",)),
    Case(f"upgrade {LLAMA} --ctx 8,192 --from vllm@0.20", "write 8192", ("--ctx 8192",)),
    Case(f"recommend {LLAMA} --ctx 8,192 --users 10", "write 8192", ("--ctx 8192",)),
    Case(
        f"estimate {LLAMA} --ctx lots",
        "write a number such as 32768, 32k (32,768) or 1M (1,048,576), or auto (or -1) for the longest that fits",
        ("--ctx 32768", "--ctx 32k", "--ctx auto", "--ctx -1"),
    ),
    Case(f"estimate {LLAMA} --ctx 200k", "lower it", ("--ctx 128k",)),
    Case(f"estimate {LLAMA} --tp 3", "use 1, 2, 4, 8 or 16", ("--tp 2", "--tp 16")),
    Case(f"estimate {LLAMA} --tp 0", "write a whole number from 1 to 1,024", ("--tp 1",)),
    Case(
        f"estimate {LLAMA} --block-size 17",
        "use 16, 32, 64 or 128",
        tuple(f"--block-size {n}" for n in (16, 32, 64, 128)),
    ),
    Case(
        f"estimate {LLAMA} --gpu-memory 80",
        "write the unit, for example 80GiB",
        ("--gpu-memory 24GiB", "--gpu-memory 80GiB"),
    ),
    Case(
        f"estimate {LLAMA} --gpu-memory 80Gb",
        "write a size such as 24GiB, 512MiB, 80GB or 25769803776 (bytes)",
        ("--gpu-memory 24GiB", "--gpu-memory 80GB", "--gpu-memory 25769803776"),
    ),
    Case(
        f"estimate {LLAMA} --gpu-memory-utilization 92",
        "write a fraction or a percentage, such as 0.92 or 92%",
        ("--gpu-memory-utilization 0.92", "--gpu-memory-utilization 92%"),
    ),
    Case(f"estimate {LLAMA} --mean-tokens 200k", "lower it", ("--mean-tokens 100k",)),
    Case(
        f"estimate {LLAMA} --ctx 8k --mean-tokens 100k", "lower it, or raise --ctx", ("--mean-tokens 8k", "--ctx 128k")
    ),
    Case(
        f"estimate {LLAMA} --engine-arg max_num_seqs",
        "write key=value, for example block_size=32",
        ("--engine-arg block_size=32", "--engine-arg max_num_seqs=8"),
    ),
    Case(f"simulate {LLAMA} --ctx 8k,16k {LOAD}", "name one --gpu and one --ctx", ("--ctx 16k",)),
    Case(
        f"{SIMULATE} --slo ttft=x",
        "write a number with ms, s, m or h: 250ms, 1s, 2m",
        ("--slo ttft=250ms", "--slo ttft=1s", "--slo ttft=2m"),
    ),
    # names
    Case("estimate llama-3.1-9b --gpu h100-80g", "did you mean llama-3.1-8b, llama-3.1-70b, llama-3.1-405b?", ()),
    Case(
        f"estimate {LLAMA} --engine vllm@0.99", "use one of these releases", ("--engine vllm@0.6", "--engine vllm@0.33")
    ),
    Case(
        f"estimate {LLAMA} --engine sglang@9",
        "write sglang@0.5 or sglang@0.4.3",
        ("--engine sglang@0.5", "--engine sglang@0.4.3"),
    ),
    Case(
        f"estimate {LLAMA} --engine tgi",
        "use vllm, vllm@VERSION, sglang, llama.cpp or ollama",
        ("--engine vllm", "--engine vllm@0.33", "--engine sglang", "--engine llama.cpp", "--engine ollama"),
    ),
    Case(
        f"estimate {LLAMA} --dtype int8",
        "use auto, bfloat16, float16, float32",
        ("--dtype auto", "--dtype bfloat16", "--dtype float16", "--dtype float32"),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang --kv-cache-dtype nvfp4",
        "use auto, bfloat16, bf16, float16, fp8, fp8_e4m3, fp8_e5m2",
        tuple(
            f"--kv-cache-dtype {name}"
            for name in ("auto", "bfloat16", "bf16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
        ),
    ),
    Case("gpus nosuch", "`kvplan gpus` lists the known ones; --gpu-memory 24GiB plans any other", ("gpus",)),
    Case("models nosuch", "`kvplan models` lists the known ones", ("models",)),
    # options that go together
    Case(
        f"estimate {LLAMA} --engine sglang --gpu-memory-utilization 0.9",
        "give that",
        ("-gpu-memory-utilization --mem-fraction-static 0.9",),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang --kv-cache-memory-bytes 8GiB",
        "--engine-arg max_total_tokens=N sets its pool",
        ("-kv-cache-memory-bytes --engine-arg max_total_tokens=200000",),
    ),
    Case(
        "estimate qwen3-8b --gpu h100-80g --engine sglang --tp 2 --engine-arg enable_dp_attention=true",
        "change --dp-size",
        ("--dp 2",),
    ),
    Case(
        f"estimate {LLAMA} --num-speculative-tokens 3",
        "add --draft-model or --speculative-method",
        ("--draft-model llama-3.2-1b", "--speculative-method ngram"),
    ),
    # simulations
    Case(
        f"simulate {LLAMA} --ctx 8k --rate 2",
        "give one of --trace, --profile, --prompt-tokens: --prompt-tokens 1k --output-tokens 256",
        ("--profile sharegpt", "--prompt-tokens 1k --output-tokens 256"),
    ),
    Case(f"{SIMULATE} --engine sglang@0.5.9", "use --engine sglang@0.5.23", ("--engine sglang@0.5.23",)),
    Case(
        f"{SIMULATE} --engine sglang --tier host=4GiB@20GB/s",
        "use --engine vllm, or remove it",
        ("--engine vllm", "-tier"),
    ),
    Case(
        f"{SIMULATE} --engine sglang --baseline contiguous",
        "use --engine vllm, or remove it",
        ("--engine vllm", "-baseline"),
    ),
    Case(f"{SIMULATE} --engine sglang --film film.html", "use --engine vllm", ("--engine vllm",)),
    Case(
        f"simulate qwen3-vl-8b --gpu h100-80g --ctx 8k {LOAD} --engine sglang",
        "use --engine vllm, or another GPU",
        ("--engine vllm", "--gpu b200", "--gpu a100-80g"),
    ),
    Case(f"{SIMULATE} --engine sglang --enable-hierarchical-cache", "remove it", ("-enable-hierarchical-cache",)),
    Case(f"{SIMULATE} --pp 2", "use --tp", ("-pp --tp 2",)),
    Case(
        "simulate qwen3-8b --gpu jetson-thor --ctx 16k " + LOAD,
        "use --gpu-memory-utilization 0.87, or see what would fit with `kvplan estimate`",
        ("--gpu-memory-utilization 0.87",),
    ),
    Case(
        f"{SIMULATE} --cpu-offload-gb 2",
        "remove it: the time to fetch weights from the host is not modeled",
        ("-cpu-offload-gb",),
    ),
    Case(
        f"simulate bge-m3 --gpu h100-80g --ctx 8k {LOAD}",
        "`kvplan estimate` sizes it",
        ("estimate bge-m3 --gpu h100-80g --ctx 8k",),
    ),
    Case(
        f"simulate llama-3.1-70b --gpu h100-80g --ctx 8k {LOAD}",
        "see what would fit with `kvplan estimate`",
        ("estimate llama-3.1-70b --gpu h100-80g --ctx 8k",),
    ),
    Case(
        f"simulate {LLAMA} --ctx 8k {MEANS}",
        "add --rate N or --users N",
        ("--rate 2", "--users 4"),
    ),
    Case(f"tune {LLAMA} --ctx 8k {LOAD}", "add --slo ttft.p90=2s,tpot=50ms", ("--slo ttft.p90=2s,tpot=50ms",)),
    Case(f"recommend {LLAMA} --ctx 8k", "add the number of concurrent users, e.g. --users 200", ("--users 200",)),
    # one of several options
    Case("calibrate", "name result files: --bench 'results/*.json'", ()),
    Case(
        "diff llama-3.1-8b qwen3-8b",
        "name the GPU to compare on: a100-80g (`kvplan gpus` lists them)",
        ("--gpu a100-80g", "gpus"),
    ),
    Case("upgrade llama-3.1-8b --from vllm@0.20", "name one (`kvplan gpus` lists them)", ("--gpu a100-80g", "gpus")),
    Case(f"upgrade {LLAMA}", "add --from vllm@0.24", ("--from vllm@0.24",)),
    Case(f"upgrade {LLAMA} --engine vllm@0.20", "write --from and --to", ("-engine --from vllm@0.20 --to vllm@0.33",)),
    Case(
        f"estimate {LLAMA} --prompt-tokens 300",
        "set both, or --mean-tokens",
        ("--output-tokens 20", "-prompt-tokens --mean-tokens 300"),
    ),
    Case("models --max-params 1", "relax --family or --max-params", ("--max-params 1b",)),
    Case("sweep llama-3.1-8b --gpu l40s --sort users-per-dollar", "add --prices FILE", ("--prices prices.yaml",)),
    Case(
        f"estimate {LLAMA} --mem-fraction-static 0.8",
        "remove it or add --engine sglang",
        ("-mem-fraction-static", "--engine sglang"),
    ),
    Case("estimate - --gpu l40s", "name one of `kvplan models`, a config.json or a Hub id", ()),
    Case(
        "estimate --gpu l40s --from-command 'ls -l'",
        "paste `vllm serve ...`, `python3 -m sglang.launch_server ...`, `llama-server ...` or `ollama serve ...`, "
        "or the `docker run ...` of its image",
        (
            "--from-command 'vllm serve llama-3.1-8b --max-model-len 8192'",
            "--from-command 'python -m vllm.entrypoints.openai.api_server --model llama-3.1-8b --max-model-len 8192'",
            "--from-command 'docker run --gpus all vllm/vllm-openai --model llama-3.1-8b --max-model-len 8192'",
            "--from-command 'python3 -m sglang.launch_server --model-path llama-3.1-8b --context-length 8192'",
            "--from-command 'llama-server -m Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf -c 8192'",
        ),
    ),
    Case(
        "estimate --gpu l40s --from-command 'docker run vllm/vllm-openai bash'",
        "paste its `vllm serve MODEL ...`",
        ("--from-command 'vllm serve llama-3.1-8b --max-model-len 8192'",),
    ),
    Case(
        "estimate --gpu l40s --ctx 8k --from-command 'python -m sglang.launch_server llama-3.1-8b'",
        "name the model with --model-path; quote values that contain spaces",
        ("--from-command 'python -m sglang.launch_server --model-path llama-3.1-8b'",),
    ),
    Case("estimate l40s", "`kvplan models` lists the known ones", ()),
    Case(
        "estimate llama-3.1-8b --gpu nosuch --ctx 8k",
        "`kvplan gpus` lists the known ones; --gpu-memory 24GiB plans any other",
        ("gpus", "-gpu --gpu-memory 24GiB"),
    ),
    Case(
        "explore llama-3.1-8b --lengths uniform:1-10 --output page.html",
        "name choices by flags: --tp 1,2 --mean-tokens 1k,4k",
        ("-lengths --tp 1,2 --mean-tokens 1k,4k",),
    ),
    # parts that need each other
    Case(
        "estimate qwen3-30b-a3b --gpu h200 --engine sglang --tp 2 --enable-eplb",
        "add --enable-expert-parallel",
        ("--enable-expert-parallel",),
    ),
    Case("estimate qwen3-30b-a3b --gpu h200 --tp 2 --enable-eplb", "add it", ("--enable-expert-parallel",)),
    Case(
        "estimate qwen3-30b-a3b --gpu h200 --enable-expert-parallel --enable-eplb",
        "raise --tp or --dp",
        ("--tp 2", "--dp 2"),
    ),
    Case(
        "estimate qwen3-30b-a3b --gpu h200 --engine sglang --tp 2 --dp 2 --enable-expert-parallel",
        "use --dp-size 1, or add --enable-dp-attention",
        ("--dp-size 1", "--enable-dp-attention"),
    ),
    Case(
        "estimate qwen3-30b-a3b --gpu b200 --engine sglang --tp 2 --enable-expert-parallel --enable-lora "
        "--max-lora-rank 16 --lora-target-modules all",
        "remove it",
        ("-enable-expert-parallel",),
    ),
    Case(
        "estimate qwen3-30b-a3b --gpu h200 --enable-lora --max-lora-rank 16 --tp 2 --dp 2 --enable-expert-parallel",
        "use --tp 1 without --all2all-backend, or remove --enable-expert-parallel",
        ("--tp 1", "-enable-expert-parallel"),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang --enable-lora",
        "state --lora-target-modules (all, or q_proj,v_proj,...) and --max-lora-rank",
        ("--lora-target-modules all --max-lora-rank 16", "--lora-target-modules q_proj,v_proj --max-lora-rank 16"),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang@0.4.3 --enable-lora --max-lora-rank 16 --lora-target-modules q_proj",
        "remove --enable-lora",
        ("-enable-lora",),
    ),
    Case(f"estimate {LLAMA} --speculative-method eagle3 --num-speculative-tokens 3", "name one with --draft-model", ()),
    Case(
        f"estimate {LLAMA} --pp 2 --draft-model llama-3.2-1b --num-speculative-tokens 3",
        "use --tp, or a head of the model's own",
        ("-pp --tp 2",),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang --pp 2 --speculative-method ngram --num-speculative-tokens 3",
        "use --tp, or remove the drafts",
        ("-pp --tp 2", "-speculative-method -num-speculative-tokens"),
    ),
    Case("estimate gpt2 --gpu l40s --engine sglang --pp 2", "use --tp", ("-pp --tp 2",)),
    Case(
        f"estimate {LLAMA} --quantization mxfp8 --engine vllm@0.10",
        "use fp8, or --engine vllm@0.33",
        ("--quantization fp8", "--engine vllm@0.33 --gpu b200"),
    ),
    Case(f"estimate {LLAMA} --weights-bytes 16GB --cpu-offload-gb 4", "remove --weights-bytes", ("-weights-bytes",)),
    Case(
        f"estimate {LLAMA} --weights-bytes 16GB --cpu-offload-gb 4 --engine sglang",
        "remove --weights-bytes",
        ("-weights-bytes",),
    ),
    Case(
        f"estimate {LLAMA} --memory-in-use 90GiB",
        "use the memory that other processes hold on one GPU",
        ("--memory-in-use 1GiB",),
    ),
    # GPUs with a number
    Case("estimate llama-3.1-8b --gpu 3xh100-80g", "use 1, 2, 4, 8 or 16", ("--gpu 2xh100-80g",)),
    Case("estimate llama-3.1-8b --gpu 4xh100-80g --tp 2", "change one of them", ("--gpu 2xh100-80g", "--tp 4")),
    Case("estimate llama-3.1-8b --gpu 3xh100-80g --pp 2", "change one of them", ("--gpu 4xh100-80g", "--pp 3")),
    Case("estimate llama-3.1-8b --gpu 2xl40s,4xl40s", "use only one", ("--gpu 2xl40s", "--gpu 4xl40s")),
    Case(
        "recommend llama-3.1-8b --ctx 8k --users 10 --gpu 3xh100-80g",
        "add --tp 1 --pp 3 for one server with pipeline stages, or add --tp 1 for 3 servers, or take 2 or 4 GPUs",
        ("--tp 1 --pp 3", "--tp 1", "--gpu 2xh100-80g", "--gpu 4xh100-80g"),
    ),
    Case(
        "recommend llama-3.1-8b --ctx 8k --users 10 --gpu 3xh100-80g --tp 2",
        "change one of them",
        ("--gpu 4xh100-80g", "--tp 1"),
    ),
    Case(
        "recommend llama-3.1-8b --ctx 8k --users 10 --gpu 2xl40s --num-gpus 3",
        "use only one",
        ("-num-gpus", "--gpu l40s --num-gpus 2"),
    ),
    Case("recommend llama-3.1-8b --ctx 8k --users 10 --num-gpus 2", "name it with --gpu", ("--gpu l40s",)),
    Case("recommend llama-3.1-8b --ctx 8k --users 10 --gpus 2xl40s", "use --gpu for it", ("-gpus --gpu 2xl40s",)),
    Case("recommend llama-3.1-8b --ctx 8k --users 10 --gpu l40s --gpus l40s", "use only one", ("-gpu", "-gpus")),
    Case(
        "recommend llama-3.1-8b --ctx 8k --users 10 --gpu l40s,h100-80g",
        "use --gpus to choose among several",
        ("-gpu --gpus l40s,h100-80g",),
    ),
    Case(
        "recommend llama-3.1-8b --ctx 8k --users 10 --gpu l40s --prices prices.yaml",
        "remove it, or use --gpus instead of --gpu",
        ("-prices", "-gpu --gpus l40s"),
    ),
    # recommend, tune, pack, check, trace
    Case(f"recommend {LLAMA} --users 10 --ctx 8k,16k", "write one number, for example --ctx 16k", ("--ctx 16k",)),
    Case("recommend bge-m3 --gpu l40s --users 10", "`kvplan estimate` sizes it", ("estimate bge-m3 --gpu l40s",)),
    Case(
        "recommend llama-3.1-8b --ctx 8k --gpus l40s --users 10 --engine sglang",
        "add --slo ttft.p90=2s with a load, or compare servers with `kvplan sweep --engine`",
        (f"-users --slo ttft.p90=2s {LOAD}", "sweep llama-3.1-8b --ctx 8k --gpu l40s --engine vllm,sglang"),
    ),
    Case(
        f"recommend {LLAMA} --ctx 8k --users 10 --rate 2",
        "add --slo ttft=2s,tpot=50ms",
        (f"-users --slo ttft=2s,tpot=50ms {LOAD}",),
    ),
    Case(
        f"recommend {LLAMA} --ctx 8k --slo ttft.p90=2s --mean-tokens 300 --rate 2 --num-requests 10",
        "use --prompt-tokens or --profile",
        ("-mean-tokens --prompt-tokens 300 --output-tokens 20", "-mean-tokens --profile sharegpt"),
    ),
    Case(
        f"recommend {LLAMA} --ctx 8k --slo ttft.p90=2s --rate inf {MEANS}",
        "write --rate 4",
        ("--rate 4",),
    ),
    Case(f"tune {LLAMA} --ctx 8k,16k {LOAD} --slo ttft.p90=2s", "name one --gpu and one --ctx", ("--ctx 16k",)),
    Case(f"tune {LLAMA} --ctx 8k --tier host=4GiB@20GB/s {LOAD} --slo ttft.p90=2s", "remove it", ("-tier",)),
    Case(
        "pack --server 'qwen3-8b --max-model-len 16384 --users 4'",
        "name the GPUs: l40s, or 2xl40s,h100-80g (`kvplan gpus` lists them); or --gpu-memory 24GiB",
        ("--gpu l40s", "--gpu 2xl40s,h100-80g", "gpus"),
    ),
    Case(
        "pack --server '' --gpu l40s",
        "write a model and its flags: 'qwen3-8b --max-model-len 16384 --users 4'",
        ("--server 'qwen3-8b --max-model-len 16384 --users 4'",),
    ),
    Case(
        "check",
        "name a policy, or write one with `kvplan check --init MODEL --gpu NAME`",
        ("check --init llama-3.1-8b --gpu h100-80g -o new.yaml",),
    ),
    Case(
        "check --init llama-3.1-8b --gpu h100-80g --output prices.yaml",
        "name another file with -o, or overwrite it with --force",
        ("--output other.yaml", "--force"),
    ),
    Case(
        "check --init llama-3.1-8b -o new.yaml",
        "name the GPU that the policy is for (`kvplan gpus`)",
        ("--gpu h100-80g",),
    ),
    Case("trace convert sharegpt -o new.jsonl", "add one: --rate 2", ("--rate 2",)),
    Case("rightsize", "name two pages of a server, or its URL: http://localhost:8000/metrics", ()),
    # simulations
    Case(f"{SIMULATE} --router random", "add --replicas N", ("--replicas 2",)),
    Case(f"{SIMULATE} --think 3s", "remove it, or add --users N", ("-think", "-rate --users 4")),
    Case(f"{SIMULATE} --replicas 2 --disaggregate 1:1", "remove --replicas and --pool", ()),
    Case(
        f"{SIMULATE} --replicas 2 --film film.html",
        "remove it, or --replicas, --pool and --disaggregate",
        ("-film", "-replicas"),
    ),
    Case(
        f"{SIMULATE} --replicas 2 --baseline contiguous",
        "remove it, or --replicas, --pool and --disaggregate",
        ("-baseline", "-replicas"),
    ),
    Case(
        f"{SIMULATE} --replicas 2 --router least-loaded --jobs 2",
        "remove it, or use --router round-robin or random and remove the others",
        ("-jobs", "--router round-robin", "--router random"),
    ),
    Case(
        f"{SIMULATE} --kv-offloading-size 10",
        "write --tier cpu=10GiB@25GB/s with its speed",
        ("-kv-offloading-size --tier cpu=10GiB@25GB/s",),
    ),
    Case(f"{SIMULATE} --kv-offloading-size 10 --kv-offloading-backend lmcache", "remove --kv-offloading-backend", ()),
    Case(
        f"simulate {LLAMA} --ctx 8k {MEANS} --users 20",
        "raise --num-requests",
        ("--num-requests 100",),
    ),
    Case(
        f"simulate llama-3.1-8b --gpu-memory 80GiB --ctx 8k {LOAD}",
        "name a GPU of `kvplan gpus` or give --calibration",
        ("--gpu h100-80g", "gpus"),
    ),
    Case(
        f"simulate {LLAMA} --ctx 8k --profile sharegpt --num-requests 10",
        "add --rate N or --users N",
        ("--rate 2", "--users 4"),
    ),
]
