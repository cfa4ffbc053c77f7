"""Which GPUs each engine of several on one host gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serai.contracts.session_record import GpuDevice


def shares(gpus: Sequence[GpuDevice], engines: int, degree: int = 1) -> list[list[GpuDevice]]:
    """Neighbours, as many for each; of no GPUs, none for each. `degree`: how many GPUs one engine's command asks for, 1
    when it does not say. Raises ValueError when it does not come out even."""
    each, rest = divmod(len(gpus), engines)
    if gpus and (rest or not each):
        whole = [str(number) for number in range(1, len(gpus) + 1) if len(gpus) % number == 0]
        raise ValueError(
            f"--engines {engines}: {len(gpus)} GPUs cannot be shared out evenly; give {' or '.join(whole)}, or leave "
            "some out by CUDA_VISIBLE_DEVICES"
        )
    if gpus and engines > 1 and degree > each:
        raise ValueError(
            f"--engines {engines}: each gets {each} of {len(gpus)} GPUs, and its command is for {degree}; give fewer "
            "engines, or a smaller --tensor-parallel-size"
        )
    return [list(gpus[number * each : (number + 1) * each]) for number in range(engines)]
