"""Payloads in S3: SQS's extended clients store a large payload as an object, and send a pointer to it."""

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from pydantic import ConfigDict, Field, PrivateAttr

from pipeline_platform.connectors.aws import BUSY, NO_CREDENTIALS, aws_client, code_of
from pipeline_platform.model.blocks import as_arrow, with_columns
from pipeline_platform.model.failure import Failure, PayloadError, RunError
from pipeline_platform.model.message import Message
from pipeline_platform.model.strict_options import Options, Requirement
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.patience import USUAL, patiently
from pipeline_platform.tasks.callback_process.progress import without_time_limit

if TYPE_CHECKING:
    from pipeline_platform.model.blocks import BlockOf

_POINTERS = (
    "software.amazon.payloadoffloading.PayloadS3Pointer",  # with the message attribute ExtendedPayloadSize
    "com.amazon.sqs.javamessaging.MessageS3Pointer",  # with SQSLargePayloadSize
)
"""Classes of pointers. A payload `["<class>", {"s3BucketName": "...", "s3Key": "..."}]` is a pointer."""
_CONNECTIONS = 100
"""Maximum open connections of a callback process: enough for the usual numbers of threads."""
_BLOCK_BYTES = 256 * 2**20
"""Maximum bytes of the fetched payloads of a block."""
_OF_AN_OBJECT = ("AccessDenied", "InvalidObjectState")
"""Codes of forbidden requests that concern the object, not the credentials. An archived object has an invalid state."""
_PER_CALL = 1_000
"""Maximum objects of one call to delete (S3 API, DeleteObjects)."""


class MissingPayloadError(LookupError):
    """S3 does not return the object of a pointer. The message fails; a retry may succeed."""


class BlockTooLargeError(Exception):
    """The payloads of a block do not fit in memory together."""


class S3Error(RunError):
    """S3 cannot be used: the run fails, no message does. The text contains the fix."""


class S3AwayError(S3Error):
    """S3 is unavailable, or did not become available in time."""


