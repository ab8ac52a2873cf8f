"""The tools of `POST /v1/responses`, as tools of a chat: functions in their flat form, and namespaces of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.serve.protocol.errors import APIError, shown
from dflash_jax.serve.protocol.tools import CHOICES

RESPONSE_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
        },
        {
            "type": "object",
            "required": ["type", "mode", "tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": {"type": "object"}},
            },
        },
    ]
}


@dataclass(frozen=True)
class Toolbox:
    """The functions among the tools of a request.

    Attributes:
        tools: in the form of a chat, by their names there.
        origins: the namespace, which may be empty, and the name that each has for the client, by its name in the chat.
        skipped: types of the tools that are no functions, which this server does not run.
    """

    tools: Mapping[str, dict[str, Any]]
    origins: Mapping[str, tuple[str, str]]
    skipped: frozenset[str]

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]]) -> Toolbox:
        """The toolbox of a body's `tools`.

        A function of a namespace keeps its name, unless another has it: then the namespace goes before it.

        Raises:
            APIError: 400; a function has no name, or parameters that are no object.
        """
        skipped: set[str] = set()
        functions = [(space, _function(tool, path)) for space, tool, path in _functions(tools, "", "tools", skipped)]
        taken = {function["name"] for namespace, function in functions if not namespace}
        chat_tools: dict[str, dict[str, Any]] = {}
        origins: dict[str, tuple[str, str]] = {}
        for namespace, function in functions:
            name = function["name"]
            if namespace and name in taken:
                function["name"] = f"{namespace}__{name}"
            taken.add(function["name"])
            chat_tools[function["name"]] = {"type": "function", "function": function}
            origins[function["name"]] = namespace, name
        return cls(chat_tools, origins, frozenset(skipped))

    def flat_name(self, namespace: str, name: str) -> str:
        """The name in the chat of a client's function; `name` itself if there is no such function any more."""
        return next((flat for flat, origin in self.origins.items() if origin == (namespace, name)), name)

    def choose(self, choice: str | dict[str, Any] | None) -> dict[str, Any]:
        """The fields `tools` and `tool_choice` of the chat.

        Under `allowed_tools` the chat has no others, as nothing else would keep the model from calling them.

        Raises:
            APIError: 400; the choice is none that this server knows, or names a function that is not in `tools`.
        """
        tools = list(self.tools.values())
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
                tools = [self.tools[name] for name in self._allowed(choice["tools"])]
                choice = choice.get("mode")
            elif kind == "function":
                name = self._known(choice, "tool_choice")
                return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
        if choice is not None and (not isinstance(choice, str) or choice not in CHOICES):
            raise APIError(
                f"tool_choice={shown(choice)} is not allowed: it must be 'none', 'auto', 'required', "
                "{'type': 'function', 'name': ...} or {'type': 'allowed_tools', 'mode': ..., 'tools': [...]}.",
                param="tool_choice",
            )
        if not tools:  # a client may say what to do with tools and have none
            return {"tool_choice": choice if choice == "required" else None}
        return {"tools": tools, "tool_choice": choice}

    def _allowed(self, entries: list[Any]) -> list[str]:
        """The names in the chat of the functions among the entries of `allowed_tools`, in the order of `tools`."""
        allowed = set()
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict) or str(entry.get("type")) not in self.skipped:
                allowed.add(self._known(entry, f"tool_choice.tools.{i}"))
        return [name for name in self.tools if name in allowed]

    def _known(self, entry: Any, path: str) -> str:
        """The name in the chat of the function that an object names."""
        name = entry.get("name") if isinstance(entry, dict) else None
        namespace = entry.get("namespace") if isinstance(entry, dict) else None
        flat = self.flat_name(namespace or "", name) if isinstance(name, str) else None
        if flat is None or flat not in self.tools:
            message = f"{path}={shown(entry)} names no function of tools: choose one of {shown(list(self.tools))}."
            raise APIError(message, param=path)
        return flat


def _functions(
    tools: Sequence[Any], namespace: str, path: str, skipped: set[str]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the namespace, the tool and the path of each function; the types of other tools go to `skipped`."""
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            message = f"{path}.{i}={shown(tool)} is no tool: give {{'type': 'function', 'name': ...}}."
            raise APIError(message, param=f"{path}.{i}")
        if kind == "function":
            yield namespace, tool, f"{path}.{i}"
        elif kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            yield from _functions(tool["tools"], str(tool.get("name", "")), f"{path}.{i}.tools", skipped)
        else:
            skipped.add(kind)


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """The part `function` of a chat's tool: what templates print."""
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not name or not name.isprintable():
        message = f"{path}.name={shown(name)} is not allowed: it must be a non-empty string on one line."
        raise APIError(message, param=f"{path}.name")
    if parameters is not None and not isinstance(parameters, dict):
        message = f"{path}.parameters={shown(parameters)} is not allowed: it must be a JSON schema, an object."
        raise APIError(message, param=f"{path}.parameters")
    described = {"name": name, "description": tool.get("description"), "parameters": parameters}
    return {key: value for key, value in described.items() if value is not None}
