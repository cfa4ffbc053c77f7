"""A group that grows and shrinks by its macro-scheduler's word, and a placer that starts and ends engines for it."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import httpx2

from integration.system import wait_for
from integration.test_placer import Laptop, laptop

ENGINE = ["--gpu", "a800-pcie-80", "--card", "CodeLlama-34b-hf", "--tp", "2", "--mode", "phase-gated"]
QUICK = {
    "SERAI_SCALING_WINDOW_S": "1.5",
    "SERAI_INSTANCE_START_S": "2",
    "SERAI_SLO_TTFT_S": "2",
    "SERAI_SLO_TPOT_S": "0.4",
    "SERAI_INSTANCES_MAX": "2",
}
PLACEMENT = {
    "models": {
        "m": {
            "engine": "emulated",
            "min_replicas": 1,
            "arguments": ENGINE,
            "demand": {"prompt_tokens": 2000, "output_tokens": 8},
            # What is asked for here never needs a second engine by this figure: only its macro-scheduler wants one.
            "instances": [{"gpu": "h100", "requests_s": 100, "load_s": 1}],
        }
    },
    "rules": {
        "mode": "automatic",
        "horizon_s": 60,
        "cool_down_s": 1,
        "cold_after_s": "never",
        "drain_s": 5,
        "demand_window_s": 4,
        "moves_per_hour": 1000,
        "gpu_share_per_change": 1.0,
    },
}
WORDS = ("caravan", "desert", "inn", "road", "well", "market", "camel", "night", "star", "gate")


class Prompts:
    """Long ones, each unlike the others, at a rate that the test changes; what was wrong with any answer."""

    def __init__(self, here: Laptop, rate: float) -> None:
        self.rate = rate
        self.faults: list[str] = []
        self.whole = 0
        self._here = here
        self._chance = random.Random(1)
        self._client = httpx2.Client(timeout=60)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Prompts:
        self._pacing = threading.Thread(target=self._pace)
        self._pacing.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in (self._pacing, *self._threads):
            thread.join()
        self._client.close()

    def _pace(self) -> None:
        for number in itertools.count():
            if self._stop.wait(1 / self.rate):
                return
            text = f"{number} " + " ".join(self._chance.choices(WORDS, k=1600))
            self._threads.append(threading.Thread(target=self._ask, args=(text,)))
            self._threads[-1].start()

    def _ask(self, text: str) -> None:
        facts = self._here.facts
        body = {"model": "m", "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": f"Bearer {facts['key']}"}
        try:
            answer = self._client.post(f"{facts['url']}/v1/chat/completions", json=body, headers=headers)
        except Exception as error:
            self.faults.append(repr(error))
            return
        if answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text:
            self.whole += 1
        else:
            self.faults.append(f"{answer.status_code}: {answer.text[-300:]}")


def test_an_instance_comes_when_the_load_rises_joins_the_group_and_is_drained_when_it_falls(tmp_path: Path) -> None:
    up = laptop(tmp_path, 2, PLACEMENT, "--policy", "padg", environment=QUICK)
    with up as here, Prompts(here, 4.0) as load:
        scheduler = lambda: here.log("macro-scheduler")  # noqa: E731
        wait_for(lambda: here.serving("m") == 2, "the model has a second instance")
        assert '"macro.scale"' in scheduler()
        assert '"placer.wish"' in here.log("placer")
        load.rate = 0.5
        wait_for(lambda: here.serving("m") == 1, "one instance is drained")
        assert '"change":-1' in scheduler().replace(" ", "")
    assert load.faults == []
    assert load.whole >= 10