class S3Payloads(Options):
    """Fetches and deletes payloads in S3. Create it in `__init__` of a pipeline; call `resolve` in `handle_message`.

    Credentials are found as by other AWS clients. They need `s3:GetObject`, and `delete` needs `s3:DeleteObject`.
    Without `s3:ListBucket`, S3 reports a missing object as forbidden. Methods are thread-safe.

    While S3 is unavailable, a callback waits up to 30 s, which `message_timeout` does not count. Then its run fails,
    no message fails, and a later run handles the messages.

    Raises:
        PipelineError: An option is not valid.
    """

    model_config = ConfigDict(ignored_types=(per_process,))

    buckets: Annotated[
        tuple[str, ...],
        Requirement(
            "a tuple of names of buckets",
            'Use, for example, ("orders-payloads",).',
            lambda value: (
                isinstance(value, list | tuple)
                and value
                and all(isinstance(name, str) and re.fullmatch("[A-Za-z0-9._-]{3,255}", name) for name in value)
            ),
        ),
    ] = Field(
        description="Names of the buckets that pointers may refer to: the sender of a message chooses its pointer."
    )
    max_bytes: int = Field(
        64 * 2**20,
        ge=1,
        le=2**30,
        description="Maximum size of an object in bytes. A message with a larger object fails.",
    )
    region_name: str | None = Field(
        None, description="AWS region; by default the region of the environment or profile."
    )
    endpoint_url: str | None = Field(None, description="URL of a server other than AWS.")
    profile_name: str | None = Field(None, description="AWS profile; by default the environment's.")

    _refused: S3Error | None = PrivateAttr(default=None)

    def resolve(self, message: Message) -> Message:
        """Return a message with the payload that its data points to. Without a pointer, return it unchanged.

        Raises:
            PayloadError: The pointer is not valid, leads to another bucket, or the object is too large.
            MissingPayloadError: S3 does not return the object.
            S3Error: S3 cannot be used.
        """
        if (pointer := self._pointer(message.data)) is None:
            return message
        payload = self.fetch(*pointer)
        # In the given message, too: the callback may derive its result from it.
        message._state = message._state._replace(fetched=len(payload))
        return message.put(payload)

    def resolve_block(self, messages: "BlockOf", threads: int = 8) -> "BlockOf":
        """Return a block in which payloads replace the pointers in `data`, fetched by `threads` at the same time.

        Call it in `handle_messages` before the block is decoded. A row whose payload cannot be fetched gets the
        `status` `failed` and the `reason` of `resolve`.

        Raises:
            S3Error: S3 cannot be used.
            BlockTooLargeError: The payloads exceed 256 MiB. Let it pass: the callback gets the block in halves.
        """
        known = as_arrow(messages.select(["data", "status"]))
        payloads, failures, pointers = known["data"].to_pylist(), dict[int, Failure](), dict[int, tuple[str, str]]()

        fetched = [0]

        def fetch(row: int) -> None:
            try:
                payloads[row] = self.fetch(*pointers[row])
            except BaseException as error:
                failures[row] = Failure.of(error, "handle_messages")
            fetched[0] += len(payloads[row])
            if len(pointers) > 1 and fetched[0] > _BLOCK_BYTES:
                raise BlockTooLargeError(f"the payloads of {len(pointers)} messages exceed {_BLOCK_BYTES:,} bytes")

        for row, status in enumerate(known["status"].to_pylist()):
            try:
                if status in ("ok", None) and (pointer := self._pointer(payloads[row])):
                    pointers[row] = pointer
            except PayloadError as error:
                failures[row] = Failure.of(error, "handle_messages")
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(fetch, pointers):
                pass
        block: BlockOf = with_columns(messages, {"data": pa.array(payloads, pa.binary())}, (), failures)
        return block

    def fetch(self, bucket: str, key: str) -> bytes:
        """Return the content of an object. Raises the errors of `resolve`. Override it in tests."""

        def fetch() -> bytes:
            reply = self._client.get_object(Bucket=bucket, Key=key)
            with closing(reply["Body"]) as body:  # as a context, it would skip the check of its length and checksum
                if (size := int(reply["ContentLength"])) > self.max_bytes:
                    too_large = f"has {size:,} bytes, and max_bytes allows {self.max_bytes:,}"
                    raise PayloadError(f"{_place(bucket, key)}: {too_large}")
                return bytes(body.read())

        return bytes(self._asked(_place(bucket, key), fetch))

    def delete(self, messages: Iterable[Message]) -> None:
        """Delete the objects that messages point to. Safe to call twice.

        Call it in `acknowledge` with the successful messages. A later replay cannot handle them again.

        Raises:
            RuntimeError: S3 did not delete all objects; the next run calls `acknowledge` again.
        """
        pointers = dict[tuple[str, str], None]()
        for message in messages:
            with suppress(PayloadError):  # the sender chose an invalid pointer: there is nothing to delete
                if pointer := self._pointer(message.data):
                    pointers[pointer] = None
        for bucket in dict.fromkeys(bucket for bucket, _ in pointers):
            keys = [{"Key": key} for of, key in pointers if of == bucket]
            for start in range(0, len(keys), _PER_CALL):
                try:
                    reply = self._asked(bucket, partial(self._delete, bucket, keys[start : start + _PER_CALL]))
                except (RunError, LookupError) as error:
                    raise RuntimeError(str(error)) from None
                if errors := reply.get("Errors"):
                    first = f"{_place(bucket, errors[0].get('Key', ''))}: {errors[0].get('Code')}"
                    raise RuntimeError(f"S3 did not delete {len(errors)} objects. First error: {first}")

    def _delete(self, bucket: str, keys: list[dict[str, str]]) -> Any:
        return self._client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})

    def _pointer(self, data: object) -> tuple[str, str] | None:
        if not isinstance(data, bytes) or b"S3Pointer" not in data[:80]:
            return None
        try:
            pointer = json.loads(data)
        except ValueError:
            return None
        if not isinstance(pointer, list) or not pointer or pointer[0] not in _POINTERS:
            return None
        place = pointer[1] if len(pointer) == 2 and isinstance(pointer[1], dict) else {}
        bucket, key = place.get("s3BucketName"), place.get("s3Key")
        if not isinstance(bucket, str) or not isinstance(key, str) or not 0 < len(key.encode()) <= 1_024:
            raise PayloadError("the pointer to S3 has no valid s3BucketName and s3Key")
        if bucket not in self.buckets:
            raise PayloadError(f"{_place(bucket, key)}: is not in one of the buckets {', '.join(self.buckets)}")
        return bucket, key

    @per_process
    def _client(self) -> Any:
        return aws_client("s3", self, self.region_name, _CONNECTIONS, read_timeout_s=20)

    def _asked(self, where: str, request: Any) -> Any:
        """Return the answer to a request; wait while S3 is unavailable. Other threads do not wait again."""
        if self._refused is not None:
            raise self._refused
        with without_time_limit():
            try:
                return patiently(partial(self._answered, where, request), USUAL, S3AwayError)
            except S3Error as error:
                self._refused = error
                raise

    def _answered(self, where: str, request: Any) -> Any:
        try:
            return request()
        except PayloadError:
            raise
        except Exception as error:
            code, reply = code_of(error), getattr(error, "response", None) or {}
            status = reply.get("ResponseMetadata", {}).get("HTTPStatusCode")
            # AWS's text is left out: it may quote rejected credentials.
            if re.fullmatch(NO_CREDENTIALS, code) or (status == 403 and code not in _OF_AN_OBJECT):
                raise S3Error(f"S3: no valid credentials ({code}). Provide or renew them.") from None
            if code == "ParamValidationError":
                raise MissingPayloadError(f"{where}: is not a valid object") from None
            if status is None or status >= 500 or status == 429 or re.fullmatch(BUSY, code):
                fix = "Check region_name, endpoint_url, the network and S3."
                raise S3AwayError(f"S3: is unavailable for {where}: {code}. {fix}") from None
            denied = " It may be missing: S3 reports this without s3:ListBucket." if code == "AccessDenied" else ""
            raise MissingPayloadError(f"{where}: cannot be read: {code}.{denied}") from None


def _place(bucket: str, key: str) -> str:
    return f"s3://{bucket}/{key}"
