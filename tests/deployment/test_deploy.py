"""Files in `deploy/`, checked by the linters of their platforms; tests/hosts starts the processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pipeline_platform import Pipeline
from pipeline_platform.run import stopping
from servers import go
from servers.__main__ import FOLDER

PROJECT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COMPOSE = "github.com/compose-spec/compose-go/v2/cmd@v2.16.2"
"""Module with which `docker compose config` reads its file."""


@pytest.fixture(scope="module")
def deploy(tmp_path_factory):
    """Return the folder in a copy of the checkout, with secrets."""
    checkout = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PROJECT / "deploy", checkout / "deploy")
    shutil.copy(PROJECT / "dagster.yaml", checkout)
    shutil.copytree(checkout / "deploy" / "secrets.example", checkout / "deploy" / "secrets")
    return checkout / "deploy"


def printed(*command, expected=0):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def needed(program):
    if found := shutil.which(program):
        return found
    if "CI" in os.environ:
        pytest.fail(f"{program} is missing")
    pytest.skip(f"{program} is not installed")


def roles():
    return set(re.findall(r"^([a-z-]+)\)", (PROJECT / "deploy" / "start").read_text(), re.M)) - {"instance"}


def test_hadolint_finds_nothing_in_the_dockerfile(deploy):
    assert not printed(BIN / "hadolint", deploy / "Dockerfile")


def test_images_hold_nothing_that_git_ignores():
    def names(file):
        lines = (PROJECT / file).read_text().splitlines()
        return {line.removeprefix("**/").strip("/") for line in lines if not line.startswith("#")}

    assert names(".dockerignore") >= names(".gitignore") | {".git", ".env"}


def test_compose_reads_its_file_and_starts_each_process(deploy):
    if missing := go.missing():
        pytest.skip(missing)
    home = (FOLDER / f"compose-{COMPOSE.rpartition('@')[2]}").resolve()
    if not (home / "cmd").exists():
        home.mkdir(parents=True, exist_ok=True)
        go.run(home, "install", COMPOSE, GOBIN=str(home))
    services = yaml.safe_load(printed(home / "cmd", deploy / "compose.yaml"))["services"]
    assert {command for service in services.values() for command in service.get("command") or ()} >= roles()
    for name in roles():
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["read_only"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]


@pytest.fixture(scope="module")
def objects(deploy):
    """Return the objects that `kubectl apply -k` sends, checked by their schemas."""
    (deploy / "kubernetes" / "instance.yaml").write_text(printed("sh", deploy / "start", "instance"))
    file = deploy.parent / "manifests.yaml"
    file.write_text(printed(needed("kubectl"), "kustomize", deploy))
    printed(BIN / "kubernetes-validate", "--strict", file)
    return list(yaml.safe_load_all(file.read_text()))


def test_a_new_cluster_gets_the_namespace_of_all_objects_first(deploy, objects):
    launcher = yaml.safe_load((deploy / "kubernetes" / "launcher.yaml").read_text())["run_launcher"]["config"]
    namespace, *others = objects
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", launcher["job_namespace"])
    assert {each["metadata"]["namespace"] for each in others} == {launcher["job_namespace"]}


def pods_of(objects):
    return [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"]


def test_pods_have_no_root_no_privileges_and_nothing_to_write_but_their_volumes(deploy, objects):
    launcher = yaml.safe_load((deploy / "kubernetes" / "launcher.yaml").read_text())["run_launcher"]["config"]
    run = launcher["run_k8s_config"]
    run_pod = run["pod_spec_config"] | {"containers": [run["container_config"] | {"args": ["run"]}]}
    for pod in [*pods_of(objects), run_pod]:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
        of_spark = container["args"][0].startswith("spark-")
        assert pod.get("automountServiceAccountToken", True) is not of_spark


def test_each_process_has_secrets_of_its_own(objects):
    of_pods = {
        pod["containers"][0]["args"][0]: [each["secretRef"]["name"] for each in pod["containers"][0]["envFrom"][1:]]
        for pod in pods_of(objects)
    }
    assert of_pods == {name: [f"{name}-secrets"] for name in roles()}
    held = {
        item["metadata"]["name"].removesuffix("-secrets"): item["data"] for item in objects if item["kind"] == "Secret"
    }
    for name in ("spark-master", "spark-connect"):
        assert held[name].keys() == {"PIPELINE_PLATFORM_SPARK_SECRET"}
    assert not any("URL" in name or "CONTROL" in name for name in held["spark-worker"])


@pytest.mark.parametrize(("given", "host"), [({}, "127.0.0.1"), ({"DEPLOY_WEB_HOST": "10.0.0.1"}, "10.0.0.1")])
def test_the_web_server_listens_on_loopback_unless_another_address_is_given(deploy, tmp_path, given, host):
    (program := tmp_path / "dagster-webserver").write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DAGSTER_HOME": str(tmp_path), "DEPLOY_HOST": "10.9.9.9"}
    start = [str(deploy / "start"), "webserver"]
    started = subprocess.run(start, env={**path, **given}, capture_output=True, text=True, check=True)

    assert started.stdout.split() == ["-h", host, "-p", "3000", "-w", "workspace.yaml"]


def started_worker(deploy, tmp_path, addresses, **given):
    """Start a worker on a host with some addresses, with a Spark that prints its options."""
    scripts = {"hostname": f'[ "$1" = -I ] && echo "{addresses}" || echo 127.0.1.1', "python": 'echo "$@"'}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o700)
    own = {"SPARK_STATE_DIR": str(tmp_path), "PIPELINE_PLATFORM_SPARK_SECRET": "s", "SPARK_MASTER": "spark://m:7077"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **own, **given}
    start = ["sh", str(deploy / "start"), "spark-worker"]
    return subprocess.run(start, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("addresses", "given", "host"),
    [
        ("10.0.0.7 172.17.0.1", {}, "10.0.0.7"),
        ("10.0.0.7", {"DEPLOY_HOST": "worker-7"}, "worker-7"),
        ("", {"DEPLOY_HOST": "127.0.0.1"}, "127.0.0.1"),
    ],
)
def test_spark_listens_on_an_address_that_other_hosts_reach(deploy, tmp_path, addresses, given, host):
    options = started_worker(deploy, tmp_path, addresses, **given).stdout.split()
    assert options[options.index("--host") + 1] == host


def test_spark_does_not_start_on_a_host_without_an_address(deploy, tmp_path):
    assert started_worker(deploy, tmp_path, "").returncode == 1


def test_a_changed_dagster_yaml_arrives_at_the_next_start_unless_the_file_in_dagster_home_is_the_operators(
    deploy, tmp_path
):
    (program := tmp_path / "dagster-webserver").write_text("#!/bin/sh\n")
    program.chmod(0o700)
    source, home = deploy.parent / "dagster.yaml", tmp_path / "home"
    home.mkdir()
    there = home / "dagster.yaml"
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DAGSTER_HOME": str(home), "DEPLOY_HOST": "here"}
    before = source.read_text()

    def started():
        subprocess.run([deploy / "start", "webserver"], env=here, check=True)
        return there.read_text()

    try:
        first = started()
        source.write_text(before.replace("max_concurrent_runs: 8", "max_concurrent_runs: 9"))
        assert "max_concurrent_runs: 8" in first
        second = started()
        assert "max_concurrent_runs: 9" in second
        own = second.partition("\n")[2].replace("runs: 9", "runs: 3")
        there.write_text(own)
        assert started() == own
        assert [file.name for file in home.iterdir()] == ["dagster.yaml"]
    finally:
        source.write_text(before)


def test_compose_publishes_only_the_web_server_and_on_loopback():
    services = yaml.safe_load((PROJECT / "deploy" / "compose.yaml").read_text())["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}

    assert published == {"webserver": ["127.0.0.1:3000:3000"]}


def test_only_pods_that_are_named_reach_the_web_server_and_none_the_daemon_and_runs(objects):
    policies = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "NetworkPolicy"}
    assert policies["webserver"]["podSelector"] == {"matchLabels": {"app": "webserver"}}
    (into,) = policies["webserver"]["ingress"]
    assert into["from"] == [{"podSelector": {"matchLabels": {"reaches-webserver": "true"}}}]
    assert into["ports"] == [{"port": 3000}]
    for name in ("daemon", "runs"):
        assert policies[name].get("policyTypes") == ["Ingress"]
        assert not policies[name].get("ingress")


def test_kubernetes_manifests_fit_their_schemas_and_start_each_process(objects):
    pods = pods_of(objects)
    assert {pod["containers"][0]["args"][0] for pod in pods} == roles()
    assert all(pod["terminationGracePeriodSeconds"] and "livenessProbe" in pod["containers"][0] for pod in pods)


def test_the_instance_on_kubernetes_has_the_settings_of_dagster_yaml_and_a_launcher_of_its_own(deploy):
    ours = yaml.safe_load((deploy.parent / "dagster.yaml").read_text())
    theirs = yaml.safe_load(printed("sh", deploy / "start", "instance"))
    assert theirs["run_launcher"]["class"] == "K8sRunLauncher"
    assert "postgres" in theirs["storage"]
    entry = json.loads(re.search(r"^ENTRYPOINT (.+)$", (deploy / "Dockerfile").read_text(), re.M)[1])
    container = theirs["run_launcher"]["config"]["run_k8s_config"]["container_config"]
    assert [*container["command"], "deploy/start"] == entry  # Dagster passes a whole command as arguments
    assert {**ours, "run_launcher": None, "storage": None} == {**theirs, "run_launcher": None, "storage": None}


def test_systemd_takes_its_unit(deploy):
    unit = deploy / "systemd" / "pipeline-platform@.service"
    here = unit.with_name("pipeline-platform@daemon.service")
    here.write_text(unit.read_text().replace("%i", "daemon"))
    assert not [line for line in printed(needed("systemd-analyze"), "verify", here).splitlines() if here.name in line]


def test_systemd_exposes_little_of_the_host_to_a_process(deploy):
    here = deploy / "systemd" / "pipeline-platform@daemon.service"
    here.write_text((deploy / "systemd" / "pipeline-platform@.service").read_text().replace("%i", "daemon"))
    said = printed(needed("systemd-analyze"), "security", "--offline=yes", "--no-pager", here)
    assert float(re.search(r"Overall exposure level for .*: (\S+)", said)[1]) < 2.0


@pytest.mark.parametrize(
    ("file", "seconds"),
    [
        ("dagster.yaml", r"cancel_timeout_seconds: (\d+)"),
        ("deploy/compose.yaml", r"stop_grace_period: (\d+)s"),
        ("deploy/kubernetes/launcher.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        ("deploy/systemd/pipeline-platform@.service", r"TimeoutStopSec=(\d+)"),
    ],
)
def test_a_run_that_is_to_end_gets_the_time_that_it_may_take(file, seconds):
    (given,) = re.findall(seconds, (PROJECT / file).read_text())
    assert int(given) > stopping.longest_s(Pipeline.shutdown)


def test_an_unknown_process_is_refused_with_the_valid_names(deploy):
    said = printed("sh", deploy / "start", "deamon", expected=2)
    assert set(re.search(r"start (\S+)", said)[1].split("|")) == roles()


def test_the_daemons_process_ends_after_its_runs(deploy, tmp_path):
    daemon, said = tmp_path / "dagster-daemon", tmp_path / "said"
    run = f"trap 'sleep 1; echo given back >{said}; exit' TERM; while :; do sleep 0.1; done"
    daemon.write_text(f'#!/bin/sh\nsh -c "{run}" &\nexec sleep 60\n')
    daemon.chmod(0o755)
    here = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DAGSTER_HOME": str(tmp_path),
        "DEPLOY_HOST": "here",
    }
    started = subprocess.Popen(
        [deploy / "start", "daemon"], env=here, stdout=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(1)
    os.killpg(started.pid, signal.SIGTERM)
    started.wait(30)
    assert said.read_text() == "given back\n"
