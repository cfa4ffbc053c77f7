"""Site files and the batch scripts that come of them."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.launcher.__main__ import nats_url_of
from serai.launcher.settings import LauncherSettings
from serai.launcher.site import GpuKind, JobPlan, Nats, Partition, Profile, Runtime, RuntimeKind, Site
from serai.launcher.site_file import read_site, site_of
from serai.launcher.templates import expanded, script
from serai.runtime.fields import BadInput

EXAMPLE = Path(__file__).parents[2] / "deploy" / "slurm" / "site.example.yaml"
SMALL: dict[str, Any] = {"site": "s", "nats": {"url": "nats://h:4222", "nkey_file": "/k"}}


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def engine_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("set -- "))


def test_the_example_is_read_and_each_of_its_models_makes_a_script() -> None:
    site = read_site(EXAMPLE)
    for name in site.models:
        text = script(site, site.job(name), name="serai.x.abcd")
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, name
        assert text.startswith("#!/bin/bash\n")


def test_a_script_of_the_example_says_what_the_file_says() -> None:
    site = read_site(EXAMPLE)
    now_s = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    text = script(site, site.job("llama-70b"), name="serai.llama-70b.abcd", excluded=site.excluded(now_s))
    assert options(text) == [
        "--job-name=serai.llama-70b.abcd",
        "--output=serai-agent-%j.out",
        "--open-mode=append",
        "--nodes=1",
        "--ntasks=1",
        "--time=1-00:00:00",
        "--requeue",
        "--signal=B:USR1@360",
        "--time-min=2:00:00",
        "--gres=gpu:h100:4",
        "--cpus-per-task=64",
        "--mem=400G",
        "--partition=gpu",
        "--exclude=gpu017",
    ]
    assert 'export SERAI_NATS_NKEY_FILE="$HOME"/.config/serai/agent.nk\n' in text
    assert "export SERAI_DRAIN_S=300\n" in text
    assert "export SERAI_ENGINE=vllm\n" in text
    assert engine_line(text).startswith('set -- apptainer exec --nv --bind /models --bind "$SERAI_SCRATCH" /images/')
    assert site.excluded(datetime(2026, 12, 6, tzinfo=UTC).timestamp()) == []


def test_the_text_of_agent_sbatch_is_all_there() -> None:
    template = EXAMPLE.with_name("agent.sbatch").read_text()
    text = script(site_of(SMALL), site_of(SMALL).job("m", engine=("e",)))
    kept = [line for line in template.splitlines()[1:] if not line.startswith(("#SBATCH", "##SBATCH"))]
    assert text.endswith("\n".join(kept) + "\n")


def test_what_is_asked_for_counts_most() -> None:
    site = read_site(EXAMPLE)
    plan = site.job(
        "llama-70b", gpus=2, time_s=3600.0, account="other", environment={"A": "1"}, sbatch=("--exclusive",)
    )
    text = script(site, plan)
    assert {"--gres=gpu:h100:2", "--time=1:00:00", "--account=other", "--exclusive"} <= set(options(text))
    assert "export A=1\n" in text
    assert "export HF_HUB_OFFLINE=1\n" in text


def test_gpus_are_shared_out_to_nodes() -> None:
    site = read_site(EXAMPLE)
    two = site.job("llama-405b")
    assert (two.nodes, two.gres) == (2, "gpu:h100:4")
    text = script(site, two)
    assert "--ntasks-per-node=1" in options(text)
    assert "--ntasks=1" not in options(text)
    for asked, told in (({"gpus": 10}, "10 cannot be shared out"), ({"gpus": 8, "nodes": 1}, "more than the 4")):
        with pytest.raises(BadInput, match=told):
            site.job("llama-8b", **asked)


def test_a_preemptible_partition_has_a_shorter_drain() -> None:
    site = read_site(EXAMPLE)
    plan = site.job("llama-8b", gpu="a100", drain_s=600.0)
    assert (plan.partition, plan.drain_s, plan.constraint, plan.gres) == ("scavenge", 110, "a100", "gpu:1")


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("llama-70", {}, "did you mean `llama-70b`?"),
        ("llama-8b", {"gpu": "h10"}, "did you mean `h100`?"),
        ("llama-8b", {"partition": "gone"}, "no such partition (it has gpu, scavenge)"),
        ("llama-8b", {"runtime": "none"}, "no such runtime"),
        ("llama-70b", {"time_s": 2 * 86_400.0}, "48 h is above what partition `gpu` allows (24 h)"),
    ],
)
def test_what_a_site_does_not_have_is_told_with_the_nearest(name: str, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_site(EXAMPLE).job(name, **asked)
    assert told in str(refused.value)


def changed(**parts: Any) -> Mapping[str, Any]:
    return SMALL | parts


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "is None"),
        ({"nats": SMALL["nats"]}, "site: is missing"),
        (changed(nats={"url": "h:4222", "nkey_file": "/k"}), "nats.url"),
        (changed(nats={"url": "nats://user:pw@h:4222", "nkey_file": "/k"}), "a password"),
        (changed(nats={"url": "nats://h"}), "nats.nkey_file"),
        (changed(modells={}), "did you mean `models`?"),
        (changed(models={"m": {"engine": "vllm serve"}}), "models.m.engine: is 'vllm serve'"),
        (changed(models={"m": {"engine": ["e", ""]}}), "models.m.engine[1]"),
        (changed(models={"m": {"engine": ["e\nrm"]}}), "has several lines"),
        (changed(models={"m": {"time": "soon"}}), "models.m.time: is 'soon'"),
        (changed(models={"m": {"time": 0}}), "models.m.time"),
        (changed(models={"m": {"gpu": "h100"}}), "there is no `h100` below `gpus`"),
        (changed(models={"m": {"runtime": "r"}}), "there is no `r` below `runtimes`"),
        (changed(partitions={"p": {}}, usual={"partition": "q"}), "usual.partition"),
        (changed(runtimes={"r": {"kind": "docker"}}), "choose one of plain, venv"),
        (changed(runtimes={"r": {"kind": "apptainer"}}), "runtimes.r.image: is missing"),
        (changed(gpus={"g": {"gres": "gpu:h100:4"}}), "the number is put behind it"),
        (changed(usual={"sbatch": ["--mail-type", "FAIL"]}), "write option and value together"),
        (changed(usual={"environment": {"A-B": "1"}}), "is no name of a variable"),
        (changed(exclude=[{"node": "n1"}]), "exclude[0].reason"),
        (changed(exclude=[{"node": "n1", "reason": "r", "until": "tomorrow"}]), "2026-12-05"),
        (changed(slurm={"query_every_s": 1}), "write 5 or more"),
    ],
)
def test_mistakes_are_told_with_their_place(found: object, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        site_of(found)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: s\nnats:\n  url: nats://h:4222\n  nkey_file: /k\nmodels:\n  m:\n    tmie: 8:00:00\n")
    with pytest.raises(BadInput) as refused:
        read_site(path)
    assert str(refused.value).startswith(f"{path}:7: models.m.tmie: is not known")
    path.write_text("a: [")
    with pytest.raises(BadInput, match="is no YAML"):
        read_site(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_site(tmp_path / "none.yaml")
    path.write_text("")
    with pytest.raises(BadInput, match=r"site\.yaml: site: is missing"):
        read_site(path)
    path.write_bytes(b"site: \xff")
    with pytest.raises(BadInput, match=r"site\.yaml: is not UTF-8 text"):
        read_site(path)


def test_times_are_read_as_slurm_means_them(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    times = {"8:00:00": 28_800, "90": 5400, "1-12": 129_600, "0:30:00": 1800}
    models = "".join(f"  m{number}: {{time: {text}}}\n" for number, text in enumerate(times))
    path.write_text(f"site: s\nnats: {{url: 'nats://h:4222', nkey_file: /k}}\nmodels:\n{models}")
    site = read_site(path)
    assert [profile.time_s for profile in site.models.values()] == list(times.values())


# -- scripts ----------------------------------------------------------------------------------------------------------


def site(**parts: Any) -> Site:
    return Site(name="s", nats=Nats(url="nats://h:4222", nkey_file="/k"), **parts)


def bash(text: str, environment: Mapping[str, str]) -> list[str]:
    """The words that the script would start, by bash itself."""
    header = text.partition("# ---- agent.sbatch ----")[0]
    shown = header + '\nprintf "%s\\n" "$@"\n'
    done = subprocess.run(
        ["bash"], input=shown, text=True, capture_output=True, check=True, env={"PATH": "/usr/bin:/bin", **environment}
    )
    return done.stdout.splitlines()


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20), min_size=1, max_size=4)
)
def test_no_word_is_anything_but_itself(words: list[str]) -> None:
    plain = [word.replace("$", "").removeprefix("~") or "x" for word in words]
    quoted = " ".join(expanded(word) for word in plain)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {quoted}"], capture_output=True, check=True, text=True)
    assert done.stdout.split("\0")[:-1] == plain


def test_home_and_variables_are_put_in_on_the_node_and_nothing_else() -> None:
    words = ("$HOME/a", "${USER}x", "~/m", "a~/b", "$(id)", "`id`", "a b", "*", "$1")
    plan = site().job("m", engine=words)
    environment = {"HOME": "/h o", "USER": "u"}
    assert bash(script(site(), plan), environment) == [
        "/h o/a", "ux", "/h o/m", "a~/b", "$(id)", "`id`", "a b", "*", "$1",
    ]  # fmt: skip
    with pytest.raises(subprocess.CalledProcessError) as failed:
        bash(script(site(), replace(plan, profile=Profile(engine=("$NOT_THERE",)))), environment)
    assert "NOT_THERE: unbound variable" in failed.value.stderr


@pytest.mark.parametrize(
    ("runtime", "started"),
    [
        (Runtime(), "vllm serve /m"),
        (Runtime(kind=RuntimeKind.VENV, path="/opt/v/"), "vllm serve /m"),
        (
            Runtime(kind=RuntimeKind.APPTAINER, image="/i.sif", mounts=("/models",)),
            "apptainer exec --nv --bind /models --bind /sc /i.sif vllm serve /m",
        ),
        (
            Runtime(kind=RuntimeKind.APPTAINER, image="/i.sif", command="singularity", options=("--rocm",)),
            "singularity exec --bind /sc --rocm /i.sif vllm serve /m",
        ),
        (
            Runtime(kind=RuntimeKind.PYXIS, image="/i.sqsh", mounts=("/a:/b",)),
            "srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none "
            "--container-image=/i.sqsh --container-mounts=/a:/b,/sc:/sc --no-container-entrypoint vllm serve /m",
        ),
        (
            Runtime(kind=RuntimeKind.ENROOT, image="/i.sqsh"),
            "enroot start --mount /sc:/sc --env CUDA_VISIBLE_DEVICES --env TMPDIR --env TRITON_CACHE_DIR "
            "--env TORCHINDUCTOR_CACHE_DIR --env VLLM_CACHE_ROOT --env CUDA_CACHE_PATH --env HF_HOME /i.sqsh "
            "vllm serve /m",
        ),
        (
            Runtime(kind=RuntimeKind.PODMAN, image="img:1", command="podman-hpc"),
            "podman-hpc run --rm --init --network=host --ipc=host --device=nvidia.com/gpu=all --volume /sc:/sc "
            "--env CUDA_VISIBLE_DEVICES --env TMPDIR --env TRITON_CACHE_DIR --env TORCHINDUCTOR_CACHE_DIR "
            "--env VLLM_CACHE_ROOT --env CUDA_CACHE_PATH --env HF_HOME --entrypoint=vllm img:1 serve /m",
        ),
    ],
)
def test_runtimes(runtime: Runtime, started: str) -> None:
    here = site(runtimes={"r": runtime}, scratch="/sc")
    engine = ("vllm", "serve", "/m")
    plan = here.job("m", engine=engine, runtime="r", gpus=1, environment={"HF_HOME": "/hf"})
    text = script(here, plan)
    assert " ".join(bash(text, {})) == started
    assert ("export SERAI_ENGINE=vllm" in text) == (started != "vllm serve /m")


def test_modules_are_loaded_or_the_job_fails_with_a_line(tmp_path: Path) -> None:
    here = site(runtimes={"r": Runtime(kind=RuntimeKind.MODULES, modules=("cuda/12", "vllm"))})
    text = script(here, here.job("m", engine=("e",), runtime="r"))
    module = tmp_path / "module"
    module.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/loaded\n')
    module.chmod(0o755)
    assert bash(text, {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == ["e"]
    assert (tmp_path / "loaded").read_text() == "load cuda/12 vllm\n"
    module.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        bash(text, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (failed.value.returncode, "module load failed" in failed.value.stderr) == (2, True)


def test_pyxis_is_for_one_node() -> None:
    here = site(runtimes={"r": Runtime(kind=RuntimeKind.PYXIS, image="/i")}, gpus={"g": GpuKind(per_node=4)})
    with pytest.raises(BadInput, match="on one node only"):
        here.job("m", engine=("e",), runtime="r", gpu="g", gpus=8)


def test_arrays_requeue_and_quoted_options() -> None:
    here = site(output="/out put/")
    plan: JobPlan = here.job("m", engine=("e",), requeue=False, sbatch=("--comment=a b",), account="x")
    said = options(script(here, plan, array=4))
    assert "--array=1-4" in said
    assert '--output="/out put/serai-agent-%A_%a.out"' in said
    assert "--no-requeue" in said
    assert "--requeue" not in said
    assert '--comment="a b"' in said


def test_partitions_are_anyones_where_the_file_names_none() -> None:
    assert site().job("m", engine=("e",), partition="any").partition == "any"
    with pytest.raises(BadInput, match="did you mean `gpu`"):
        site(partitions={"gpu": Partition()}).job("m", engine=("e",), partition="gpus")


def test_a_launcher_finds_nats_where_the_site_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERAI_NATS_URL", raising=False)
    site = read_site(EXAMPLE)
    settings = LauncherSettings(site_file=EXAMPLE, nats_url="nats://said:4222")
    assert nats_url_of(argparse.Namespace(nats_url=None), settings, site) == "nats://login1:4222"
    near = replace(site, nats=replace(site.nats, tools_url="nats://127.0.0.1:4222"))
    assert nats_url_of(argparse.Namespace(nats_url=None), settings, near) == "nats://127.0.0.1:4222"
    assert nats_url_of(argparse.Namespace(nats_url="nats://said:4222"), settings, site) == "nats://said:4222"
    monkeypatch.setenv("SERAI_NATS_URL", "nats://said:4222")
    assert nats_url_of(argparse.Namespace(nats_url=None), settings, site) == "nats://said:4222"
