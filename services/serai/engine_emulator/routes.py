"""Everything at the emulated engine's HTTP that is not a completion."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

import orjson

from serai.engine_emulator import metrics, native_messages, pooling
from serai.engine_emulator.batching.settings import BatchMode, Phase
from serai.engine_emulator.completion import RequestRefused, read_object
from serai.engine_emulator.faults import FaultKind, fault_from_fields
from serai.engine_emulator.model_flags import EngineName
from serai.engine_emulator.phase_channel import set_phase
from serai.engine_emulator.settings import Native
from serai.engine_emulator.state import EmulatorState, HttpRequest

_VERSION = "emulated"

Handler = Callable[[EmulatorState, HttpRequest], bytes | str]


def answer(state: EmulatorState, request: HttpRequest) -> bytes | str:
    """JSON as bytes, or plain text. Raises RequestRefused."""
    methods = _routes(state).get(request.path)
    if methods is None and request.path.startswith("/v1/models/"):
        return _one_model(state, request)
    if methods is None:
        raise RequestRefused(404, f"There is nothing at {request.path}.")
    handler = methods.get(request.method)
    if handler is None:
        raise RequestRefused(405, f"{request.method} is not allowed at {request.path}.")
    return handler(state, request)


def _routes(state: EmulatorState) -> dict[str, dict[str, Handler]]:
    settings = state.settings
    routes = _ROUTES | _ROUTES_OF[settings.engine]
    if Native.MESSAGES in settings.native:
        routes = routes | {"/v1/messages/count_tokens": {"POST": _count_tokens}}
    return {path: methods for path, methods in routes.items() if path not in settings.without}


def _openapi(state: EmulatorState, request: HttpRequest) -> bytes:
    """Which paths there are, as engines tell; what they take is not described."""
    paths = {path: ["post"] for path in state.reads} | {
        path: [method.lower() for method in methods]
        for path, methods in _routes(state).items()
        if not path.startswith("/emulator/")
    }
    described = {"200": {"description": "Successful Response"}}
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "Emulated engine", "version": _VERSION},
            "paths": {
                path: {method: {"responses": described} for method in methods} for path, methods in paths.items()
            },
        }
    )


def _tokenize(state: EmulatorState, request: HttpRequest) -> bytes:
    fields = read_object(request.body)
    state.reader.check_model(fields)
    return pooling.tokenized(fields, state.settings.context_tokens_max).body


def _detokenize(state: EmulatorState, request: HttpRequest) -> bytes:
    fields = read_object(request.body)
    state.reader.check_model(fields)
    return pooling.detokenized(fields).body


def _count_tokens(state: EmulatorState, request: HttpRequest) -> bytes:
    return native_messages.count_tokens(state.reader, request.body)


def _health(state: EmulatorState, request: HttpRequest) -> bytes:
    return b""


def _model_card(state: EmulatorState) -> dict[str, object]:
    settings = state.settings
    return {
        "id": settings.model,
        "object": "model",
        "created": 0,
        "owned_by": "serai",
        "root": settings.model,
        "max_model_len": settings.context_tokens_max,
    }


def _models(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model_card(state)]})


def _one_model(state: EmulatorState, request: HttpRequest) -> bytes:
    name = unquote(request.path.removeprefix("/v1/models/"))
    if name != state.settings.model:
        raise RequestRefused(404, f"The model `{name}` does not exist.", code="model_not_found", param="model")
    return orjson.dumps(_model_card(state))


def _metrics(state: EmulatorState, request: HttpRequest) -> str:
    return metrics.prometheus(state)


def _version(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps({"version": _VERSION})


def _vllm_load(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps({"server_load": state.engine.running + state.engine.waiting})


def _loads(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps({"version": _VERSION, "dp_rank_count": 1, "loads": [metrics.load(state)]})


def _server_info(state: EmulatorState, request: HttpRequest) -> bytes:
    settings, load = state.settings, metrics.load(state)
    info: dict[str, Any] = {
        "version": _VERSION,
        "served_model_name": settings.model,
        "max_total_num_tokens": settings.kv_tokens_total,
        "context_length": settings.context_tokens_max,
    }
    if settings.modelled is not None:
        batch, parallelism = settings.modelled.batch, settings.modelled.model.parallelism
        info |= {
            "tp_size": parallelism.tensor,
            "pp_size": parallelism.pipeline,
            "page_size": batch.block_tokens,
            "max_running_requests": batch.sequences_max,
            "max_prefill_tokens": batch.step_tokens_max,
            "chunked_prefill_size": batch.chunk_tokens_max or -1,
            "disable_radix_cache": not batch.prefix_cache,
        }
    internal = {"last_gen_throughput": load.get("gen_throughput", 0.0), "memory_usage": load.get("memory", {})}
    return orjson.dumps({**info, "internal_states": [internal]})


def _state(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps(_state_fields(state))


def _state_fields(state: EmulatorState) -> dict[str, Any]:
    engine = state.engine
    totals = {f"{name}_total": value for name, value in asdict(engine.totals).items() if isinstance(value, int)}
    fields = {"running": engine.running, "waiting": engine.waiting, **totals}
    batch, modelled = engine.batch, state.settings.modelled
    if batch is None or modelled is None:
        return fields
    told: dict[str, Any] = {
        "mode": batch.settings.mode.value,
        "phase": str(batch.phase) if batch.settings.mode is BatchMode.PHASE_GATED else None,
        "prompt_tokens_max": batch.prompt_tokens_max,
        "speed": modelled.speed,
        "decoding": len(batch.decoding),
        "step": batch.step.kind if batch.step is not None else None,
        "decode_steps": batch.decode_steps,
        "preemptions_total": batch.preemptions_total,
        "prefill_backlog_tokens": batch.prefill_backlog_tokens,
        "busy_s": batch.busy_s,
        "energy_j": batch.energy_j,
        "kv": {
            "tokens_total": batch.kv_tokens_total,
            "tokens_used": batch.kv_tokens_used,
            "tokens_free": batch.kv_tokens_free,
            "tokens_idle_prefixes": batch.kv_tokens_idle,
        },
        "prefix_cache": {
            "on": batch.settings.prefix_cache,
            "queries_tokens": batch.prefix_queries_tokens,
            "hits_tokens": batch.prefix_hits_tokens,
        },
    }
    return fields | told


def _set_phase(state: EmulatorState, request: HttpRequest) -> bytes:
    batch = state.engine.batch
    if batch is None or batch.settings.mode is not BatchMode.PHASE_GATED:
        raise RequestRefused(409, f"This engine has no phases; start it with --mode {BatchMode.PHASE_GATED}.")
    try:
        asked = orjson.loads(request.body)
        phase, most = Phase(asked["phase"]), asked.get("prompt_tokens_max")
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise RequestRefused(400, f'Expected {{"phase": …}} with one of {", ".join(Phase)}.', param="phase") from error
    if most is not None and (not isinstance(most, int) or most < 1):
        raise RequestRefused(
            400, f"prompt_tokens_max must be a number above 0, not {most!r}.", param="prompt_tokens_max"
        )
    set_phase(state.engine, phase, most)
    return _state(state, request)


def _faults(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps({"faults": state.faults.remaining()})


def _set_faults(state: EmulatorState, request: HttpRequest) -> bytes:
    try:
        asked = orjson.loads(request.body)
        faults = [fault_from_fields(fields) for fields in (asked if isinstance(asked, list) else [asked])]
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError) as error:
        raise RequestRefused(400, f"Expected a fault object or a list of them: {error}.") from error
    if any(fault.kind is FaultKind.REFUSE_START for fault in faults):
        raise RequestRefused(400, f"{FaultKind.REFUSE_START} is only possible as a flag.")
    for fault in faults:
        state.faults.add(fault)
    return _faults(state, request)


def _clear_faults(state: EmulatorState, request: HttpRequest) -> bytes:
    state.faults.clear()
    return _faults(state, request)


def _last_request(state: EmulatorState, request: HttpRequest) -> bytes:
    last = state.last_request
    if last is None:
        raise RequestRefused(404, "No completion was asked for yet, or its body was too large to keep.")
    body = last.body.decode("utf-8", "replace")
    return orjson.dumps({"method": last.method, "path": last.path, "headers": last.headers, "body": body})


def _fall_asleep(state: EmulatorState, request: HttpRequest) -> bytes:
    if state.engine.running or state.engine.waiting:
        raise RequestRefused(400, "Requests run; it can sleep when none does.")
    state.sleep.fall(time.monotonic())
    return b"{}"


def _wake_up(state: EmulatorState, request: HttpRequest) -> bytes:
    state.sleep.wake(time.monotonic())
    return b"{}"


def _is_sleeping(state: EmulatorState, request: HttpRequest) -> bytes:
    return orjson.dumps({"is_sleeping": state.sleep.asleep(time.monotonic())})


_ROUTES: dict[str, dict[str, Handler]] = {
    "/health": {"GET": _health},
    "/v1/models": {"GET": _models},
    "/metrics": {"GET": _metrics},
    "/openapi.json": {"GET": _openapi},
    "/tokenize": {"POST": _tokenize},
    "/detokenize": {"POST": _detokenize},
    "/emulator/state": {"GET": _state},
    "/emulator/phase": {"POST": _set_phase},
    "/emulator/faults": {"GET": _faults, "POST": _set_faults, "DELETE": _clear_faults},
    "/emulator/last-request": {"GET": _last_request},
}
_ROUTES_OF: dict[EngineName, dict[str, dict[str, Handler]]] = {
    EngineName.VLLM: {
        "/version": {"GET": _version},
        "/load": {"GET": _vllm_load},
        "/sleep": {"POST": _fall_asleep},
        "/wake_up": {"POST": _wake_up},
        "/is_sleeping": {"GET": _is_sleeping},
    },
    EngineName.SGLANG: {
        "/v1/loads": {"GET": _loads},
        "/release_memory_occupation": {"POST": _fall_asleep},
        "/resume_memory_occupation": {"POST": _wake_up},
        "/server_info": {"GET": _server_info},
        "/get_server_info": {"GET": _server_info},
        "/health_generate": {"GET": _health},
    },
}
