"""A canary in every option that may contain a secret, which no error, log, event, repr or output shows."""

import json
import logging
import sys
import traceback
from contextlib import suppress
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.cli.main import main
from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration import ControlResource, LakeResource, SparkResource, source_resource
from pipeline_platform.orchestration.resources.launchpad import out_of_launchpad
from pipeline_platform.orchestration.resources.source_resources import AcknowledgerResource

CANARY = "CaNaRy7"
PASSWORDS = [
    f"{before}{CANARY}{after}"
    for before, after in [
        ("", ""), ("a@", ""), ("1?", ""), ("a/", ""), ("a#", ""), ("a%", ""), ("a:", ""), ("a;", ""), ("a'", "'"),
        ('a"', ""), ("a[", ""), ("a]", ""), ("a b", ""), ("a%40", ""), ("", "@b"), ("", "/b"), ("", "?b=c"), ("", "#"),
    ]
]  # fmt: skip
"""Passwords that contain the canary, with every separator of a URL before or after it."""
CLOSED = "127.0.0.1:1"
"""Address without a server."""
SCRAM = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-256", "sasl_username": "u"}
KEY = f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----"
JSON = json.dumps({"type": "service_account", "private_key": KEY})

OPTIONS: dict[type[Any], dict[str, Any]] = {
    TableQueue: {"url": "sqlite:///q"},
    RabbitmqSource: {"url": f"amqp://{CLOSED}", "queue": "q"},
    SqsSource: {"queue_url": f"http://{CLOSED}/1/q", "region_name": "eu-west-1"},
    KafkaSource: {"bootstrap_servers": CLOSED, "group_id": "g", "topics": ["t"], "request_timeout_s": 2},
    PubsubSource: {"subscription": "projects/p/subscriptions/s", "timeout_s": 1},
    FileSource: {"root": "/no/such/folder", "catalog": "sqlite:///catalog"},
}
"""Options of sources that cannot be reached."""
URLS = [
    *((TableQueue, "url", f"postgresql://bob:{{}}@{CLOSED}/db"), (TableQueue, "url", f"mysql://bob:{{}}@{CLOSED}/db")),
    (TableQueue, "url", f"postgresql://{CLOSED}/db?password={{}}"),
    (FileSource, "catalog", f"postgresql://bob:{{}}@{CLOSED}/db"),
    (FileSource, "root", "s3://key:{}@bucket/prefix"),
    (TableQueue, "url", "bob:{}@host/db"),
    *((RabbitmqSource, "url", f"{kind}://guest:{{}}@{CLOSED}/v") for kind in ("amqp", "amqps", "http")),
    (RabbitmqSource, "url", "guest:{}@host"),
    (RabbitmqSource, "url", f"amqp://{CLOSED}/?heartbeat={{}}"),
    *((SqsSource, option, f"http://key:{{}}@{CLOSED}/1/q") for option in ("queue_url", "endpoint_url")),
    *((SqsSource, option, f"http://{CLOSED}/1/q?token={{}}") for option in ("queue_url", "endpoint_url")),
    (SqsSource, "endpoint_url", "key:{}@host"),
    *((KafkaSource, "bootstrap_servers", f"{kind}u:{{}}@{CLOSED}") for kind in ("", "SASL_SSL://")),
    *((PubsubSource, option, "{}@host:1") for option in ("emulator_host", "api_endpoint")),
    (PubsubSource, "api_endpoint", "https://u:{}@host"),
]
"""Options with an address, and the position of a password."""
PLACES: list[Any] = [
    *(
        (kind, {option: url.format(password)})
        for number, (kind, option, url) in enumerate(URLS)
        for password in PASSWORDS[number % 2 :: 2]  # half each: neighbours in the list share most of a parser
    ),
    (KafkaSource, {**SCRAM, "sasl_password": CANARY}),
    (KafkaSource, {"security_protocol": "SSL", "ssl_key_location": KEY}),
    (KafkaSource, {"security_protocol": "SSL", "ssl_ca_location": KEY}),
    (KafkaSource, {"security_protocol": "SSL", "ssl_key_password": CANARY, "ssl_key_location": "/no/key"}),
    (KafkaSource, {"security_protocol": "SSL", "client_options": {"ssl.key.pem": KEY}}),
    (KafkaSource, {"client_options": {"sasl.oauthbearer.client.secret": CANARY, "log_level": "high"}}),
    (KafkaSource, {"client_options": {"sasl.password": CANARY}}),
    (PubsubSource, {"credentials_file": JSON}),
    (PubsubSource, {"credentials_file": f"{CANARY}" * 50}),
]


