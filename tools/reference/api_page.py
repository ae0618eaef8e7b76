"""Generator of docs/api.md and docs/api-executor.md, from the .proto files and their comments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

from tools.reference.markdown import cell, notice, page, table
from tools.reference.statuses import NO_REASON, documented

# Field numbers in descriptor.proto; a location's path is made of them.
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES = 4, 5, 6
MESSAGE_FIELDS, MESSAGE_NESTED, MESSAGE_ENUMS, MESSAGE_ONEOFS = 2, 3, 4, 8
ENUM_VALUES = SERVICE_RPCS = 2
PATH_OF_PACKAGE = "inflight/v1/"

CLIENT_PAGE, EXECUTOR_PAGE = "api.md", "api-executor.md"
# Which page tells of which file; a file that is not named here is for clients.
EXECUTOR_FILES = frozenset({"executor.proto", "resume.proto"})

INTRODUCTIONS = {
    CLIENT_PAGE: """\
# API

The gRPC API of a router for clients: package `inflight.v1`, generated from the comments in
[`inference.proto`](../protos/inflight/v1/inference.proto), [`types.proto`](../protos/inflight/v1/types.proto) and
[`stats.proto`](../protos/inflight/v1/stats.proto). The same port serves `grpc.health.v1` (with `Watch`) and
reflection, so `grpcurl` works without `.proto` files. Version 1 only grows: nothing is removed, renumbered or given
another type.

An unset field has the value after "Default"; without that word, the default is 0, empty or false. Errors carry
`google.rpc.Status` details; [statuses.md](statuses.md) lists every status and reason. [client.md](client.md) explains
retries and resuming after a broken connection, for clients in any language.""",
    EXECUTOR_PAGE: """\
# API between router and executor

