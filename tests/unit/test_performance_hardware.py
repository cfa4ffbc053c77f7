"""The hardware catalogue: every GPU and link that is promised, by the names people and drivers use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.performance.communication import LARGE_MESSAGE_BYTES, all_reduce_s, transfer_s
from serai.performance.hardware import GPUS, LINKS, NO_LINK_COST, ComputeFormat, UnknownHardware, find_gpu, find_link


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100", "a100-sxm-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
        ("a100_pcie", "a100-pcie-80"),
        ("A800", "a800-sxm-80"),
        ("H100:NVL", "h100-nvl-94"),
        ("NVDA:H100:PCIe", "h100-pcie-80"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80"),
        ("h200", "h200-sxm-141"),
        ("NVIDIA GH200 120GB", "gh200-96"),
        ("NVIDIA GH200 480GB", "gh200-96"),
        ("GH200-144GB", "gh200-144"),
        ("L20", "l20"),
        ("L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("RTX4090", "rtx-4090"),
        ("A40", "a40"),
        ("A6000", "rtx-a6000"),
        ("B200", "b200"),
        ("GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("CPU", "cpu-server"),
    ],
)
def test_gpus_are_found_by_common_names_and_by_what_drivers_print(name: str, found: str) -> None:
    assert find_gpu(name).name == found


@pytest.mark.parametrize("gbit", [10, 25, 100, 400])
def test_ethernet_has_its_line_rate(gbit: int) -> None:
    assert find_link(f"ethernet-{gbit}g").bandwidth_bytes_s == pytest.approx(gbit * 1e9 / 8)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_entry_is_whole(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.source
    assert gpu.link in LINKS
    assert gpu.host_link in LINKS
    assert gpu.idle_power_w < gpu.power_w
    assert gpu.memory_bandwidth_bytes_s >= 50e9
    # The ridge: FLOPs per byte at which both peaks are reached; far outside this band a number is mistyped.
    assert 10 < gpu.bf16_flops_s / gpu.memory_bandwidth_bytes_s < 450


def test_a_format_without_hardware_falls_back_to_bf16() -> None:
    assert find_gpu("a100").peak_flops_s(ComputeFormat.FP8) == (ComputeFormat.BF16, 312e12)
    assert find_gpu("h100").peak_flops_s(ComputeFormat.FP8) == (ComputeFormat.FP8, 1979e12)
    assert find_gpu("h100").peak_flops_s(ComputeFormat.FP4) == (ComputeFormat.BF16, 989e12)


@pytest.mark.parametrize("name", ["", "tpu-v9", "H1OO", "\n"])
def test_an_unknown_gpu_is_one_line(name: str) -> None:
    with pytest.raises(UnknownHardware) as caught:
        find_gpu(name)
    assert "\n" not in str(caught.value)


def test_all_reduce_follows_the_ring_bound() -> None:
    link = find_link("nvlink4")
    assert all_reduce_s(1e9, 1, link) == 0
    assert all_reduce_s(1e9, 2, link) == pytest.approx(1e9 / 450e9)
    assert all_reduce_s(1e9, 8, link, 0.5) == pytest.approx(2 * 7 / 8 * 1e9 / 225e9)
    assert all_reduce_s(0, 8, link, latency_s=4e-6) == pytest.approx(12e-6)
    assert all_reduce_s(LARGE_MESSAGE_BYTES, 8, NO_LINK_COST) < 1e-9


@given(st.floats(0, 1e9), st.floats(1, 1e9), st.sampled_from([2, 4, 8]), st.sampled_from(sorted(LINKS)))
def test_a_larger_message_takes_longer(size: float, more: float, gpus: int, name: str) -> None:
    assert all_reduce_s(size + more, gpus, LINKS[name]) > all_reduce_s(size, gpus, LINKS[name])


def test_kv_transfer_over_ethernet_matches_the_padg_budget() -> None:
    # 10 GbE carries 783 tokens a second of Llama-30B's 1,597,440 bytes each.
    assert transfer_s(783 * 1_597_440, find_link("ethernet-10g"), bandwidth_share=1.0) == pytest.approx(1.0, rel=1e-3)
