"""The generated code is what the .proto files give, they follow Buf's conventions, and v1 only grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from tools.protos import PROTOS, generate, promises, read_baseline, read_protos

GENERATED = PROTOS.parent / "inflight"
PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")

# Field numbers in descriptor.proto; a location's path is made of them.
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES = 4, 5, 6
MESSAGE_FIELDS, MESSAGE_NESTED, MESSAGE_ENUMS, MESSAGE_ONEOFS = 2, 3, 4, 8
ENUM_VALUES = SERVICE_RPCS = 2


@pytest.fixture(scope="module")
def all_files() -> FileDescriptorSet:
    return read_protos()


@pytest.fixture(scope="module")
def files(all_files: FileDescriptorSet) -> FileDescriptorSet:
    """The files of our own interfaces; KServe's names and numbers are not ours to choose."""
    return FileDescriptorSet(file=[file for file in all_files.file if file.package.startswith("inflight.")])


def records_of(file: FileDescriptorProto) -> Iterator[tuple[DescriptorProto, tuple[int, ...]]]:
    """Every message of a file with its path, nested ones included, map entries left out."""

    def below(record: DescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[DescriptorProto, tuple[int, ...]]]:
        yield record, path
        for index, nested in enumerate(record.nested_type):
            if not nested.options.map_entry:
                yield from below(nested, (*path, MESSAGE_NESTED, index))

    for index, record in enumerate(file.message_type):
        yield from below(record, (FILE_MESSAGES, index))


def enums_of(file: FileDescriptorProto) -> Iterator[tuple[EnumDescriptorProto, tuple[int, ...]]]:
    for index, enum in enumerate(file.enum_type):
        yield enum, (FILE_ENUMS, index)
    for record, path in records_of(file):
        for index, enum in enumerate(record.enum_type):
            yield enum, (*path, MESSAGE_ENUMS, index)


def services_of(files: FileDescriptorSet) -> Iterator[ServiceDescriptorProto]:
    return (service for file in files.file for service in file.service)


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    generate(tmp_path)

    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    committed = {path.relative_to(GENERATED.parent): path.read_text() for path in GENERATED.glob("*/*_pb2*.py*")}

    assert fresh
    stale = sorted(str(path) for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))
    assert not stale, "run `make protos`"


def test_nothing_of_v1_is_removed_or_changed(all_files: FileDescriptorSet) -> None:
    broken = sorted(set(read_baseline()) - set(promises(all_files)))
    assert not broken, "v1 only grows: add a new field or RPC beside the old one"


def test_everything_of_v1_is_in_the_baseline(all_files: FileDescriptorSet) -> None:
    unrecorded = sorted(set(promises(all_files)) - set(read_baseline()))
    assert not unrecorded, "run `make protos`, which adds them to tests/contract/v1_fields.txt"


def test_package_is_the_folder_and_ends_in_a_version(files: FileDescriptorSet) -> None:
    assert files.file
    for file in files.file:
        assert file.syntax == "proto3", file.name
        assert file.package == ".".join(Path(file.name).parent.parts), file.name
        assert re.search(r"\.v\d+$", file.package), file.name
        assert LOWER_SNAKE.fullmatch(Path(file.name).stem), file.name
        assert not file.public_dependency, file.name
        assert not file.weak_dependency, file.name


def test_services_are_named_services(files: FileDescriptorSet) -> None:
    wrong = [s.name for s in services_of(files) if not (PASCAL.fullmatch(s.name) and s.name.endswith("Service"))]
    assert not wrong


def test_each_rpc_has_a_request_and_a_response_of_its_own_name(files: FileDescriptorSet) -> None:
    package = files.file[0].package
    used = []
    for service in services_of(files):
        for rpc in service.method:
            assert PASCAL.fullmatch(rpc.name), rpc.name
            assert rpc.input_type == f".{package}.{rpc.name}Request"
            assert rpc.output_type == f".{package}.{rpc.name}Response"
            used += [rpc.input_type, rpc.output_type]
    assert used
    assert len(used) == len(set(used))


def test_enum_values_carry_the_prefix_and_begin_with_unspecified(files: FileDescriptorSet) -> None:
    for file in files.file:
        for enum, _ in enums_of(file):
            prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
            assert PASCAL.fullmatch(enum.name), enum.name
            assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}UNSPECIFIED", 0), enum.name
            assert not enum.options.allow_alias, enum.name
            for value in enum.value:
                assert value.name.startswith(prefix), value.name
                assert UPPER_SNAKE.fullmatch(value.name), value.name


def test_messages_are_pascal_case_and_fields_lower_snake_case(files: FileDescriptorSet) -> None:
    for file in files.file:
        for record, _ in records_of(file):
            assert PASCAL.fullmatch(record.name), record.name
            for name in [field.name for field in record.field] + [oneof.name for oneof in record.oneof_decl]:
                # An `optional` field is a oneof of its own, whose name begins with an underscore.
                assert LOWER_SNAKE.fullmatch(name.removeprefix("_")), f"{record.name}.{name}"


def named_elements(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Whatever needs a comment, with its path. The comment of a oneof stands for its alternatives."""
    for record, path in records_of(file):
        yield record.name, path
        for index, field in enumerate(record.field):
            in_oneof = field.HasField("oneof_index") and not field.proto3_optional
            where = (MESSAGE_ONEOFS, field.oneof_index) if in_oneof else (MESSAGE_FIELDS, index)
            yield f"{record.name}.{field.name}", (*path, *where)
    for enum, path in enums_of(file):
        yield enum.name, path
        for index, value in enumerate(enum.value):
            yield value.name, (*path, ENUM_VALUES, index)
    for number, service in enumerate(file.service):
        yield service.name, (FILE_SERVICES, number)
        for index, rpc in enumerate(service.method):
            yield f"{service.name}.{rpc.name}", (FILE_SERVICES, number, SERVICE_RPCS, index)


def test_everything_is_commented(all_files: FileDescriptorSet) -> None:
    for file in all_files.file:
        commented = {
            tuple(location.path) for location in file.source_code_info.location if location.leading_comments.strip()
        }
        bare = [name for name, path in named_elements(file) if path not in commented]
        assert not bare, file.name
