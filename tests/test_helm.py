"""The Helm chart: what it renders is what Kubernetes takes, and what it runs works here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import redis
from helm_python import HelmError, chart

from common.connect import writing
from common.keys import Keys
from common.settings import Settings
from services.coordinator.metrics import WORK_LEFT
from services.pool.local import LocalPool
from tests.charts import CHART, KEDA, Manifest, one, pods, render
from tests.servers import binary, free_port

OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()
GPU = {"device": "cuda", "gpus": 1}
EXTERNAL = {"redis": {"enabled": False, "secret": "our-redis"}}
CASES: dict[str, Manifest] = {
    "as it comes": {},
    "on GPUs": {"stages": dict.fromkeys(("encode", "denoise", "decode"), GPU)},
    "another Redis": EXTERNAL,
    "states in Redis": {"states": "redis"},
    "KEDA by Redis": {"keda": {"enabled": True}, **EXTERNAL},
    "KEDA by Prometheus": {
        "keda": {"enabled": True, "source": "prometheus", "prometheusUrl": "http://prometheus:9090"}
    },
    "everything": {
        "celery": {"enabled": True, "webhookSecret": "hooks"},
        "networkPolicy": {
            "enabled": True,
            "redisClients": [{"namespaceSelector": {"matchLabels": {"name": "keda"}}}],
        },
        "models": {"claimName": "weights"},
        "gateway": {"keysSecret": "keys", "service": {"type": "LoadBalancer"}},
        "imagePullSecrets": [{"name": "registry"}],
        "podAnnotations": {"team": "pictures"},
        "priorityClassName": "high",
        "stages": {
            "denoise": {
                **GPU,
                "nodeSelector": {"gpu": "yes"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "0"}],
                "resources": {"limits": {"memory": "64Gi"}},
            }
        },
    },
    "little": {
        "gateway": {"enabled": False},
        "metrics": {"port": 0},
        "podDisruptionBudgets": False,
        "networkPolicy": {"enabled": True},
        "arena": {"chown": False},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_manifest_is_one_that_kubernetes_takes(case: str) -> None:
    """Strictly by the published schemas: no unknown field, no wrong type."""
    manifests = render(CASES[case])
    assert len(manifests) > 5
    for manifest in manifests:
        if manifest["apiVersion"].startswith("keda.sh/"):
            jsonschema.validate(manifest["spec"], KEDA[manifest["kind"]])
        else:
            version = OLDEST if case == "everything" else NEWEST
            kubernetes_validate.validate(manifest, version, strict=True)


def test_lint_finds_nothing() -> None:
    report = chart.lint(CHART, strict=True)
    info = 1
    assert [said for said in report["messages"] if said["severity"] > info] == []


@pytest.mark.parametrize("case", CASES)
def test_no_pod_has_more_rights_than_it_needs(case: str) -> None:
    """Not root, nothing writable but its volumes, no capability, no token, no privilege to gain;
    what makes the arena's folder its user's may do that and nothing else."""
    for name, pod in pods(render(CASES[case])):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True, name
            assert rights["allowPrivilegeEscalation"] is False, name
            assert rights["capabilities"] == {"drop": ["ALL"]}, name
        for first in pod.get("initContainers", []):
            capabilities = first["securityContext"]["capabilities"]
            assert capabilities == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}


def test_a_service_of_any_name_changes_no_setting() -> None:
    """Kubernetes would set SLACKWATER_HTTP_PORT=tcp://… for a service named slackwater-http."""
    for name, pod in pods(render()):
        assert pod["enableServiceLinks"] is False, name


@pytest.mark.parametrize("case", CASES)
def test_pods_get_settings_that_there_are(case: str) -> None:
    """Each SLACKWATER_ variable is one of the settings, with a value that it takes."""
    known = {f"SLACKWATER_{name.upper()}" for name in Settings.model_fields}
    manifests = render(CASES[case])
    shared = one(manifests, "ConfigMap", "settings")["data"]
    Settings(**{name.removeprefix("SLACKWATER_").lower(): v for name, v in shared.items()})
    for name, pod in pods(manifests):
        for container in pod["containers"]:
            own = {each["name"] for each in container.get("env", [])}
            ours = {each for each in own if each.startswith("SLACKWATER_")}
            assert ours <= known, name
            if not name.endswith("-redis"):
                assert not ours & shared.keys(), "set twice"
                assert "SLACKWATER_REDIS_URL" in ours
    assert shared.keys() <= known


def test_settings_become_variables_as_they_were_written() -> None:
    """Large numbers are not rounded, and a setting that is the chart's own is refused."""
    given = {"arena_bytes": 12884901888, "slo_scale": 2.5, "policy": "edf", "exact": False}
    data = one(render({"settings": given}), "ConfigMap", "settings")["data"]
    made = Settings(
        **{name.lower(): data[f"SLACKWATER_{name.upper()}"] for name in given}  # type: ignore[arg-type]
    )
    assert made.model_dump(include=set(given)) == given
    with pytest.raises(HelmError, match=r"settings\.host: the chart sets it"):
        render({"settings": {"host": "me"}})


@pytest.mark.parametrize("case", CASES)
def test_every_container_of_ours_runs_a_module_that_there_is(case: str) -> None:
    for name, pod in pods(render(CASES[case])):
        for container in pod["containers"]:
            if container["command"][0] == "python":
                assert importlib.util.find_spec(container["command"][2]) is not None, name


