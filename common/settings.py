"""Settings of a process: one frozen object, read once from flags, environment, file and defaults, in that order.

This module turns a class of settings into flags, `--help`, `INFLIGHT_*` variables and a TOML file. Every error names
the setting, the invalid value and what is allowed. It never logs and exits only for `--help`: the process's `main`
prints `error: …` and exits with 2. A class that is constructed directly reads its arguments only, so tests see no
environment.

    class RouterSettings(ProcessSettings):
        port: int = Field(50051, ge=1, le=65535, description="Port that clients connect to.")

    settings = load(RouterSettings, "inflight router", sys.argv[1:])
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "INFLIGHT_"
MASK = str(SecretStr("x"))


class SettingError(Exception):
    """A setting is invalid. The text is for the user: it names the setting and what is allowed."""


class ProcessSettings(BaseSettings):
    """Base class of every process's settings. Fields are plain values; a tuple is written `a,b,c`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        enable_decoding=False,  # a list in the environment is `a,b`, not JSON
        env_ignore_empty=True,  # compose files and charts pass on unset variables as empty ones
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Restricts the sources to the arguments; `load` collects the others."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _split_commas(cls, value: Any, field: ValidationInfo) -> Any:
        """Turns `a, b` into a tuple if the setting is one."""
        assert field.field_name is not None
        is_tuple = any(get_origin(kind) is tuple for kind in _alternatives(cls.model_fields[field.field_name]))
        if not (is_tuple and isinstance(value, str)):
            return value
        return tuple(part for piece in value.split(",") if (part := piece.strip()))


Settings = TypeVar("Settings", bound=ProcessSettings)


def load(settings_class: type[Settings], prog: str, argv: Sequence[str]) -> Settings:
    """Reads the settings of this process; raises `SettingError`. `--help` prints every setting and exits with 0."""
    flags = vars(parser_of(settings_class, prog).parse_args(argv))
    file = flags.pop("config", None) or os.environ.get(f"{ENV_PREFIX}CONFIG")
    from_file = _read_file(settings_class, Path(file)) if file else {}
    from_environment = EnvSettingsSource(settings_class)()
    try:
        return settings_class(**{**from_file, **from_environment, **flags})
    except ValidationError as error:
        wrong = (_explain(settings_class, detail) for detail in error.errors(include_url=False))
        raise SettingError("; ".join(dict.fromkeys(wrong))) from None


def describe(settings: ProcessSettings) -> list[str]:
    """Returns one line for each setting that differs from its default, with secrets masked."""
    return [
        f"{name} = {_shown(value)} (default {_shown(default)})"
        for name, field in type(settings).model_fields.items()
        if (value := getattr(settings, name)) != (default := _default(field))
    ]


@dataclass(frozen=True, slots=True)
class SettingWords:
    """Texts of a setting for `--help` and the reference."""

    name: str
    flag: str
    variable: str
    allowed: str
    default: str
    description: str


def words_of(settings_class: type[ProcessSettings]) -> list[SettingWords]:
    """Returns the texts of every setting of a class, in the order of the source."""
    return [
        SettingWords(
            name=name,
            flag=_flag(name),
            variable=f"{ENV_PREFIX}{name.upper()}",
            allowed=_allowed(field),
            default=_default_words(field),
            description=field.description or "",
        )
        for name, field in settings_class.model_fields.items()
    ]


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are `SettingError`s."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message} (see {self.prog} --help)")

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            raise SettingError(f"unknown argument {unknown[0]!r}{_nearest(unknown[0], self._option_string_actions)}")
        return parsed


def parser_of(settings_class: type[ProcessSettings], prog: str) -> argparse.ArgumentParser:
    """Returns the parser of a process's flags."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--SETTING VALUE ...]",
        description=(settings_class.__doc__ or "").strip(),
        epilog=f"Precedence: flag, {ENV_PREFIX}… environment variable, file, default.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings by name. [{ENV_PREFIX}CONFIG]")
    for words in words_of(settings_class):
        # `%` is argparse's own format character.
        text = f"{words.description} ({words.allowed}; {words.default}) [{words.variable}]".strip().replace("%", "%%")
        if bool in _alternatives(settings_class.model_fields[words.name]):
            parser.add_argument(words.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(words.flag, dest=words.name, metavar="VALUE", help=text)
    return parser


def _read_file(settings_class: type[ProcessSettings], path: Path) -> dict[str, Any]:
    where = f"--config ({ENV_PREFIX}CONFIG)"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{where}: cannot read {str(path)!r}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"{where}: {str(path)!r} is not TOML: {error}") from None
    for key in values:
        if key not in settings_class.model_fields:
            raise SettingError(f"{path}: unknown setting {key!r}{_nearest(key, settings_class.model_fields)}")
    return values


def _explain(settings_class: type[ProcessSettings], detail: ErrorDetails) -> str:
    """Returns the text for one of pydantic's errors."""
    reason = str(detail.get("ctx", {}).get("error") or detail["msg"])
    if not detail["loc"]:  # a rule over several settings, which names them in its text
        return reason
    name = str(detail["loc"][0])
    named = f"{_flag(name)} ({ENV_PREFIX}{name.upper()})"
    field = settings_class.model_fields.get(name)
    if field is None:
        return f"unknown setting {name!r}{_nearest(name, settings_class.model_fields)}"
    if detail["type"] == "missing":
        return f"{named}: required; allowed: {_allowed(field)}"
    is_secret = any(SecretStr in (kind, *get_args(kind)) for kind in _alternatives(field))
    value = MASK if is_secret else "an empty list" if detail["input"] == () else repr(detail["input"])
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{named}: {value}: {reason}"
    return f"{named}: {value} is not allowed; allowed: {_allowed(field)}"


def _allowed(field: FieldInfo) -> str:
    """Returns the allowed values of a setting, from its type and bounds: `a whole number ≥ 1 and ≤ 65535`."""
    words = list(dict.fromkeys(word for kind in _alternatives(field) for word in _words(kind)))
    return " or ".join(words) + _bounds(field.metadata)


def _words(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield f"one of {_choices(kind)}"
    elif get_origin(kind) is tuple:
        (element, *_) = get_args(kind)
        yield "a list a,b,…" + (f" of {_choices(element)}" if get_origin(element) is Literal else "")
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield "one of " + ", ".join(str(choice.value) for choice in kind)
    elif kind is not type(None):
        yield {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(kind, "text")


def _choices(literal: Any) -> str:
    return ", ".join(str(choice) for choice in get_args(literal))


def _bounds(metadata: Iterable[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "a multiple of"}
    texts = [
        f"{sign} {getattr(bound, name)}" for bound in metadata for name, sign in signs.items() if hasattr(bound, name)
    ]
    not_empty = ", not empty" if any(getattr(bound, "min_length", 0) == 1 for bound in metadata) else ""
    return (" " + " and ".join(texts) if texts else "") + not_empty


def _alternatives(field: FieldInfo) -> tuple[Any, ...]:
    """Returns the types of `A | B | None`, or the one type."""
    kind = field.annotation
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _default_words(field: FieldInfo) -> str:
    default = _default(field)
    if isinstance(default, SecretStr):  # a default in the source is not secret
        default = default.get_secret_value()
    return "required" if field.is_required() else f"default {_shown(default)}"


def _default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True, validated_data={})
    return None if default is PydanticUndefined else default


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, Enum):
        return str(value.value)
    return (",".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "empty"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(unknown: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(unknown.partition("=")[0], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
