"""What a request wants, and of which model: from its words, its caller's rights and the configuration.

What a client calls a model may be an alias; what it means is then the first of the alias's models that can answer this
request now. From here on only that model is spoken of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import orjson

from serai.ingress.caller import Caller
from serai.ingress.choosing import Chooser, Wish
from serai.ingress.configuration import Configuration
from serai.ingress.endpoints import Body, Endpoint
from serai.ingress.http_server import ClientRequest
from serai.ingress.openai_format import ApiError
from serai.ingress.requirements import (
    PROVIDERS_HEADER,
    REQUIRE_HEADER,
    BadHeader,
    Providers,
    Requirements,
    read_providers,
    read_requirements,
)
from serai.ingress.routing import Ask, prompt_head

SESSION_KEY_CHARACTERS_MAX = 256
PATTERNS_SHOWN_MAX = 20
_NO_REQUIREMENTS = Requirements()


class Wishes:
    """Reads requests' wishes, by the configuration that is in effect."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._configuration = Configuration()

    def apply(self, configuration: Configuration) -> None:
        """From the next request on."""
        self._configuration = configuration

    def of(
        self,
        asked_model: str,
        endpoint: Endpoint,
        request: ClientRequest,
        request_id: str,
        caller: Caller,
        now: float,
        output_tokens_max: int = 0,
    ) -> Wish:
        """Raises ApiError: 400 for a header that cannot be understood, 403 for a model that is not the caller's."""
        models = self.models(asked_model, caller)
        requirements, providers = _demands(request.headers, caller)
        session_key = request.headers.get("x-session-id", "")[:SESSION_KEY_CHARACTERS_MAX]
        ask = Ask(models[0], b"", session_key, request_id, output_tokens_max=output_tokens_max)
        wish = Wish(ask, requirements, providers, endpoint)
        if len(models) > 1:
            wish = self._first_that_can(wish, models, now)
        if endpoint.body is Body.JSON and self._chooser.reads_prompts(wish.ask.model):
            wish = replace(wish, ask=replace(wish.ask, prompt_head=prompt_head(orjson.loads(request.body))))
        return wish

    def models(self, asked_model: str, caller: Caller) -> list[str]:
        """What `asked_model` may mean when this caller says it, never nothing. Raises ApiError."""
        targets = self._configuration.targets(asked_model)
        if not caller.models:
            return list(targets)
        alias = asked_model if asked_model in self._configuration.aliases else ""
        allowed = [model for model in targets if caller.may_use(model, alias)]
        if not allowed:
            raise _not_allowed(asked_model, caller)
        return allowed

    def aliases(self, caller: Caller, now: float) -> dict[str, str]:
        """The aliases that this caller may use, each with the model that it means now."""
        found: dict[str, str] = {}
        for alias, targets in self._configuration.aliases.items():
            allowed = [model for model in targets if caller.may_use(model, alias)]
            if allowed:
                wish = Wish(Ask(allowed[0]), providers=caller.providers)
                found[alias] = self._first_that_can(wish, allowed, now).ask.model
        return found

    def _first_that_can(self, wish: Wish, models: list[str], now: float) -> Wish:
        """Of the first model that somebody can answer for now; of the first of all when there is none."""
        for model in models:
            one = replace(wish, ask=replace(wish.ask, model=model))
            if self._chooser.fitting(one, now):
                return one
        return wish


def _demands(headers: Mapping[str, str], caller: Caller) -> tuple[Requirements, Providers]:
    """What the request's headers say; its caller's list of providers is only made smaller by them."""
    require, providers = headers.get(REQUIRE_HEADER), headers.get(PROVIDERS_HEADER)
    if require is None and providers is None:
        return _NO_REQUIREMENTS, caller.providers
    try:
        return read_requirements(require), caller.providers.both(read_providers(providers))
    except BadHeader as error:
        raise ApiError(400, str(error), param=error.header, code="invalid_header") from None


def _not_allowed(model: str, caller: Caller) -> ApiError:
    patterns = " and ".join(", ".join(some[:PATTERNS_SHOWN_MAX]) or "none" for some in caller.models)
    text = f"`{caller.name}` may not use the model `{model[:200]}`. Allowed are: {patterns}."
    return ApiError(403, text, kind="permission_error", code="model_not_allowed", param="model")
