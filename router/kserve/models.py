"""A model's description for KServe clients: names, tensors, configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.kserve import grpc_service_pb2, model_config_pb2
from inflight.router.kserve import translation
from inflight.router.kserve.options import OPTIONS, SAMPLING_PARAMETERS
from inflight.router.kserve.tensors import BYTES
from inflight.router.kserve.translation import VERSION

PLATFORM = "inflight"


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A tensor as metadata and configuration describe it; a size of -1 is any."""

    name: str
    datatype: str
    dims: int


# Under every name: clients look for theirs here before they send it.
INPUTS = (
    *(TensorKind(name, option.datatype, option.dims) for option in OPTIONS for name in option.names),
    TensorKind(SAMPLING_PARAMETERS, BYTES, 1),
)
OUTPUTS = (
    TensorKind(translation.TEXT_OUTPUT, BYTES, -1),
    TensorKind(translation.OUTPUT_IDS, "INT32", -1),
    TensorKind(translation.SEQUENCE_LENGTH, "INT32", -1),
    TensorKind(translation.FINISH_REASON, BYTES, -1),
    TensorKind(translation.NUM_INPUT_TOKENS, "UINT32", 1),
    TensorKind(translation.NUM_OUTPUT_TOKENS, "UINT32", -1),
    TensorKind(translation.OUTPUT_LOG_PROBS, "FP32", -1),
    TensorKind(translation.CUM_LOG_PROBS, "FP32", -1),
    TensorKind(translation.LOGPROBS, BYTES, -1),
    TensorKind(translation.CUMULATIVE_LOGPROB, "FP32", -1),
)


def model_metadata(name: str) -> grpc_service_pb2.ModelMetadataResponse:
    """The tensors of a model; they are the same for all."""
    response = grpc_service_pb2.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    for kinds, described in ((INPUTS, response.inputs), (OUTPUTS, response.outputs)):
        for kind in kinds:
            described.add(name=kind.name, datatype=kind.datatype, shape=[kind.dims])
    return response


def model_config(name: str, values: dict[str, str]) -> grpc_service_pb2.ModelConfigResponse:
    """A model's configuration. `values` are told as its parameters."""
    config = model_config_pb2.ModelConfig(name=name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0)
    for kind in INPUTS:
        # A prompt by ids has no text.
        config.input.add(name=kind.name, data_type=_config_type(kind), dims=[kind.dims], optional=True)
    for kind in OUTPUTS:
        config.output.add(name=kind.name, data_type=_config_type(kind), dims=[kind.dims])
    config.model_transaction_policy.decoupled = True
    for key, value in values.items():
        config.parameters[key].string_value = value
    return grpc_service_pb2.ModelConfigResponse(config=config)


def _config_type(kind: TensorKind) -> str:
    """The configuration's name for a type."""
    return "TYPE_STRING" if kind.datatype == BYTES else f"TYPE_{kind.datatype}"
