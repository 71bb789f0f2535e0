"""The lab's own parts that need no boot."""

from __future__ import annotations

import base64
import gzip
import io
import os
import tarfile

import pytest

from tests.lab import lab


def console(status: str, packed: str) -> str:
    return (
        f"noise\n{lab.BEGIN}\nhello\n{lab.END} {status}\n{lab.OUT_BEGIN}\n{packed}\n{lab.OUT_END}\n"
        "[  9.9] reboot: Power down\n"
    )


def archive(**files: str) -> str:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return base64.encodebytes(gzip.compress(stream.getvalue())).decode().strip()


def test_answer_is_taken_from_the_console(tmp_path: object) -> None:
    packed = archive(result="42\n").replace("\n", "\n[    7.1] a kernel message between the lines\n", 1)
    found = lab._answer(console("3", packed), str(tmp_path), 1, "7.0")
    assert (found.output, found.status) == ("hello\n", 3)
    with open(os.path.join(str(tmp_path), "result")) as file:
        assert file.read() == "42\n"


def test_a_guest_that_died_says_why(tmp_path: object) -> None:
    with pytest.raises(lab.LabError, match="panic - not syncing: Fatal"):
        lab._answer(f"{lab.BEGIN}\n[ 6.6] Kernel panic - not syncing: Fatal\n", str(tmp_path), 1, "7.0")


def test_newest_release_of_a_series_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """By number, not by text, and a longer series is not taken for a shorter one."""
    listing = """\
linux-image-6.1.0-47-cloud-amd64 - x
linux-image-6.1.0-50-cloud-amd64-unsigned - x
linux-image-6.12.94+deb12-cloud-amd64 - x
linux-image-6.12.117+deb13-cloud-amd64 - x
linux-image-6.12.117+deb13-cloud-amd64-unsigned - x
linux-image-6.12.120+deb13-rt-amd64 - x
linux-image-6.12.119+deb13-amd64 - x
linux-binary-7.0.13+deb13-cloud-amd64 - x
linux-image-7.0.9+deb13-cloud-amd64 - x
"""
    unpacked: list[str] = []

    def unpack(release: str, arch: str, directory: str) -> None:
        unpacked.append(release)
        os.makedirs(directory + "/boot")
        for name in ("vmlinuz", "config"):
            open(f"{directory}/boot/{name}-{release}", "w").close()

    monkeypatch.setenv("LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(lab, "_index", lambda arch: [])
    monkeypatch.setattr(lab, "_run", lambda argv: listing)
    monkeypatch.setattr(lab, "_unpack_kernel", unpack)
    assert lab.fetch_kernel("6.1").release == "6.1.0-50-cloud-amd64"
    kernel = lab.fetch_kernel("6.12")
    assert kernel.release == "6.12.117+deb13-cloud-amd64"
    assert list(kernel.files) == ["/boot/config-6.12.117+deb13-cloud-amd64"]
    assert lab.fetch_kernel("7.0").release == "7.0.13+deb13-cloud-amd64"
    assert len(unpacked) == 3
    with pytest.raises(lab.NoKernelError, match=r"no 5\.10 kernel of flavour cloud-amd64"):
        lab.fetch_kernel("5.10")
    with pytest.raises(lab.NoKernelError, match=r"no 6\.12 kernel of flavour amd64-16k"):
        lab.fetch_kernel("6.12-16k")
