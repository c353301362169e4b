"""OpenAI's Responses API over a chat: its input as messages, its output items, its stream of events.

As in vLLM 0.33 without its store: a response cannot be fetched, continued or canceled later.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvplan.serve.answers import Choice
from kvplan.serve.fields import ApiError
from kvplan.serve.filler import Call
from kvplan.serve.generation import Generation

TEXTS: Final = ("input_text", "output_text", "text")
# Fields of a response that a chat lacks, and those that it has under another name or in another form.
OWN: Final = {
    "input", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt", "reasoning",
    "text", "truncation", "include", "background", "store", "tools", "tool_choice", "top_logprobs", "metadata",
    "messages",
}  # fmt: skip
ECHOED: Final[Mapping[str, Any]] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": None, "user": None,
    "parallel_tool_calls": True, "previous_response_id": None, "reasoning": None, "service_tier": "auto",
    "temperature": 1.0, "text": None, "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled",
}  # fmt: skip  # with their defaults


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat that a response stands for; raise ApiError for what only a store could answer."""
    if body.get("previous_response_id") is not None:
        problem = f"Response with id '{str(body['previous_response_id'])[:80]}' not found."
        raise ApiError(problem, status=404, kind="NotFoundError", param="previous_response_id")
    if body.get("background") or body.get("prompt") is not None:
        name = "background" if body.get("background") else "prompt"
        raise ApiError(f"{name}: not supported; remove it", param=name)
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    items = body.get("input")
    match items:
        case str():
            messages.append({"role": "user", "content": items})
        case [_, *_]:
            messages += [_message(item, number) for number, item in enumerate(items)]
        case _:
            raise ApiError("input must be a text or a list of at least one item", param="input")
    tools = [tool for tool in body.get("tools") or () if not isinstance(tool, dict) or tool.get("type") == "function"]
    chat = {name: value for name, value in body.items() if name not in OWN}
    chat |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens"), "tools": tools}
    chat["tool_choice"] = body.get("tool_choice") if tools else None
    if isinstance(body.get("text"), dict):
        chat["response_format"] = body["text"].get("format")
    return chat


def _message(item: Any, number: int) -> dict[str, Any]:
    match item:
        case {"role": str(role), "content": str() | list() as content}:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            texts = [
                {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in TEXTS else part
                for part in parts
            ]
            return {"role": "system" if role == "developer" else role, "content": texts}
        case {"type": "function_call", "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case {"type": "function_call_output", "output": output}:
            text = output if isinstance(output, str) else json.dumps(output)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    raise ApiError(f"input[{number}] must be a message, a function call or its output", param="input")


@dataclass(slots=True)
class ResponseShape:
    """A `response` and the events of its stream.

    stated  fields of the request, which the response repeats
    """

    stated: dict[str, Any]
    prompt_len: int
    call: Call | None = None
    prefix: str = "resp"
    _item: str = field(default_factory=lambda: uuid.uuid4().hex)
    _number: int = 0  # of the next event

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        stated = {name: self.stated.get(name) for name in ECHOED if self.stated.get(name) is not None}
        own = {"object": "response", "created_at": int(time.time()), "model": model, "background": False}
        return {**own, "error": None, "incomplete_details": None, **ECHOED, **stated}

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        choice = choices[0]
        is_cut = choice.reason == "length"
        count = len(choice.token_ids)
        status = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        usage = {
            "input_tokens": self.prompt_len,
            "input_tokens_details": {"cached_tokens": choice.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_len + count,
        }
        done = status if is_cut else {"status": "completed"}
        return {**head, **done, "output": [self._output(choice, str(done["status"]))], "usage": usage}

    def _output(self, choice: Choice, status: str) -> dict[str, Any]:
        if self.call is not None:
            arguments = {"name": self.call.name, "arguments": self.call.argued(len(choice.text))}
            own = {"type": "function_call", "call_id": f"call_{self._item}", "id": f"fc_{self._item}"}
            return {**own, **arguments, "status": status}
        return {
            "type": "message",
            "id": f"msg_{self._item}",
            "role": "assistant",
            "status": status,
            "content": [_part(choice.text)] if status != "in_progress" else [],
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        document = {"type": f"response.{kind}", "sequence_number": self._number, **values}
        self._number += 1
        data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return f"event: response.{kind}\ndata: {data}\n\n".encode("utf-8", "replace")

    async def stream(self, generation: Generation, head: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the events; nothing before the first token, so that a request that is refused has its status."""
        choice, started = Choice(0), {**head, "status": "in_progress", "output": []}
        item = self._output(choice, "in_progress")["id"]
        place: dict[str, Any] = {"item_id": item, "output_index": 0}
        kind = "function_call_arguments" if self.call is not None else "output_text"
        if self.call is None:
            place["content_index"] = 0
        logprobs: dict[str, Any] = {} if self.call is not None else {"logprobs": []}
        async for several in generation.pieces():
            lines = []
            if not self._number:
                lines += [self._event("created", response=started), self._event("in_progress", response=started)]
                opened = self._output(choice, "in_progress")
                lines.append(self._event("output_item.added", output_index=0, item=opened))
                if self.call is None:
                    lines.append(self._event("content_part.added", part=_part(""), **place))
            for piece in [single for _, whole in several for single in whole.singles()]:
                before = self._shown(choice)
                choice.take(piece)
                if delta := self._shown(choice)[len(before) :]:
                    lines.append(self._event(f"{kind}.delta", delta=delta, **place, **logprobs))
            yield b"".join(lines)
        if choice.reason is None:  # the client has gone
            return
        whole = self.whole(head, [choice])
        if self.call is not None:
            arguments = self._shown(choice)
            yield self._event(f"{kind}.done", name=self.call.name, arguments=arguments, **place)
        else:
            yield self._event(f"{kind}.done", text=choice.text, **place, **logprobs)
            yield self._event("content_part.done", part=_part(choice.text), **place)
        yield self._event("output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(whole["status"], response=whole)

    def _shown(self, choice: Choice) -> str:
        return choice.text if self.call is None else self.call.argued(len(choice.text))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
