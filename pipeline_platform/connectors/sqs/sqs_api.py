"""Messages of SQS in the words of its API, and what AWS means when it refuses a call, or an entry of one."""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline_platform.model.portions import portions
from pipeline_platform.model.safe_text import redacted
from pipeline_platform.source.contract import Refused, SourceAwayError, SourceError

PER_CALL = 10
"""The most messages that SQS takes or gives in one call."""
BYTES_PER_CALL = 2**20
"""The most that the messages of one call to send come to (SQS quotas, messages)."""


def metadata_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a received message says beside its body; binary values as base64."""
    metadata: dict[str, Any] = {"md5_of_body": message["MD5OfBody"], "attributes": message.get("Attributes", {})}
    if attributes := message.get("MessageAttributes"):
        metadata["message_attributes"] = {
            name: {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in value.items()}
            for name, value in attributes.items()
        }
    return metadata


def sequence_of(number: str) -> int:
    """Fit a `SequenceNumber`, of 20 digits and beyond 64 bits, into 63 bits; the order of numbers stays.

    Those of AWS lie between two and three times 2**63, and rise by less than a thousandth of that in a year.
    """
    return int(number) % 2**63


def entry_of(number: int, body: str, metadata: Mapping[str, Any] | None, *, is_fifo: bool) -> dict[str, Any]:
    """A message to be sent, with what of the metadata of a received one can be sent again.

    A binary value is bytes, or base64 as a received one is; other text is a `ValueError`.
    """
    entry: dict[str, Any] = {"Id": str(number), "MessageBody": body}
    given = metadata or {}
    # A queue that is not FIFO refuses ids for deduplication; by groups it is fair to those who send.
    for name in ("MessageGroupId", "MessageDeduplicationId") if is_fifo else ("MessageGroupId",):
        if value := (given.get("attributes") or {}).get(name):
            entry[name] = value
    if attributes := given.get("message_attributes"):
        entry["MessageAttributes"] = {
            name: {
                key: base64.b64decode(v, validate=True) if key == "BinaryValue" and isinstance(v, str) else v
                for key, v in value.items()
            }
            for name, value in attributes.items()
        }
    return entry


def batches(entries: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Put entries together for calls; one that is too large gets a call of its own, for SQS to refuse."""
    return portions(entries, _bytes, BYTES_PER_CALL, PER_CALL)


def _bytes(entry: Mapping[str, Any]) -> int:
    """What SQS counts of a message: its body, and name, type and value of each attribute."""
    values = [text for name, value in entry.get("MessageAttributes", {}).items() for text in (name, *value.values())]
    return sum(len(text if isinstance(text, bytes) else text.encode()) for text in (entry["MessageBody"], *values))


NO_QUEUE = "NonExistentQueue|QueueDoesNotExist|InvalidAddress"
_NO_CREDENTIALS = (
    ".*Credential.*|ProfileNotFound|.*(SSO|Token).*|InvalidAccessKeyId|InvalidClientTokenId|SignatureDoesNotMatch"
    "|InvalidSecurity|UnrecognizedClientException|AuthFailure|RequestExpired|LoginRefreshRequired"
)
_AWAY = ".*Connect.*|.*Timeout.*|SSLError|ProxyConnectionError|HTTPClientError|ConnectionClosedError"
_BUSY = ".*Throttl.*|RequestLimitExceeded|TooManyRequests.*|ServiceUnavailable.*|Internal(Error|Failure|ServerError)"
_EXPLANATIONS = {
    NO_QUEUE: "queue_url {queue!r} is no queue there (region_name {region}, endpoint_url {endpoint}). Create it, or "
    "correct the one that is wrong",
    "NoRegionError|InvalidRegionError": "region_name is {region} and queue_url {queue!r} names none. Set region_name "
    "or AWS_DEFAULT_REGION",
    "OverLimit": "queue_url {queue!r} has as many messages in flight as its quota allows ({code}). Others wait until "
    "some are deleted. Set max_in_flight to that quota, or have AWS raise it",
    "AccessDenied.*|AuthorizationError|KmsAccessDenied": "not allowed on queue_url {queue!r}: {text}. Allow "
    "sqs:GetQueueAttributes, sqs:ReceiveMessage, sqs:DeleteMessage and sqs:ChangeMessageVisibility, and for send() "
    "sqs:SendMessage",
    # What AWS says of refused credentials is left out: it may quote them.
    _NO_CREDENTIALS: "no valid credentials for queue_url {queue!r} ({code}; profile_name {profile}). Give some in the "
    "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile or a role, or renew what is there",
    _AWAY: "endpoint_url "
    "({endpoint}) does not answer for queue_url {queue!r}: {text}. Correct it, or see to the network or server",
}
"""What to do about an error, by its code."""


def code_of(error: BaseException | None) -> str:
    """AWS's code of an error without its prefix, or the class of an error that is not AWS's."""
    response = getattr(error, "response", None) or {}  # of a connection that was closed it is None
    code = str(response.get("Error", {}).get("Code", ""))
    return code.rsplit(".", 1)[-1] or type(error).__name__


def explained(error: Exception, source: Any) -> SourceError:
    """Say which option of an `SqsSource` is to blame and what to do; never what the credentials are."""
    code = code_of(error)
    client = vars(source).get("_client")  # missing if it could not be created
    found = (way_out for codes, way_out in _EXPLANATIONS.items() if re.fullmatch(codes, code))
    explanation = next(found, "queue_url {queue!r} failed with {text}").format(
        queue=source.queue_url,
        endpoint=source.endpoint_url or (f"unset, so {client.meta.endpoint_url}" if client else "unset"),
        region=source.region_name or "unset",
        profile=source.profile_name or "unset",
        code=code,
        text=f"{type(error).__name__}: {error}",
    )
    kind = SourceAwayError if re.fullmatch(f"{_AWAY}|{_BUSY}", code) else SourceError
    return kind(redacted(f"source {source.name!r}: {explanation}", source.secrets))


def words_of(failure: Mapping[str, Any]) -> str:
    """AWS's words on an entry of a call that it refused."""
    return f"{failure['Code'].rsplit('.', 1)[-1]}: {failure.get('Message', '')}"


def refused(handle: str, failure: Mapping[str, Any]) -> Refused:
    """An entry that was not acknowledged."""
    code, _, text = words_of(failure).partition(": ")
    # Of a handle whose lease is over, FIFO queues say that the parameter is invalid, having expired. Of a message that
    # was deleted meanwhile and is to be put back, they say that it does not exist.
    stale = code in {"ReceiptHandleIsInvalid", "MessageNotInflight"} or "expired" in text or "does not exist" in text
    return Refused(handle, f"{code}: {text}", lost=stale)
