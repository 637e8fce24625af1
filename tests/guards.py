"""Mutation tests: check that tests fail without each guard. Run `python -m tests.guards [word in a guard ...]`.

Each guard is removed from a copy of the work tree, and the tests that should fail run there.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parents[1]

# A file of the product, and the files or folders of tests that should fail. Below it a guard per line, found by a part
# of its line: an `if` becomes false, another statement is removed, and `=>` replaces a text. Text before `>>` occurs
# earlier in the file.
GUARDS = """
lake/decisions/decision.py: lake/test_decision.py lake/test_removed_receives.py
    if state == FENCED or ledger
    if not still_ours():
    if ledger.get(receive_id) is None:
    others.drop(outcomes.added_since(handle, looked)) => 0
    if state_at(handle, table, receive.receive_id, receive) != DECIDED => if True
    def fence( >> if state == DECIDED:
lake/decisions/decision.py: run/test_steps_again.py
    if received != known:
lake/tables.py: lake/test_decision.py
    max_commit_retries=0 => max_commit_retries=15
lake/tables.py: lake/test_durable.py
    self.sync_log(version + 1)
    def _committing >> self.sync_log(version)
    self.sync_log(handle.version())
lake/tables.py: lake/test_commits.py
    if self.exists() and self.version() > version => if True
lake/storage.py: lake/test_durable.py
    _fsync(self._at(half))
    os.replace >> self._sync_folder(os.path.dirname(self._at(path)))
lake/writer.py: lake/test_durable.py
    self._lake.sync(*kept)
lake/storage.py: lake/test_ledger.py
    self.remove_file(f"{folder}/{first}")
lake/storage.py: lake/test_storage.py
    (errno.ENOENT, errno.ENOTEMPTY) => (errno.ENOENT,)
lake/decisions/rewriting.py: lake/test_decision.py run/test_steps_again.py
    self._ledger.write(self._receive, DROPPED
    theirs = rows.filter(pc.is_in(rows["outcome"], pa.array(DECISIONS))) => theirs = rows
lake/decisions/rewriting.py: run/test_fan_out.py
    {"messages", "outcomes", "failed"} if => set() if
lake/failures/closing.py: run/test_closing.py
    if table.lost_rows_since(handle, looked):
lake/decisions/early_acks.py: tasks/test_early.py
    "receive.json" in names => True
    "_given_up" not in names => True
lake/maintenance/maintenance.py: lake/test_maintenance.py
    - wanted - set(busy) => - wanted
    old = {window for window in old if not _has_open(table, files, window)}
    age = max([SAFE_AGE, *(now - receive.started_at for receive in under_way)]) => age = SAFE_AGE
lake/latest/keyed_table.py: lake/test_latest.py
    AND ({after} OR ({same} AND {other}))" => AND {after}"
    AND ({after} OR {same})" => AND {after}"
lake/latest/latest.py: lake/test_latest.py
    rows = rows.filter(pc.is_valid(rows[deleted]))
    self._refuse_nulls(rows)
    if done is None or done > handle.version(): => if done is None:
run/intake.py: run/test_steps_again.py
    if done := ReceiveState(self.flow, receive_id).unfinished:
    return min([self.version, => return max([self.version,
run/finish.py: run/test_lease.py
    if not is_live and _is_ours(flow, record): => if _is_ours(flow, record):
run/finish.py: run/test_several_producers.py
    if not is_live and _is_ours(flow, record): => if not is_live:
run/finish.py: lake/test_broken_receives.py
    except Exception as error:  # one bad receive => except ZeroDivisionError as error:  # one bad receive
run/finish.py: run/test_kafka_flow.py
    flow.source.abandon(receive_id, list)
run/finish.py: run/test_finish.py
    _interrupt(flow, receive.receive_id, log)
    return not answer.is_kept => return True
tasks/notify_author.py: connectors/test_files.py
    (*MESSAGE_KEY, *NOT_TAKEN.names) => NOT_TAKEN.names
tasks/handle/in_order.py: run/test_held.py
    or (self.pace is not None and self.pace.is_over) => or False
run/steps.py: run/test_breaker_runs.py
    and flow.quota.breaker and state.is_live => and flow.quota.breaker
run/lease.py: run/test_early.py
    notes.close()
    _keep_forgotten(flow, receive) if acknowledged_early else None => None
run/lease.py: run/test_finish.py run/test_lease.py
    source.abandon(receive.receive_id, lambda: held(flow, receive))
run/lease.py: run/test_steps_again.py
    if not has_claim:
orchestration/runs/run_receive.py: orchestration/test_reexecuted_steps.py
    finish_now(flow, receive, context.log.info, partial(report_finished, context, flow))
    if state.is_decided:
run/lease.py: run/test_lease.py
    if every_s => if False
    beat(flow, receive), CLAIM_S / 3) => beat(flow, receive), CLAIM_S * 3)
    except Exception:  # a failover => except ZeroDivisionError:  # a failover
run/steps.py: run/test_steps_again.py
    unpublished = _publish_others(flow, receive) if looks else [] => unpublished: list[str] = []
    def acknowledge( >> state.expect_published()
run/steps.py: run/test_queue_faults.py
    if left == answer.withheld => if True
run/steps.py: run/test_retry.py
    if not letters.unsent: => if True:
run/begin.py: run/test_drained.py
    if granted and _is_held_back(
run/begin.py: run/test_turns.py
    if not intake.is_enough(granted, wanted):
run/dead_letters.py: run/test_retry.py
    flow.ledger.write(receive, SENT
run/finish.py: run/test_retry.py
    flow.ledger.forget()
run/notifying.py: run/test_own_acknowledger.py
    flow.ledger.write(receive, NOTIFIED
run/work/local_worker.py: run/test_local_worker.py
    if process and process.is_closed:
    while not poll.poll(1_000): => if False:
    os.dup2(theirs, ours)
    end_with(worker)
run/work/local_worker.py: run/test_callback_environment.py
    env=environment.allowed(os.environ) => env=dict(os.environ)
run/handling.py: run/test_steps_again.py
    if received.totals.redelivered else [] => if False else []
control/claims.py: control/test_claims.py
    now = self.now(connection) >> lock(connection, pipeline_of_key(pipeline))
    if mine is None or run_id not in (None, mine.run_id) => if mine is None
    if mine.messages > room:
    row = row.where(_RECEIVES.c.expires_at
control/claims.py: control/test_turns.py
    if connection.execute(in_the_way.limit(1)).first():
control/limits.py: control/test_limits.py
    messages = max(0, min(wanted, *left.values())) => messages = wanted
control/pace.py: control/test_rate_limiter.py tasks/test_permits.py
    elif now < valid_until:  # => else:  #
    if self._monotonic() >= valid_until:
control/pace.py: tasks/test_permits.py control/test_drain.py
    if grant.stop_s <= 0:
control/pace.py: control/test_rate_limiter.py
    retry_if_exception_type(ControlStoreError) => retry_if_exception_type(ZeroDivisionError)
control/reserved_offsets.py: control/test_positions.py
    self.sync()  # otherwise
    if span.holder is not None or span.first > offset => if span.first > offset
control/demand.py: control/test_demand.py
    if held >= limits.capacity:
    if limits.permits is not None:
control/drain.py: control/test_drain.py
    store.pause(key, reason)
tasks/calling_step.py: tasks/test_callback_process.py
    if all(is_whole( => if True or all(is_whole(
    _FORKS = 3 => _FORKS = 1
tasks/isolation.py: tasks/test_isolation.py
    if len(begun) == 1 and death.in_time and death.tries > 1:
    if begun_in_vain <= BEGUN_AGAIN * len(rows): => if True:
tasks/callback_process/fork.py: tasks/test_timeouts.py
    if late in progress.calls => if False
tasks/callback_process/fork.py: tasks/test_callback_process.py
    _end_group(child)  # safe
    end_with(parent)
    with _forking: => if True:
tasks/batch/handle_batches.py: tasks/test_isolation.py
    DEATHS = 5 => DEATHS = 10**9
tasks/record/filtered.py: tasks/test_only.py
    if type(is_wanted := only(message)) is not bool:
connectors/sqs/s3_payloads.py: connectors/test_s3_payloads.py
    if bucket not in self.buckets:
    if self._refused is not None:
tasks/batch/handle_batches.py: tasks/test_batch.py
    if times > 1:
    if not all(message.is_same(given.get(message._row))
tasks/record/fan_out.py: tasks/test_fan_out.py
    if len(returned) > MOST_CHILDREN:
    if not message.is_same(item):
tasks/handle/row_lane.py: tasks/test_rescue.py
    for row in oversized(batch, most_bytes): => for row in ():
tasks/acknowledge/acknowledger.py: tasks/test_acknowledge.py
    except Exception as error => except ZeroDivisionError as error
tasks/acknowledge/acknowledger.py: run/test_steps_again.py lake/test_broken_receives.py
    if self.withhold_duplicates:
tasks/acknowledge/early.py: tasks/test_early.py
    if not self._notes.is_open():
    if key not in self.acknowledged} => }
    _replace(certain=False) => _replace(certain=True)
tasks/record/verdicts.py: tasks/test_early.py
    if early := recording.early(rows):
tasks/receive/read_shares.py: tasks/test_handle.py
    if batch.column(name).null_count:
source/calls.py: source/test_calls.py
    if failed_in_a_row >= FAILED_CALLS:
    if not calls.received: => if True:
source/log.py: source/test_log_source.py source/test_check_source.py
    for is_free, run in _runs(some) >> if is_free => if True
    if found.offset < extent.low:
connectors/sqs/sqs_source.py: connectors/test_sqs.py
    if hashlib.md5(body => if True or hashlib.md5(body
connectors/sqs/sqs_source.py: connectors/test_sqs_requests.py
    if code_of(error.__context__) != "OverLimit" => if True
connectors/table_queue/leased_table.py: connectors/test_queue_leases.py
    self._take_turns(connection)
    self.leases.c.id).where(among).with_for_update() => self.leases.c.id).where(among)
connectors/table_queue/leased_table.py: connectors/test_queue_spans.py
    in_spans.with_for_update(skip_locked=True) => in_spans
connectors/kafka/cluster.py: connectors/test_kafka.py
    (topic if id_ == _NO_ID else id_, => (id_,
connectors/kafka/kafka_source.py: connectors/test_kafka_faults.py
    if found != range_.topic_id:
sinks/iceberg.py: sinks/test_sink_contract.py
    loaded.metadata.properties["commit.retry.num-retries"] = "0"
    if _has(table, publication.receive_id):
    not _goes_back_to(table, publication.started_at) and _has_rows(table, publication) => False
sinks/postgres.py: sinks/test_sink_contract.py
    if connection.execute(mine.limit(1)).first():
model/retry.py: run/test_retry.py
    return attempt >= self.max_attempts => return False
"""


class Guard(NamedTuple):
    """A guard, its file, and the tests that should fail without it."""

    file: str
    tests: list[str]
    text: str

    def without(self, source: str) -> str:
        """Return the source of its file without the guard."""
        before, _, text = self.text.rpartition(" >> ")
        text, _, instead = text.partition(" => ")
        start = source.index(before)
        if (count := source.count(text, start)) != 1 and not before:
            raise ValueError(f"{self.file} has {count} times: {text}")
        at = source.index(text, start)
        if instead:
            return source[:at] + instead + source[at + len(text) :]
        first, end = source.rindex("\n", 0, at) + 1, source.index("\n", at)
        line = source[first:end]
        gone = re.sub(r"\bif .*:", "if False:", line) if line.lstrip().startswith(("if ", "elif ")) else "pass"
        indent = line[: len(line) - len(line.lstrip())]
        return source[:first] + indent + gone.lstrip() + source[end:]


def guards() -> Iterator[Guard]:
    """Yield all guards of the table."""
    for line in GUARDS.strip().splitlines():
        if not line.startswith(" "):
            file, _, tests = line.partition(": ")
        else:
            yield Guard(f"pipeline_platform/{file}", [f"tests/{test}" for test in tests.split()], line.strip())


def is_noticed(guard: Guard, home: Path) -> bool:
    """Whether tests fail without the guard."""
    file = home / guard.file
    source = file.read_text()
    file.write_text(guard.without(source))
    options = ["-x", "-q", "--no-header", "--timeout=120", "-p", "no:cacheprovider", "-m", "not soak"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *guard.tests],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(source)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{guard}: no test ran:\n{done.stdout[-3_000:]}{done.stderr[-3_000:]}")
    return done.returncode == 1


def main(words: list[str]) -> int:
    """Check each guard whose text or file contains one of the words; without words, all guards."""
    chosen = [guard for guard in guards() if not words or any(word in f"{guard.file} {guard.text}" for word in words)]
    for guard in chosen:
        compile(guard.without((HOME / guard.file).read_text()), guard.file, "exec")
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", ".hypothesis", ".demo")
        shutil.copytree(HOME, home, symlinks=True, ignore=ignored)
        for guard in chosen:
            began = time.monotonic()
            said = "noticed" if (noticed := is_noticed(guard, home)) else "SURVIVED"
            survived += not noticed
            print(f"{said:9}{time.monotonic() - began:4.0f} s  {guard.file}: {guard.text}", flush=True)
    print(f"Tests failed without {len(chosen) - survived} of {len(chosen)} guards")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