def identified(place: Any) -> str:
    if isinstance(place, type):
        return place.__name__
    return ascii(place)[:70] if isinstance(place, dict) else ""


@pytest.fixture
def shown(caplog, capfd, recwarn):
    """Return a function that returns everything that was logged, printed and warned."""
    caplog.set_level(logging.DEBUG, logger="pipeline_platform")
    caplog.set_level(logging.DEBUG, logger="dagster")
    return lambda: "".join([caplog.text, *capfd.readouterr(), *(str(warning.message) for warning in recwarn)])


def used(kind: type[Any], options: dict[str, Any]) -> str:
    """Return the output of a source and the traceback of its refusal."""
    source, text = None, ""
    try:
        source = kind(name="s", **{**OPTIONS[kind], **options})
        text = f"{source!r} {source}"
        source.check_ready()
    except Exception as error:
        return text + "".join(traceback.format_exception(error))
    finally:
        if source is not None:
            source.close()
    raise AssertionError(f"{source!r} is neither refused nor unreachable")


@pytest.mark.parametrize(("kind", "options"), PLACES, ids=identified)
def test_no_source_shows_a_secret(kind, options, shown):
    text = used(kind, options)

    assert CANARY not in text + shown()


@pytest.mark.parametrize("password", PASSWORDS[::3])
def test_no_store_shows_a_secret(password, shown):
    text = ""
    for make in (
        lambda: ControlStore(f"postgresql://bob:{password}@{CLOSED}/db").paused("p"),
        lambda: ControlStore(f"postgresql://{CLOSED}/db?sslpassword={password}").paused("p"),
        lambda: Lake(root=f"s3://key:{password}@bucket/lake"),
        lambda: Lake(root="s3://bucket/lake", storage_options={"AWS_ENDPOINT_URL": f"http://u:{password}@{CLOSED}"}),
    ):
        with pytest.raises(Exception) as refused:  # noqa: PT011 - whatever it is, it shows nothing
            make()
        text += "".join(traceback.format_exception(refused.value))
    lake = Lake(root="s3://bucket/lake", storage_options={"AWS_SECRET_ACCESS_KEY": password})

    assert CANARY not in f"{text}{lake!r}{lake}{shown()}"


SET = {
    "spark": lambda value: SparkResource(remote=value),
    "spark_ui": lambda value: SparkResource(ui=value),
    "lake": lambda value: LakeResource(root=value),
    "control": lambda value: ControlResource(url=value),
    "acknowledger": lambda value: AcknowledgerResource(attempts=value),
    "table": lambda value: source_resource(TableQueue)(name="s", url=value),
}
"""Resources with an option that refuses its value."""


@pytest.mark.parametrize("resource", SET)
@pytest.mark.parametrize("value", [f"mysql://bob:{CANARY}@h/db", f"sc://h:1/;token={CANARY}", f"http://u:{CANARY}@h"])
def test_no_resource_quotes_what_it_refuses(resource, value):
    with pytest.raises(Exception) as refused:  # noqa: PT011
        SET[resource](value).process_config_and_initialize()

    assert CANARY not in "".join(traceback.format_exception(refused.value))


@dg.op(required_resource_keys={"under_test"})
def use(context):
    context.resources.under_test.check_ready()


