"""Our KServe messages are the ones that tritonclient sends and reads: every field, number, type, value and RPC."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from tests.clients.environments import python_of
from tools.protos import promises, read_protos

READ_DESCRIPTORS = """
import sys
from tritonclient.grpc import model_config_pb2, service_pb2
for file in (model_config_pb2, service_pb2):
    print(file.DESCRIPTOR.serialized_pb.hex())
"""


@pytest.fixture(scope="module")
def theirs() -> FileDescriptorSet:
    """The files that the installed tritonclient was generated from."""
    command = [python_of("tritonclient"), "-c", READ_DESCRIPTORS]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    return FileDescriptorSet(file=[FileDescriptorProto.FromString(bytes.fromhex(line)) for line in printed.split()])


@pytest.fixture(scope="module")
def ours() -> FileDescriptorSet:
    return FileDescriptorSet(file=[file for file in read_protos().file if file.package == "inference"])


def oneofs(files: FileDescriptorSet) -> Iterator[str]:
    """Each field of a oneof, with the oneof's name: it changes how a message is read, not how it looks."""

    def below(scope: str, record: DescriptorProto) -> Iterator[str]:
        for field in record.field:
            if field.HasField("oneof_index"):
                yield f"{scope}.{record.name}.{field.name} {record.oneof_decl[field.oneof_index].name}"
        for nested in record.nested_type:
            yield from below(f"{scope}.{record.name}", nested)

    for file in files.file:
        for record in file.message_type:
            yield from below(file.package, record)


def test_everything_of_ours_is_theirs(theirs: FileDescriptorSet, ours: FileDescriptorSet) -> None:
    assert len(set(promises(ours))) > 100
    assert not set(promises(ours)) - set(promises(theirs))
    assert set(oneofs(ours)) <= set(oneofs(theirs))


def test_messages_of_requests_and_responses_lack_nothing(theirs: FileDescriptorSet, ours: FileDescriptorSet) -> None:
    """What is left out belongs to RPCs that we do not serve, or to configuration that is never set here."""
    served = ("Infer", "Metadata", "Ready", "Live", "RepositoryIndex", "ModelConfigRe")
    left_out = sorted(
        line
        for line in set(promises(theirs)) - set(promises(ours))
        if line.startswith("field inference.") and any(name in line.split()[1].split(".")[1] for name in served)
    )
    unserved = ("InferStatistics", "InferResponseStatistics", "InferBatchStatistics")
    assert not [line for line in left_out if not line.startswith(tuple(f"field inference.{one}" for one in unserved))]
