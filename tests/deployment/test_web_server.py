"""Dagster's web server, which has no login and is only reachable from its own machine or through a proxy."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(("given", "host"), [({}, "127.0.0.1"), ({"DEPLOY_WEB_HOST": "10.0.0.1"}, "10.0.0.1")])
def test_it_listens_on_loopback_unless_another_address_is_given(tmp_path, given, host):
    shutil.copytree(PROJECT / "deploy", tmp_path / "deploy")
    shutil.copy(PROJECT / "dagster.yaml", tmp_path)
    (program := tmp_path / "dagster-webserver").write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DAGSTER_HOME": str(tmp_path), "DEPLOY_HOST": "10.9.9.9"}
    start = [str(tmp_path / "deploy" / "start"), "webserver"]
    started = subprocess.run(start, env={**path, **given}, capture_output=True, text=True, check=True)

    assert started.stdout.split() == ["-h", host, "-p", "3000", "-w", "workspace.yaml"]


def test_compose_publishes_its_port_on_loopback_only():
    services = yaml.safe_load((PROJECT / "deploy" / "compose.yaml").read_text())["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}

    assert published == {"webserver": ["127.0.0.1:3000:3000"]}


def test_kubernetes_admits_only_pods_with_a_label():
    files = (PROJECT / "deploy" / "kubernetes").glob("*.yaml")
    objects = [item for file in files for item in yaml.safe_load_all(file.read_text()) if isinstance(item, dict)]
    (policy,) = (
        item for item in objects if item.get("kind") == "NetworkPolicy" and item["metadata"]["name"] == "webserver"
    )

    assert policy["spec"]["podSelector"] == {"matchLabels": {"app": "webserver"}}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"reaches-webserver": "true"}}}], "ports": [{"port": 3000}]}
    ]
