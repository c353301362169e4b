"""Bodies of requests turned into prompts, outside the event loop: parsing, chat templates, tokenization.

Every cost here has a bound that is checked before it is paid: bytes and values of a body, bodies that wait, characters
of a text, prompts of a request. Source of the bound on a prompt's characters: vLLM 0.33, vllm/renderers/params.py
(_text_len_check).
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.responses import JSONResponse, Response

from engine.config import Constraint, SamplingParams
from kvplan.core.errors import KvplanError
from kvplan.serve import generation
from kvplan.serve.answers import ChatShape, CompletionShape, Echo, PromptIds, Shape, Texts
from kvplan.serve.bodies import parsed
from kvplan.serve.chat import ChatTemplate, messages_of
from kvplan.serve.faults import Faults
from kvplan.serve.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, ApiError, Door, read
from kvplan.serve.filler import text_of, unreadable
from kvplan.serve.jobs import Simulated
from kvplan.serve.pooling import EMBEDDING, SCORE, VectorShape, paired
from kvplan.serve.responses import ResponseShape, chat_body
from kvplan.serve.structured import Calls, constraint_of, forced_calls

if TYPE_CHECKING:
    from engine.masks import Grammars

MAX_BODY_BYTES: Final = 16 << 20
MOST_LARGE: Final = 8  # bodies above bodies.SMALL that are received or wait for their thread; others are not read yet
MOST_CHARS: Final = 1 << 20  # of messages before their template, and of a text that is only counted, at least
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Served model and server settings.

    names     model names; responses and metrics use the first
    num_tokens  vocabulary size of the model
    faults    shares of requests that fail, of a simulated server
    face      what its clients see, if not what the bundled server shows; info: of its model
    hands_over  it is one of a pair of servers that hand prompts over
    vector_size  of a pooling model's embeddings; None: it generates
    version   version of kvplan
    adapters  adapter name -> path; clients use the name in place of the model's
    door      which fields of requests it takes
    api_keys  keys accepted under /v1; if empty, no key is required
    """

    names: tuple[str, ...]
    num_tokens: int
    version: str
    limits: generation.Limits
    template: ChatTemplate
    faults: Faults = field(default_factory=Faults)
    face: ModuleType | None = None
    info: dict[str, Any] = field(default_factory=dict)
    hands_over: bool = False
    vector_size: int | None = None
    door: Door = field(default_factory=Door)
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    request_timeout_s: float | None = None
    adapters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be submitted: its prompts, and for each the sampling parameters of its n completions."""

    model: str
    values: dict[str, Any]
    prompts: list[list[int]]
    params: list[list[SamplingParams]]
    shape: Shape
    simulated: Simulated | None = None  # of a simulated server


class Intake:
    """Readers of bodies, and the two threads they run in: one for requests that a key can guard, one for the others, so
    that those without a key hold up nobody with one.
    """

    def __init__(
        self, served: ServedModel, tokenizer: Any, max_model_len: int, grammars: "Grammars | None" = None
    ) -> None:
        """grammars: of an engine."""
        self._served, self._tokenizer, self._context, self._grammars = served, tokenizer, max_model_len, grammars
        longest = 1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1)
        self._most_chars = max_model_len * longest
        self._threads = {is_keyed: ThreadPoolExecutor(1, "kvplan-intake") for is_keyed in (True, False)}
        self.turns = {is_keyed: asyncio.Semaphore(MOST_LARGE) for is_keyed in (True, False)}  # of large bodies

    async def run(self, read_body: Callable[[bytes], Made], data: bytes, *, is_keyed: bool) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads[is_keyed], read_body, data)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def model(self, name: str | None) -> str:
        """Return the name of the model or adapter that a request asks for; raise ApiError if there is none."""
        names = self._served.names
        if self._served.face is not None:  # any name is the model's
            return name or names[0]
        if name is not None and name not in names and name not in self._served.adapters:
            raise ApiError(f"The model `{name[:200]}` does not exist.", status=404, kind="NotFoundError", param="model")
        return name or names[0]

    # --- in a thread --------------------------------------------------------------------------------------------

    def completion(self, data: bytes) -> Prepared:
        values = read(self._openais(data), COMPLETION, self._served.door)
        model = self.model(values["model"])
        special = True if values["add_special_tokens"] is None else values["add_special_tokens"]
        is_cut = values["truncate_prompt_tokens"] is not None
        prompts = generation.prompts_of(
            values["prompt"], lambda text: self._tokens(text, special=special, param="prompt", is_cut=is_cut)
        )
        prompts = [generation.truncated(prompt, values, self._context) for prompt in prompts]
        max_tokens, echo = values["max_tokens"], None
        if not values["echo"] and not max_tokens:
            raise ApiError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
        generation.check_count(len(prompts), values["n"])
        answers = self._lengths(prompts, max(1, max_tokens))
        if values["echo"]:
            texts = generation.texts_of(values["prompt"], prompts, self._tokenizer)
            echo = Echo(list(zip(texts, prompts, strict=True)), values["n"], is_alone=max_tokens == 0)
        ids = PromptIds(prompts, values["n"]) if values["return_token_ids"] else None
        shape = CompletionShape(self._texts(values), values["logprobs"] is not None, echo, ids)
        return self._prepared(model, values, prompts, answers, values["logprobs"], shape)

    def chat(self, data: bytes) -> Prepared:
        return self.chat_of(read(self._openais(data), CHAT, self._served.door))

    def _openais(self, data: bytes) -> dict[str, Any]:
        """Return the body of a request in OpenAI's format, a face's own fields under our names."""
        body = parsed(data, self._context)
        return body if self._served.face is None else self._served.face.openais(body)

    def response(self, data: bytes) -> Prepared:
        body = parsed(data, self._context)
        chat = self.chat_of(read(chat_body(body), CHAT, self._served.door))
        calls = chat.shape.calls if isinstance(chat.shape, ChatShape) else None
        return replace(chat, shape=ResponseShape(body, len(chat.prompts[0]), calls))

    def native(self, data: bytes) -> Prepared:
        """Return a request of the face's own generation."""
        from kvplan.serve import native  # only with a face

        door, face = self._served.door, self._served.face
        assert face is not None
        stated, bodies = native.bodies_of(data, face, door, self._context)
        prompts, is_batch = native.prompts_and_batch(
            stated, lambda text: self._tokens(text, special=True, param="text")
        )
        several = [native.checked_values(body, face, door) for body in bodies]
        native.check_several(several, len(prompts))
        several *= len(prompts) if len(several) == 1 else 1
        num_top = native.of_prompt(stated["top_logprobs_num"], 0, "top_logprobs_num")
        with_logprobs = stated["return_logprob"] not in (None, False, [False])
        start = native.of_prompt(stated["logprob_start_len"], -1, "logprob_start_len") if with_logprobs else -1
        text_of = self._texts(several[0]) if stated["return_text_in_logprobs"] else None
        is_list = is_batch or several[0]["n"] > 1
        empty = [values["max_tokens"] == 0 for values in several for _ in range(values["n"])]
        shape = native.NativeShape(face, is_list, start, num_top if with_logprobs else None, text_of, empty)
        params, logprobs = [], num_top if with_logprobs else None
        for values, prompt in zip(several, prompts, strict=True):
            values["prompt_logprobs"] = num_top if start >= 0 else None
            limits = self._lengths([prompt], 1 if values["max_tokens"] == 0 else values["max_tokens"], "input_ids")
            own = self._prepared("", values, [prompt], limits, logprobs, shape)
            params += own.params
        try:
            rid = None if several[0]["n"] > 1 else face.request_ids(stated["rid"], len(prompts), is_batch=is_batch)
        except ValueError as error:
            raise ApiError(str(error), param="rid") from error
        values = several[0] | {"stream": bool(stated["stream"]), "stream_options": None, "rid": rid}
        simulated = own.simulated and replace(own.simulated, is_whole=not stated["stream"])
        return Prepared(self._served.names[0], values, prompts, params, shape, simulated)

    def _lengths(self, prompts: list[list[int]], max_tokens: int | None, param: str = "prompt") -> list[int]:
        """Return the output limit for each prompt; raise ApiError in the server's words."""
        for prompt in prompts if self._served.face is not None else ():
            problem = self._served.face.too_long(len(prompt), max_tokens, self._context) if self._served.face else None
            if problem is not None:
                raise ApiError(problem, param=param)
        return generation.checked_lengths(prompts, max_tokens, self._context, param)

    def embeddings(self, data: bytes) -> Prepared:
        return self._vectors(data, "embedding")

    def pooling(self, data: bytes) -> Prepared:
        return self._vectors(data, "data")

    def _vectors(self, data: bytes, key: str) -> Prepared:
        values, width = read(parsed(data, self._context), EMBEDDING, self._served.door), self._vector_size
        if (size := values["dimensions"] or width) > width:
            raise ApiError(f"dimensions must be at most {width}", param="dimensions")
        if values["encoding_format"] not in ("float", "base64"):
            raise ApiError("encoding_format must be float or base64", param="encoding_format")
        if values["messages"] is not None:
            prompts = [self._chat_prompt(values, self._most_chars)]
        else:
            prompts = generation.prompts_of(
                values["input"], lambda text: self._tokens(text, special=True, param="input"), "input"
            )
        return self._pooled(values, prompts, VectorShape([], size, key, values["encoding_format"]))

    def score(self, data: bytes) -> Prepared:
        values = read(parsed(data, self._context), SCORE, self._served.door)
        first, second = paired(values)
        prompts = [self._tokens(text, special=True, param="text_1") for text in (*first, *second)]
        return self._pooled(values, prompts, VectorShape([], self._vector_size, "score", num_first=len(first)))

    @property
    def _vector_size(self) -> int:
        assert self._served.vector_size is not None, "of a pooling model"
        return self._served.vector_size

    def _pooled(self, values: dict[str, Any], prompts: list[list[int]], shape: VectorShape) -> Prepared:
        shape.prompts = [generation.truncated(prompt, values, self._context) for prompt in prompts]
        generation.check_count(len(prompts), 1)
        generation.checked_lengths(shape.prompts, None, self._context, "input")
        params = [[SamplingParams(temperature=0, max_tokens=1)] for _ in prompts]
        values |= {"stream": False, "stream_options": None}
        return Prepared(self.model(values["model"]), values, shape.prompts, params, shape, Simulated(is_pooled=True))

    def chat_of(self, values: dict[str, Any]) -> Prepared:
        """Return the request that the fields of a chat ask for."""
        model = self.model(values["model"])
        if values["top_logprobs"] and not values["logprobs"]:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        num_top = values["top_logprobs"] if values["logprobs"] else None
        calls = forced_calls(values["tools"], values["tool_choice"], is_parallel=values["parallel_tool_calls"])
        is_free = calls is None and values["tools"] and values["tool_choice"] != "none"
        if is_free and not self._served.door.is_simulated:
            problem = "auto needs a parser of the model's own calls, which the engine does not have"
            raise ApiError(f"tool_choice: {problem}; name a tool, or use required or none", param="tool_choice")
        prompt = generation.truncated(self._chat_prompt(values, self._most_chars), values, self._context)
        max_tokens = values["max_completion_tokens"]
        if max_tokens is None:
            max_tokens = values["max_tokens"]
        answers = self._lengths([prompt], max_tokens, "messages")
        ids = PromptIds([prompt], values["n"]) if values["return_token_ids"] else None
        shape = ChatShape(self._texts(values), num_top, calls, ids)
        return self._prepared(model, values, [prompt], answers, num_top, shape, calls)

    def tokenize(self, data: bytes) -> Response:
        values = read(parsed(data, self._context), TOKENIZE, self._served.door)
        self.model(values["model"])
        if (values["prompt"] is None) == (values["messages"] is None):
            raise ApiError("tokenize needs either prompt or messages", param="prompt")
        most_chars = max(MOST_CHARS, self._most_chars)
        if values["messages"] is not None:
            tokens = self._chat_prompt(values, most_chars)
        else:
            _refuse_long(len(values["prompt"]), most_chars, "characters", "prompt")
            special = values["add_special_tokens"]
            tokens = generation.encode(self._tokenizer, values["prompt"], special=special is None or special)
        strings = [self._tokenizer.id_to_token(token) for token in tokens] if values["return_token_strs"] else None
        counted = {"count": len(tokens), "max_model_len": self._context}
        return JSONResponse({**counted, "tokens": tokens, "token_strs": strings})

    def detokenize(self, data: bytes) -> Response:
        values = read(parsed(data, self._context), DETOKENIZE, self._served.door)
        self.model(values["model"])
        tokens = values["tokens"]
        if self._tokenizer is None:
            raise ApiError("detokenize: the model has no tokenizer", param="tokens")
        _refuse_long(len(tokens), max(MOST_CHARS, self._context), "tokens", "tokens")
        if any(not 0 <= token < self._served.num_tokens for token in tokens):
            raise ApiError("tokens must be token ids of the model", param="tokens")
        return JSONResponse({"prompt": self._tokenizer.decode_batch([tokens], skip_special_tokens=False)[0]})

    def _texts(self, values: Mapping[str, Any]) -> Texts:
        return Texts(None if values["return_tokens_as_token_ids"] else self._tokenizer)

    def _tokens(self, text: str, *, special: bool, param: str, is_cut: bool = False) -> list[int]:
        if self._tokenizer is not None:
            most_chars = max(MOST_CHARS, self._most_chars) if is_cut else self._most_chars
            generation.check_chars(len(text), self._context, most_chars, param)
        return generation.encode(self._tokenizer, text, special=special, param=param)

    def _chat_prompt(self, values: dict[str, Any], most_chars: int) -> list[int]:
        """Tokens of a chat; its template may leave out text of messages, so they have their own, wider bound."""
        messages = messages_of(values["messages"])
        num_chars = sum(len(message["content"]) for message in messages)
        generation.check_chars(num_chars, self._context, max(MOST_CHARS, most_chars), "messages")
        options = {"add_generation_prompt": values["add_generation_prompt"], **(values["chat_template_kwargs"] or {})}
        options |= {name: values[name] for name in ("tools", "documents") if values.get(name)}
        text = self._served.template.prompt(messages, options)
        if self._tokenizer is not None:
            generation.check_chars(len(text), self._context, most_chars, "messages")
        return generation.encode(
            self._tokenizer, text, special=bool(values.get("add_special_tokens")), param="messages"
        )

    def _prepared(
        self, model: str, values: dict[str, Any], prompts: list[list[int]], answers: list[int], logprobs: int | None,
        shape: Shape, calls: Calls | None = None,
    ) -> Prepared:  # fmt: skip
        """Return a request; calls: of tools, which its output has to be."""
        if values["stop"] and self._tokenizer is None:
            raise ApiError("stop: the model has no tokenizer; use stop_token_ids", param="stop")
        min_tokens = values["min_tokens"]
        if min_tokens > min(answers):
            problem = f"min_tokens must be less than or equal to max_tokens={min(answers)}, got {min_tokens}."
            raise ApiError(problem, param="min_tokens")
        if values["allowed_token_ids"] == []:
            raise ApiError("allowed_token_ids is not None and empty!", param="allowed_token_ids")
        constraint, param = (calls.constraint, "tools") if calls is not None else constraint_of(values) or (None, "")
        simulated = self._simulated(values, constraint, param) if self._served.door.is_simulated else None
        if simulated is None and constraint is not None:
            self._check(constraint, param)
        is_simulated = simulated is not None
        of_prompts = [
            [
                generation.params_of(values, tokens, logprobs, index, constraint, is_simulated=is_simulated)
                for index in range(values["n"])
            ]
            for tokens in answers
        ]
        return Prepared(model, values, prompts, of_prompts, shape, simulated)

    def _check(self, constraint: Constraint, param: str) -> None:
        """Compile a constraint, which the engine then has; raise ApiError where it cannot be."""
        assert self._grammars is not None, "of an engine"
        try:
            self._grammars.matcher(constraint)
        except KvplanError as error:
            raise ApiError(str(error).replace("structured_outputs", param, 1), param=param) from error

    def _simulated(self, values: dict[str, Any], constraint: Constraint | None, param: str) -> Simulated:
        """Return what a simulated server has to know of a request's output."""
        if values["prompt_logprobs"] is not None and values["stream"]:
            raise ApiError("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        transfer = values["kv_transfer_params"]
        if transfer and not self._served.hands_over:
            self._served.door.note("kv_transfer_params", "accepted without effect; see --kv-transfer-config")
        is_whole, answer = not values["stream"], None
        if constraint is not None:
            face = self._served.face
            if face is not None and param == "structured_outputs":  # a face has a field for each kind
                param = next((own for own, kind in face.CONSTRAINTS.items() if kind == constraint.kind), param)
            text = text_of(constraint, param, unreadable if face is None else face.unreadable)
            answer = tuple(generation.encode(self._tokenizer, text, special=False, param=param))
        return Simulated(answer, is_whole=is_whole, transfer=transfer)


def _refuse_long(length: int, limit: int, what: str, param: str) -> None:
    if length > limit:
        raise ApiError(f"{param}: {length:,} {what}; send at most {limit:,} at once", param=param)
