"""The schema of the scripts: the fields of records, and the Lua functions that read and write them by name.

`source` generates the functions, which stand before the scripts: for each record `pack_…` and `unpack_…`, for the
arguments of each script (`codec.ARGUMENTS`) `read_…`. A field is a number, `field?` a boolean, `field$` a string of
less than 64 KiB, `field[n]` are n numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from inflight.router.ledger.codec import ARGUMENTS, Arguments

RECORDS: Mapping[str, Sequence[str]] = {
    name: fields.split()
    for name, fields in {
        "state": """
            arrivals floor waiting waiting_by_class[3] tokens[3] bytes max_bypass age_ms preempts?
            overcommits? num_estimates error correction moving_ms moved_tokens moved_at prefill_speed
            output_speed standby step_ms output_share num_outputs next_age_ms num_prefixes has_old_prefixes? unboarded?
            remember_ms tenant_cursor$ sweep_cursor$ claims$ now_ms ahead_ms tolerated_ttft_ms version
        """,
        "executor": """
            generation seq budget_blocks total_blocks budget_sequences reserved_blocks
            reserved_sequences quantile last_report_ms audited_ms accepting? suspended? audit_due?
            has_suspect? ends_at_reservation? claim$ prefill_speed prefilled_ms num_adapter_slots pins$
        """,
        "tenant": """
            counter weight waiting_by_class[3] listed[3] active? waiting tokens[3] bytes running
            max_running output_share correction request_ms token_ms ms_per_token used_ms
        """,
        "request": """
            state$ owner$ tenant$ executor_id$ claim$ prefixes$ digest$ undecided$ adapter$ class
            asked_class deadline_in_ms deadline_ms order_ms since_ms arrival blocks placement_blocks
            sequences prompt max output block_size bytes attempt failures counted passed estimate
            correction charged? adopted? charge rated generation placed_ms reserved preempting
        """,
        "ending": """
            executor_id$ digest$ attempt generation cancelled?
        """,
    }.items()
}


def source() -> str:
    """Returns the Lua code of all these functions."""
    records = "".join(record_functions(name, fields) for name, fields in RECORDS.items())
    return records + "".join(_reader(script, arguments) for script, arguments in ARGUMENTS.items())


def record_functions(name: str, fields: Sequence[str]) -> str:
    """Returns Lua code that packs a record, and that unpacks it into a table created at its full size."""
    codes, values, variables, entries = (
        ",".join(column) for column in zip(*(_field(i, field) for i, field in enumerate(fields)), strict=True)
    )
    layout = "<" + codes.replace(",", "")
    return (
        f"local function pack_{name}(record)\n  return struct.pack('{layout}', {values})\nend\n"
        f"local function unpack_{name}(text)\n  local {variables} = struct.unpack('{layout}', text)\n"
        f"  return {{{entries}}}\nend\n"
    )


def _field(index: int, field: str) -> tuple[str, str, str, str]:
    """Returns, for one field, the format code for `struct`, the expression to pack, the variables to unpack into, and
    the table entry."""
    name, variable = field.rstrip("?$"), f"v{index}"
    if field.endswith("?"):
        return "b", f"record.{name} and 1 or 0", variable, f"{name}={variable}==1"
    if field.endswith("$"):
        return "Hc0", f"#record.{name},record.{name}", variable, f"{name}={variable}"
    if field.endswith("]"):
        name, _, count = name.rstrip("]").partition("[")
        numbers = range(1, int(count) + 1)
        names = ",".join(f"{variable}_{i}" for i in numbers)
        return "d" * int(count), ",".join(f"record.{name}[{i}]" for i in numbers), names, f"{name}={{{names}}}"
    return "d", f"record.{name}", variable, f"{name}={variable}"


def _reader(script: str, arguments: Arguments[...]) -> str:
    """Returns Lua code that reads the arguments of one item of a script, from the argument at `at`, into the fields of
    a table, and returns where the next item begins."""
    places = [f"ARGV[at + {place}]" if place else "ARGV[at]" for place in range(len(arguments.own) + 1)]
    forms = {"$": "{}", "?": "{} == '1'"}
    own = {
        field.rstrip("?$"): forms.get(field[-1], "tonumber({})").format(place)
        for field, place in zip(arguments.own, places, strict=False)
    }
    code = f"local function read_{script}(into, at)\n  {_assigned(own)} = {', '.join(own.values())}\n"
    if arguments.packed:
        code += f"  {_assigned(arguments.packed)} = struct.unpack('{arguments.layout}', {places[len(own)]})\n"
    return code + f"  return at + {len(own) + bool(arguments.packed)}\nend\n"


def _assigned(fields: Iterable[str]) -> str:
    return ", ".join(f"into.{field}" for field in fields)
