"""The generator of the code of the .proto files, and of the baseline of version 1 of the protocol and of the supported
part of KServe's: one line for each field, enum value and RPC.

`make protos` writes the code and adds what is new to `tests/contract/v1_fields.txt`. A line is never removed: v1 only
grows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

REPOSITORY = Path(__file__).parents[1]
PROTOS = REPOSITORY / "protos"
BASELINE = REPOSITORY / "tests" / "contract" / "v1_fields.txt"


def run_protoc(*options: str) -> None:
    """Runs the compiler over our .proto files."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("inflight/**/*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    code = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *options, *sources])
    if code != 0:
        raise RuntimeError(f"protoc ended with {code}")


def generate(folder: Path) -> None:
    """Writes the messages, their types and the stubs below a folder."""
    run_protoc(f"--python_out={folder}", f"--pyi_out={folder}", f"--grpc_python_out={folder}")


def read_protos() -> FileDescriptorSet:
    """Our files with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "descriptors"
        run_protoc("--include_source_info", f"--descriptor_set_out={path}")
        return FileDescriptorSet.FromString(path.read_bytes())


def promises(files: FileDescriptorSet) -> Iterator[str]:
    """One line for each thing that may not be taken back."""
    for file in files.file:
        for service in file.service:
            for rpc in service.method:
                down = "stream " if rpc.client_streaming else ""
                up = "stream " if rpc.server_streaming else ""
                yield (
                    f"rpc {file.package}.{service.name}.{rpc.name} "
                    f"({down}{rpc.input_type[1:]}) ({up}{rpc.output_type[1:]})"
                )
        for enum in file.enum_type:
            yield from _enum_promises(file.package, enum)
        for record in file.message_type:
            yield from _record_promises(file.package, record)


def _record_promises(scope: str, record: DescriptorProto) -> Iterator[str]:
    name = f"{scope}.{record.name}"
    for field in record.field:
        yield f"field {name}.{field.name} {field.number} {_type(field)}"
    for enum in record.enum_type:
        yield from _enum_promises(name, enum)
    for nested in record.nested_type:
        yield from _record_promises(name, nested)


def _enum_promises(scope: str, enum: EnumDescriptorProto) -> Iterator[str]:
    for value in enum.value:
        yield f"value {scope}.{enum.name}.{value.name} {value.number}"


def _type(field: FieldDescriptorProto) -> str:
    label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    if field.proto3_optional:
        label = "optional "
    return label + (field.type_name[1:] or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower())


def read_baseline() -> list[str]:
    """The promises made so far."""
    return BASELINE.read_text(encoding="utf-8").splitlines() if BASELINE.exists() else []


def extended(baseline: Sequence[str], current: Sequence[str]) -> list[str]:
    """The baseline with what is new behind what it grows from; the order is by name."""
    return sorted({*baseline, *current})


def main() -> int:
    """Writes the code, and adds new promises to the baseline; says what was taken back and fails then."""
    generate(REPOSITORY)
    baseline, current = read_baseline(), list(promises(read_protos()))
    BASELINE.write_text("\n".join(extended(baseline, current)) + "\n", encoding="utf-8")
    broken = sorted(set(baseline) - set(current))
    for line in broken:
        print(f"error: v1 only grows, but this is gone or changed: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
