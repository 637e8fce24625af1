"""Text without secrets and without control characters."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline_platform.model.safe_text import address, is_ambiguous, printable, redacted, secrets_in

PASSWORDS = st.text(string.ascii_letters + string.digits + "@:/?#%;&=+ []'\"\\", min_size=8, max_size=20)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://sqs.eu-west-1.amazonaws.com/1/orders", "https://sqs.eu-west-1.amazonaws.com/1/orders"),
        ("amqp://bob:pw@host:5672/v?heartbeat=3#x", "amqp://host:5672/v"),
        ("postgresql+psycopg://bob:a@b@host/db", "postgresql+psycopg://***"),
        ("amqp://bob:1?pw@host/", "amqp://***"),
        ("http://host/?token=a@pw", "http://***"),
        ("a password", "***"),
        ("a password://", "***"),
    ],
)
def test_an_address_is_shown_without_credentials(url, shown):
    assert address(url) == shown
    assert is_ambiguous(url) == shown.endswith("://***")


@pytest.mark.parametrize(
    ("value", "secrets"),
    [
        ("amqp://bob:a@b?c/d@host/v?heartbeat=3", ["a@b?c/d"]),
        ("postgresql://host/db?password=one&sslpassword=two&sslmode=require", ["one", "two"]),
        ("sqlite:///path", []),
        ("hush", ["hush"]),
        ("", []),
        ({"sasl.password": "a", "sasl.oauthbearer.config": "b", "log_level": "7", "ssl.key.pem": "c"}, ["a", "b", "c"]),
    ],
)
def test_the_secrets_of_an_option_are_found(value, secrets):
    assert list(secrets_in(value)) == secrets


@given(PASSWORDS)
@example("a@b/c?d#e%f")
@example("'quoted'")
def test_a_secret_is_redacted_in_each_form(password):
    url = f"amqp://bob:{password}@host/"
    for text in (f"refused {password}", f"refused {password!r}", f"in {url}"):
        assert password not in redacted(text, [password])


def test_a_short_secret_leaves_other_words_as_they_are():
    assert redacted("a bad password: 'a'", ["a"]) == "*** bad password: '***'"


def test_printable_text_stays_and_control_characters_are_escaped():
    assert printable("Größe 5 µm, 数\t", keep="\t") == "Größe 5 µm, 数\t"
    assert printable("\x1b[2J\r\n\u202e\ud83d") == r"\x1b[2J\r\n\u202e\ud83d"
