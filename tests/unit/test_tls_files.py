"""Certificates on disk: refusals at start, and the effect of changes."""

from __future__ import annotations

import logging
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from inflight.cli.main import main
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.common.settings import SettingError
from inflight.local.certificates import CertificateFolder, make_certificates


def paths_in(made: CertificateFolder) -> TlsPaths:
    return TlsPaths(made.certificate("executor"), made.key("executor"), made.ca_file)


def replace(old: CertificateFolder, new: CertificateFolder) -> None:
    """Moves every file of `new` over that of `old`."""
    for there, comes in zip(old.files, new.files, strict=True):
        comes.replace(there)


def write_self_signed(cert_file: Path, key_file: Path, key_bits: int) -> None:
    """Writes an RSA key and its certificate."""
    key = rsa.generate_private_key(public_exponent=65_537, key_size=key_bits)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weak.test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    unencrypted = serialization.NoEncryption()
    key_format = serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, key_format, unencrypted))


def test_pair_that_does_not_belong_together_is_refused_by_name(tmp_path: Path) -> None:
    one, other = make_certificates(tmp_path / "1"), make_certificates(tmp_path / "2")
    with pytest.raises(SettingError, match=r"executor_tls_key_file: .*executor\.key is not the key"):
        TlsFiles.open(TlsPaths(one.certificate("executor"), other.key("executor"), None, "executor_"))


@pytest.mark.parametrize(("file", "setting"), [("executor.pem", "cert"), ("executor.key", "key"), ("ca.pem", "ca")])
@pytest.mark.parametrize("content", [None, "", "-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n"])
def test_file_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, file: str, setting: str, content: str | None
) -> None:
    made = make_certificates(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(SettingError, match=f"^tls_{setting}_file: .*{file}"):
        TlsFiles.open(paths_in(made))


def test_expired_certificate_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, days=0)
    with pytest.raises(SettingError, match=r"tls_cert_file: .* expired on 20"):
        TlsFiles.open(paths_in(made))


@pytest.mark.parametrize(("there", "missing"), [("cert", "key"), ("key", "cert")])
def test_half_a_pair_is_refused_by_name(there: str, missing: str) -> None:
    files = {"cert": None, "key": None, there: Path("x")}
    with pytest.raises(SettingError, match=f"executor_tls_{there}_file needs executor_tls_{missing}_file"):
        TlsPaths.of(files["cert"], files["key"], None, prefix="executor_")


def test_changed_files_are_taken_and_unchanged_ones_left_alone(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "1")
    files = TlsFiles.open(paths_in(made))
    before = files.material
    files.look()
    assert files.material is before
    replace(made, make_certificates(tmp_path / "2"))
    files.look()
    assert files.material.certificates == made.certificate("executor").read_bytes() != before.certificates
    assert files.material.ca == made.ca_file.read_bytes()


def test_folder_behind_a_link_is_taken_when_the_link_changes(tmp_path: Path) -> None:
    # Given files as Kubernetes lays out a secret: links through `..data`, which leads to a folder of one version
    first, second = make_certificates(tmp_path / "v1"), make_certificates(tmp_path / "v2")
    (tmp_path / "..data").symlink_to("v1")
    mounted = CertificateFolder(tmp_path / "mounted")
    mounted.folder.mkdir()
    for path in mounted.files:
        path.symlink_to(Path("..") / "..data" / path.name)
    files = TlsFiles.open(paths_in(mounted))
    assert files.material.ca == first.ca_file.read_bytes()
    # When the link is put on another folder, at once for all files
    (tmp_path / "..data.new").symlink_to("v2")
    (tmp_path / "..data.new").replace(tmp_path / "..data")
    files.look()
    # Then all of that folder holds
    assert files.material.ca == second.ca_file.read_bytes()


def test_broken_change_keeps_what_held_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, other = make_certificates(tmp_path / "1"), make_certificates(tmp_path / "2")
    files = TlsFiles.open(paths_in(made))
    before = files.material
    shutil.copy(other.certificate("executor"), made.certificate("executor"))
    with caplog.at_level(logging.INFO, "inflight.common.rpc.tls"):
        files.look()
        files.look()
        assert files.material is before
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "is not the key" in caplog.text
        # The key that belongs to it comes later: then both hold.
        shutil.copy(other.key("executor"), made.key("executor"))
        files.look()
    assert files.material.certificates == other.certificate("executor").read_bytes()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "PRIVATE KEY" not in caplog.text


def test_https_refuses_a_key_that_openssl_finds_too_small(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, weak = make_certificates(tmp_path), tmp_path / "weak.pem"
    weak_key = tmp_path / "weak.key"
    write_self_signed(weak, weak_key, key_bits=1024)
    # At start it is an error
    with pytest.raises(SettingError, match=r"tls_cert_file and tls_key_file: .*weak\.pem"):
        TlsFiles.open(TlsPaths(weak, weak_key)).ssl_context()
    # Later the previous certificate stays in use
    files = TlsFiles.open(TlsPaths(made.certificate("router"), made.key("router")))
    files.ssl_context()
    before = files.material
    weak.replace(made.certificate("router"))
    weak_key.replace(made.key("router"))
    with caplog.at_level(logging.INFO, "inflight.common.rpc.tls"):
        files.look()
        files.look()
    assert files.material is before
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_certs_writes_keys_for_its_owner_only_and_prints_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    assert main(["certs", str(folder), "--name", "llm.example", "--name", "spiffe://example/x", "--days", "2"]) == 0
    made = CertificateFolder(folder)
    for role in ("ca", "router", "executor"):
        assert stat.S_IMODE(made.key(role).stat().st_mode) == 0o600
    printed = capsys.readouterr().out
    for flag, value in (made.router_settings() | made.executor_settings()).items():
        assert f"{flag} {value}" in printed
    router = x509.load_pem_x509_certificate(made.certificate("router").read_bytes())
    names = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"inflight-router", "localhost", "llm.example"} == set(names.get_values_for_type(x509.DNSName))
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://example/x"]
    assert (router.not_valid_after_utc - datetime.now(UTC)).days == 1
    assert router.signature_hash_algorithm is not None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "router.pem already exists"),
        (["--days", "0"], "--days must be between"),
        (["--name", "ü.example"], "--name"),
    ],
)
def test_certs_refuses_by_name_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    there = tmp_path / "router.pem"
    if not flags:
        there.write_text("mine")
    assert main(["certs", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if flags else ["mine"])


def test_certs_says_that_the_directory_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["certs", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'} is a file; choose another directory\n"