def test_stages_on_gpus_claim_them() -> None:
    """A pod with device cuda has a GPU, and its successor waits until that is free."""
    manifests = render({"stages": {"denoise": GPU}})
    deployment = one(manifests, "Deployment", "denoise")["spec"]
    [container] = deployment["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert _variables(container)["SLACKWATER_DEVICE"] == "cuda"
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    with pytest.raises(HelmError, match="device cuda needs gpus: 1"):
        render({"stages": {"denoise": {"device": "cuda"}}})


def test_stages_share_one_arena_where_states_lie_on_a_node() -> None:
    """One folder, one node, one name for it. With states in Redis no pod has a node's folder."""
    manifests = render()
    stages = [one(manifests, "Deployment", each) for each in ("encode", "denoise", "decode")]
    volumes = []
    for stage in stages:
        pod = stage["spec"]["template"]["spec"]
        assert pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        volumes += [v["hostPath"]["path"] for v in pod["volumes"] if v["name"] == "arena"]
        assert _variables(pod["containers"][0])["SLACKWATER_HOST"] == "spec.nodeName"
    assert volumes == ["/dev/shm/slackwater/pictures/pool"] * 3
    other = pods(render(name="other", namespace="films"))
    [path, *_] = [
        v["hostPath"]["path"] for _, p in other for v in p.get("volumes", ()) if "hostPath" in v
    ]
    assert path == "/dev/shm/slackwater/films/other", "two releases on a node share nothing"
    for name, pod in pods(render({"states": "redis"})):
        assert not any("hostPath" in volume for volume in pod.get("volumes", [])), name
        assert "initContainers" not in pod


def test_the_gateway_takes_pushes_while_a_stage_has_no_worker() -> None:
    """Its readiness must not wait for workers, since a push is what wakes them."""
    gateway = one(render(), "Deployment", "gateway")["spec"]["template"]["spec"]
    assert gateway["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/livez"


def _variables(container: Manifest) -> dict[str, str]:
    return {
        each["name"]: each.get("value") or each["valueFrom"].get("fieldRef", {}).get("fieldPath")
        for each in container["env"]
    }


def test_keda_asks_prometheus_for_a_figure_that_there_is() -> None:
    """The query names a metric of the coordinator, and one stage of it."""
    scaled = one(render(CASES["KEDA by Prometheus"]), "ScaledObject", "denoise")["spec"]
    query = scaled["triggers"][0]["metadata"]["query"]
    found = re.search(r'(\w+)\{stage="denoise",namespace="pictures"\}', query)
    assert found is not None
    assert found[1] == WORK_LEFT.name


# -- what the chart runs, run here -----------------------------------------------------------


def test_a_check_tells_a_broken_worker_from_a_redis_that_is_away(
    redis_server: str, tmp_path: Path
) -> None:
    """A worker that is not there fails its check; a Redis that is away restarts nobody."""
    pod = one(render(), "Deployment", "denoise")["spec"]["template"]["spec"]
    command = pod["containers"][0]["livenessProbe"]["exec"]["command"]

    def check(url: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = {"SLACKWATER_REDIS_URL": url, "SLACKWATER_HOST": "pod"}
        env = {**os.environ, **settings, "PATH": path, "TMPDIR": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    there = check(redis_server)
    assert (there.returncode, "no denoise worker" in there.stdout) == (1, True)
    away = check(f"redis://127.0.0.1:{free_port()}/0")
    assert (away.returncode, "Redis is away" in away.stdout) == (0, True)


def test_the_charts_redis_wants_its_password_and_evicts_nothing(tmp_path: Path) -> None:
    """Started by the very command of its pod; the URL in the secret has the password in it."""
    manifests = render({"redis": {"password": "a/b c?d"}})
    secret = one(manifests, "Secret", "redis")["stringData"]
    pod = one(manifests, "StatefulSet", "redis")["spec"]["template"]["spec"]
    shell, flag, script = pod["containers"][0]["command"]
    port = free_port()
    (tmp_path / "redis-server").symlink_to(binary())
    script = script.replace("/data", f"{tmp_path} --port {port}")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": secret["password"]}
    server = subprocess.Popen([shell, flag, script], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert any("Ready to accept connections" in line for line in server.stdout)
        url = secret["url"].replace("pool-slackwater-redis:6379", f"127.0.0.1:{port}")
        with writing(url) as client:
            config: Any = client.config_get("*")
            assert config["maxmemory-policy"] == "noeviction"
            assert config["appendonly"] == "yes"
            assert int(config["maxmemory"]) == 2**30
        with (
            writing(f"redis://127.0.0.1:{port}/0") as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
    finally:
        server.terminate()
        server.communicate(timeout=10)


# What KEDA's `redis` scaler asks, by the types that its documentation names for listName.
COUNTED = {"list": "LLEN", "set": "SCARD", "hash": "HLEN", "zset": "ZCARD", "none": "LLEN"}


@pytest.mark.usefixtures("redis_client")  # nothing of others is active there
def test_a_job_for_a_stage_without_workers_is_work_that_keda_sees(redis_server: str) -> None:
    """From zero denoisers: the key that KEDA counts has the job, and is at nothing once a new
    denoiser has done it."""
    scaled = one(render({"keda": {"enabled": True}}), "ScaledObject", "denoise")["spec"]
    [trigger] = scaled["triggers"]
    assert (trigger["type"], scaled["minReplicaCount"]) == ("redis", 0)
    key = trigger["metadata"]["listName"]
    settings = Settings(noop="step_ms=1", arena_bytes=4 << 20)
    assert key == Keys(settings.prefix).active

    with (
        writing(redis_server) as asked,
        LocalPool(settings=settings, redis_url=redis_server) as pool,
        pool.client() as client,
    ):

        def counted() -> int:
            kind = asked.type(key).decode()
            return int(asked.execute_command(COUNTED[kind], key))

        pool.scale("denoise", 0)
        assert counted() == 0
        job = client.submit("a red circle")
        job.admitted(30)
        assert counted() == 1
        pool.scale("denoise", 1)
        assert job.wait(30).status == "succeeded"
        assert counted() == 0