Only routers call executors. This page, generated from the comments in
[`executor.proto`](../protos/inflight/v1/executor.proto) and [`resume.proto`](../protos/inflight/v1/resume.proto), is
for developers of either side and for tools that watch an executor's steps. Types that both APIs share are in
[api.md](api.md).""",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A file, its comments by path, and the page that each type is told of on."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]
    page_of: dict[str, str]

    @property
    def page(self) -> str:
        return page_of_file(self.file)


def api_pages(files: list[FileDescriptorProto]) -> dict[str, str]:
    """Both pages by their names."""
    page_of = {name: page_of_file(file) for file in files for name in _type_names(file)}
    sources = [Source(file, _comments(file), page_of) for file in files]
    return {name: _page(name, [source for source in sources if source.page == name]) for name in INTRODUCTIONS}


def page_of_file(file: FileDescriptorProto) -> str:
    """The page that tells of a file."""
    return EXECUTOR_PAGE if file.name.removeprefix(PATH_OF_PACKAGE) in EXECUTOR_FILES else CLIENT_PAGE


def _page(name: str, sources: list[Source]) -> str:
    services = [part for source in sources for part in _services(source)]
    types = [part for source in sources for part in _types(source)]
    return page(notice("make docs-reference"), INTRODUCTIONS[name], *services, "## Messages and enums", *types)


def _services(source: Source) -> Iterator[str]:
    for number, service in enumerate(source.file.service):
        yield f"## {service.name}"
        yield source.comments[(FILE_SERVICES, number)]
        yield table(
            ("RPC", "request", "response"), [_signature(source, service, i) for i in range(len(service.method))]
        )
        for index, rpc in enumerate(service.method):
            yield f"### {rpc.name}"
            yield source.comments[(FILE_SERVICES, number, SERVICE_RPCS, index)]
            yield _statuses(rpc.name if source.page == CLIENT_PAGE else service.name)


def _statuses(section: str) -> str:
    """The statuses that the page of statuses has under an RPC's or service's name, besides those of every RPC."""
    others = "[those of every RPC](statuses.md#every-rpc)"
    own = sorted(documented().get(section, ()))
    if not own:
        return f"Ends with OK or one of {others}."
    named = ", ".join(f"{status} ({reason})" if reason != NO_REASON else status for status, reason in own)
    return f"Ends with OK, one of {others}, or [one of its own](statuses.md#{section.lower()}): {named}."


def _signature(source: Source, service: ServiceDescriptorProto, index: int) -> tuple[str, str, str]:
    rpc = service.method[index]
    down = "stream of " if rpc.client_streaming else ""
    up = "stream of " if rpc.server_streaming else ""
    return (
        f"[`{rpc.name}`](#{rpc.name.lower()})",
        down + _link(source, rpc.input_type),
        up + _link(source, rpc.output_type),
    )


def _types(source: Source) -> Iterator[str]:
    for index, record in enumerate(source.file.message_type):
        yield from _record(source, record, record.name, (FILE_MESSAGES, index))
    for index, enum in enumerate(source.file.enum_type):
        yield from _enum(source, enum, enum.name, (FILE_ENUMS, index))


def _record(source: Source, record: DescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {name}"
    yield source.comments[path]
    rows = [_field(source, record, index, path) for index in range(len(record.field))]
    yield table(("field", "no.", "type", "meaning"), rows) if rows else "No fields."
    for index, enum in enumerate(record.enum_type):
        yield from _enum(source, enum, f"{name}.{enum.name}", (*path, MESSAGE_ENUMS, index))
    for index, nested in enumerate(record.nested_type):
        if not nested.options.map_entry:
            yield from _record(source, nested, f"{name}.{nested.name}", (*path, MESSAGE_NESTED, index))


def _field(source: Source, record: DescriptorProto, index: int, path: tuple[int, ...]) -> tuple[str, str, str, str]:
    field = record.field[index]
    meaning = source.comments.get((*path, MESSAGE_FIELDS, index), "")
    kind = _type(source, record, field)
    if field.HasField("oneof_index") and not field.proto3_optional:
        oneof = record.oneof_decl[field.oneof_index].name
        kind += f", one of `{oneof}`"
        meaning = meaning or source.comments[(*path, MESSAGE_ONEOFS, field.oneof_index)]
    return f"`{field.name}`", str(field.number), kind, cell(meaning)


def _enum(source: Source, enum: EnumDescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {name}"
    yield source.comments[path]
    rows = [
        (f"`{value.name}`", str(value.number), cell(source.comments[(*path, ENUM_VALUES, index)]))
        for index, value in enumerate(enum.value)
    ]
    yield table(("value", "no.", "meaning"), rows)


def _type(source: Source, record: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next((nested for nested in record.nested_type if field.type_name.endswith(f".{nested.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_type(source, entry, part) for part in entry.field)
        return f"map of {key} to {value}"
    name = (
        _link(source, field.type_name)
        if field.type_name
        else f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    )
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(source: Source, full_name: str) -> str:
    """A type's name, which leads to where it is told of; types of others are named in full."""
    page_name = source.page_of.get(full_name)
    if page_name is None:
        return f"`{full_name.removeprefix('.')}`"
    name = full_name.removeprefix(f".{source.file.package}.")
    anchor = re.sub(r"[^a-z0-9]", "", name.lower())
    return f"[`{name}`]({'' if page_name == source.page else page_name}#{anchor})"


def _type_names(file: FileDescriptorProto) -> Iterator[str]:
    def below(record: DescriptorProto, scope: str) -> Iterator[str]:
        name = f"{scope}.{record.name}"
        yield name
        yield from (f"{name}.{enum.name}" for enum in record.enum_type)
        for nested in record.nested_type:
            yield from below(nested, name)

    scope = f".{file.package}"
    yield from (f"{scope}.{enum.name}" for enum in file.enum_type)
    for record in file.message_type:
        yield from below(record, scope)


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {
        tuple(location.path): "\n".join(line.strip() for line in location.leading_comments.strip().splitlines())
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }
