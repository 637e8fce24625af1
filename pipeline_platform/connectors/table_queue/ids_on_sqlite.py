"""Many ids in one statement of SQLite, which has no arrays."""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import sqlalchemy as sa


def selected_ids(ids: Sequence[Any]) -> sa.Select[Any]:
    """Return a selection of these ids that uses a constant number of parameters."""
    if not any(isinstance(id_, str) and "\0" in id_ for id_ in ids):
        return sa.select(sa.func.json_each(json.dumps(ids)).table_valued("value").c.value)
    # SQLite's JSON functions truncate text at NUL, so the ids are cut out of their joined bytes.
    texts = [id_.encode() for id_ in ids]
    places = [(end - len(text) + 1, len(text)) for text, end in zip(texts, accumulate(map(len, texts)), strict=True)]
    value = sa.func.json_each(json.dumps(places)).table_valued("value").c.value
    first, length = sa.func.json_extract(value, "$[0]"), sa.func.json_extract(value, "$[1]")
    every = sa.bindparam(None, b"".join(texts), sa.LargeBinary)
    return sa.select(sa.cast(sa.func.substr(every, first, length), sa.Text))
