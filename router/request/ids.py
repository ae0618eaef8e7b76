"""Names of a request in the ledger: its id, which is unique over all tenants, and the hashes of its prompt's prefixes.

A ledger id is `tenant/request_id`, and the request's id alone for the default tenant; a request's id has no "/". With
an idempotency key the id follows from tenant and key, so that every router finds the same request. Each choice of a
request has a ledger id: choice 0 that of the request, choice k the same with "~k", which no client can choose.

By chain hashes of a prompt's prefixes the ledger finds the executor that has computed the longest of them. Two prompts
share a hash if tenant, salt, adapter and all tokens of the prefix agree. Only prefixes of 1, 2, 4, 8, … full blocks and
the longest one are hashed. So a match is at least half as long as the shared prefix, and the number of hashes stays
small. For a model with recurrent layers other prefixes are named: only those are of use at whose end the executor keeps
their state (`inflight.common.protocol`).
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Collection, Container, Sequence

from inflight.common.protocol import PrefixName, name_salt, state_positions
from inflight.router.ledger.types import DEFAULT_TENANT
from inflight.v1 import executor_pb2

_CALL_ID_BYTES = 10
_CALL_ID_CHARACTERS = 9
MAX_PREFIXES = 12
# Of a prompt for recurrent layers, the prefixes that are named in any case, and the messages before its end whose ends
# are named: more than one executor keeps of one prompt, because earlier turns have left theirs.
NUM_FIRST_NAMED = 2
NUM_LAST_NAMED = 8


def ledger_id(tenant: str, request_id: str) -> str:
    """Returns the id of a request in the ledger and on executors."""
    return request_id if tenant == DEFAULT_TENANT else f"{tenant}/{request_id}"


def client_id(ledger_id: str) -> str:
    """Returns the client's id of a request."""
    return ledger_id.rpartition("/")[2]


def choice_ids(ledger_id: str, num_choices: int) -> tuple[str, ...]:
    """Returns the ledger's ids of the choices of a request."""
    return (ledger_id, *(f"{ledger_id}~{choice}" for choice in range(1, num_choices)))


def choice_of(ledger_id: str) -> int:
    """Returns the index of the choice that has this id."""
    return int(client_id(ledger_id).partition("~")[2] or 0)


def tenant_of(ledger_id: str) -> str:
    return ledger_id.rpartition("/")[0] or DEFAULT_TENANT


def call_id(ledger_id: str, index: int) -> str:
    """Returns the id of a tool call of a choice, the same from every router: nine letters and digits, which the chat
    templates of Mistral's models require."""
    digest = hash_of(b"call", ledger_id, str(index), size=_CALL_ID_BYTES).digest()
    return base64.b32encode(digest).decode().lower()[:_CALL_ID_CHARACTERS]


def prefix_hashes_of(
    submit: executor_pb2.Submit,
    block_size: int,
    state_grid_tokens: int,
    eos_token_ids: Collection[int],
    kept: Container[bytes],
) -> tuple[str, ...]:
    """Returns the hashes of a request's prompt; none for a request that does not use the prefix cache. With
    `state_grid_tokens` the model has recurrent layers, and `kept` are the names of the prefixes whose state executors
    keep."""
    if submit.cache_bypass:
        return ()
    salt = name_salt(submit.cache_salt, submit.adapter_hash)
    if state_grid_tokens:
        return state_prefixes(submit.prompt_ids, eos_token_ids, state_grid_tokens, salt, kept)
    return prefix_hashes(submit.prompt_ids, block_size, salt)


def prefix_hashes(prompt_ids: Sequence[int], block_size: int, salt: bytes) -> tuple[str, ...]:
    """Returns the hashes, shortest prefix first; none for a prompt without a full block."""
    name = PrefixName(salt)
    counts = named_block_counts(len(prompt_ids) // block_size)
    return tuple(prefix_word(name.of(prompt_ids, num_blocks * block_size)) for num_blocks in counts)


def state_prefixes(
    prompt_ids: Sequence[int],
    end_token_ids: Collection[int],
    grid_tokens: int,
    salt: bytes,
    kept: Container[bytes] = (),
) -> tuple[str, ...]:
    """Returns the names of the prefixes whose recurrent state an executor may keep, shortest first, each with its
    tokens as `name:tokens`: those where it will keep it, and the longest ones among `kept`."""
    expected = state_positions(prompt_ids, end_token_ids, grid_tokens, num_last=NUM_LAST_NAMED)
    prefix, ids, named = PrefixName(salt), array("I", prompt_ids), []
    for position in range(grid_tokens, expected[-1] + 1, grid_tokens) if expected else ():
        name = prefix.of(ids, position)
        if position in expected or name in kept:
            named.append(f"{prefix_word(name)}:{position}")
    return (*named[:NUM_FIRST_NAMED], *named[NUM_FIRST_NAMED:][-(MAX_PREFIXES - NUM_FIRST_NAMED) :])


def prefix_word(name: bytes) -> str:
    """Returns a name as text without spaces and colons."""
    return base64.urlsafe_b64encode(name).rstrip(b"=").decode()


def named_block_counts(num_full_blocks: int) -> tuple[int, ...]:
    """Returns the lengths in blocks of the hashed prefixes. For a very long prompt the shortest prefixes are left
    out."""
    powers = [1 << exponent for exponent in range(num_full_blocks.bit_length())]
    if powers and powers[-1] != num_full_blocks:
        powers.append(num_full_blocks)
    return tuple(powers[-MAX_PREFIXES:])


def hash_of(purpose: bytes, tenant: str, key: str, size: int) -> hashlib.blake2b:
    return hashlib.blake2b(f"{tenant}\0{key}".encode(), digest_size=size, person=purpose)