def events_of(resource: Any, options: dict[str, Any]) -> str:
    """Return all events that Dagster stores of a run that uses a resource."""
    out_of_launchpad(resource)

    @dg.job(resource_defs={"under_test": resource}, executor_def=dg.in_process_executor)
    def using():
        use()

    config = {"resources": {"under_test": {"config": options}}} if options else {}
    with dg.DagsterInstance.ephemeral() as instance:
        try:
            result = using.execute_in_process(instance=instance, run_config=config, raise_on_error=False)
        except dg.DagsterInvalidConfigError as error:
            return "".join(traceback.format_exception(error))
        assert not result.success
        return "".join(map(dg.serialize_value, instance.all_logs(result.run_id)))


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (TableQueue, "url", f"postgresql://bob:a@{CANARY}@{CLOSED}/db"),
        (TableQueue, "url", f"postgresql://bob:{CANARY}@{CLOSED}/db"),
        (RabbitmqSource, "url", f"amqp://guest:1?{CANARY}@{CLOSED}/"),
        (RabbitmqSource, "url", f"amqp://guest:{CANARY}@{CLOSED}/"),
        (SqsSource, "queue_url", f"http://key:{CANARY}@{CLOSED}/1/q"),
        (KafkaSource, "bootstrap_servers", f"u:{CANARY}@{CLOSED}"),
        (PubsubSource, "credentials_file", JSON),
    ],
    ids=identified,
)
def test_no_event_of_a_run_shows_a_secret_of_the_environment(kind, option, value, monkeypatch, shown):
    monkeypatch.setenv("UNDER_TEST", value)
    resource = source_resource(kind)(name="s", **{**OPTIONS[kind], option: dg.EnvVar("UNDER_TEST")})

    assert CANARY not in events_of(resource, {}) + repr(resource) + shown()


@pytest.mark.parametrize(
    ("resource", "option"),
    [
        *((SparkResource(), option) for option in ("remote", "token", "cores", "state_folder")),
        (LakeResource(root="lake"), "root"),
        (ControlResource(url="sqlite:///c"), "url"),
        (AcknowledgerResource(), "attempts"),
        (source_resource(TableQueue)(name="s", url="sqlite:///q"), "table"),
    ],
    ids=identified,
)
def test_a_run_cannot_have_a_variable_put_into_an_option(resource, option, monkeypatch, shown):
    monkeypatch.setenv("CONTROL_URL", f"postgresql://bob:{CANARY}@h/db")
    stored = events_of(resource, {option: {"env": "CONTROL_URL"}})

    assert f"root:resources:under_test:config:{option}" in stored
    assert CANARY not in stored + shown()


LOCATION = """
import dagster as dg
from pipeline_platform.connectors.{module} import {kind}
from pipeline_platform.orchestration import platform_definitions, source_resource
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told

queue = source_resource({kind})(name="queue", {option}=dg.EnvVar("UNDER_TEST"), **{options})
defs = platform_definitions([Told], {{**resources_at({place!r}, {place!r}), "queue": queue}})
"""


@pytest.mark.parametrize(
    ("module", "kind", "option", "value"),
    [
        ("table_queue", TableQueue, "url", f"postgresql://bob:a@{CANARY}@{CLOSED}/db"),
        ("table_queue", TableQueue, "url", f"postgresql://bob:{CANARY}@{CLOSED}/db"),
        ("rabbitmq", RabbitmqSource, "url", f"amqp://guest:1?{CANARY}@{CLOSED}/"),
        ("sqs", SqsSource, "queue_url", f"http://key:{CANARY}@{CLOSED}/1/q"),
    ],
    ids=identified,
)
def test_the_command_line_shows_no_secret(module, kind, option, value, tmp_path, monkeypatch, shown):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("UNDER_TEST", value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = {name: given for name, given in OPTIONS[kind].items() if name != option}
    name = f"location_{tmp_path.name.replace('-', '_')}"
    text = LOCATION.format(module=module, kind=kind.__name__, option=option, options=options, place=str(tmp_path))
    (tmp_path / f"{name}.py").write_text(text)

    printed = ""
    for command in (["status"], ["show"], ["failures", "list", "told"], ["trace", "told", "m1"]):
        monkeypatch.setattr(sys, "argv", ["pipeline-platform", "-m", name, *command])
        with suppress(SystemExit):
            main()
        printed += shown()

    assert "queue" in printed
    assert CANARY not in printed
