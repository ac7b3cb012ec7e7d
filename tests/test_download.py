"""Downloads from a server on this machine: resume, verify, unpack safely, fail clearly."""

from __future__ import annotations

import hashlib
import io
import re
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import trees

from epcache.download import download_dataset, fetch, install
from epcache.errors import ConfigError, DataError, SpaceError
from epcache.layouts.info import Download
from epcache.manifest import load_manifest
from epcache.unpack import unpack

BODY = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(BODY).hexdigest()


@dataclass
class Site:
    """What the server serves, how it misbehaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    cut: int | None = None
    """Bytes of a body after which each connection breaks."""
    ignore_range: bool = False
    no_length: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range header of each request."""
    sent: list[int] = field(default_factory=list)
    """Body bytes of each answer."""


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            site.requests.append((self.path, asked))
            body = site.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = 0
            if asked and not site.ignore_range:
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
                if start >= len(body):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            if not site.no_length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            part = body[start:][: site.cut]
            self.wfile.write(part)
            site.sent.append(len(part))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


def tar_of(members: dict[str, bytes | tarfile.TarInfo], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
            else:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def link(kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo()
    entry.type, entry.linkname = kind, target
    return entry


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in members.items():
            bundle.writestr(name, content)
    return buffer.getvalue()


def cub_archive(folder: Path) -> bytes:
    """A tgz of a small CUB tree, with the loose file that the real one has beside it."""
    trees.cub200(folder / "CUB_200_2011", trees.cub_rows()[:8])
    files = [path for path in folder.rglob("*") if path.is_file()]
    members = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return tar_of({"attributes.txt": b"1 x", **members})


def offered(site: Site, archive: bytes, name: str = "CUB_200_2011.tgz", **changes):
    """The real cub200 manifest with the server's archive for its download."""
    site.files[f"/{name}"] = archive
    entry = Download(
        url=f"{site.url}/{name}",
        algorithm="md5",
        checksum=hashlib.md5(archive).hexdigest(),
        members=("CUB_200_2011",),
        into="",
    )
    rows = trees.cub_rows()[:8]
    counts = {s: sum(row["split"] == s for row in rows) for s in ("train", "test")}
    info = trees.small("cub200", num_classes=1, **counts)
    return replace(info, downloads=(replace(entry, **changes),))


def test_a_file_is_fetched_and_verified(site, tmp_path):
    """One request brings the file under its name, and no partial stays."""
    site.files["/f.bin"] = BODY
    fetch(f"{site.url}/f.bin", tmp_path / "new" / "f.bin", "md5", MD5)
    assert (tmp_path / "new" / "f.bin").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["f.bin"]
    assert site.requests == [("/f.bin", None)]


def test_sha256_is_verified_too(site, tmp_path):
    """The other checksum works alike."""
    site.files["/f.bin"] = BODY
    fetch(f"{site.url}/f.bin", tmp_path / "f", "sha256", hashlib.sha256(BODY).hexdigest())
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_partial_file_is_resumed(site, tmp_path):
    """Only the missing bytes are asked for and sent."""
    site.files["/f.bin"] = BODY
    (tmp_path / "f.partial").write_bytes(BODY[:100_000])
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f").read_bytes() == BODY
    assert site.requests == [("/f.bin", "bytes=100000-")]
    assert site.sent == [200_000]


def test_a_server_that_ignores_ranges_restarts(site, tmp_path):
    """A whole file in answer to a range replaces what was there."""
    site.files["/f.bin"] = BODY
    site.ignore_range = True
    (tmp_path / "f.partial").write_bytes(b"old" * 1000)
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f").read_bytes() == BODY
    assert site.sent == [300_000]


@pytest.mark.parametrize("name", ["f.partial", "f"])
def test_a_complete_file_asks_the_server_nothing(name, site, tmp_path):
    """A file that already has the checksum is only given its name."""
    (tmp_path / name).write_bytes(BODY)
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f").read_bytes() == BODY
    assert site.requests == []


def test_a_file_put_there_by_hand_is_completed(site, tmp_path):
    """A cut-off file under the final name is resumed, not trusted."""
    site.files["/f.bin"] = BODY
    (tmp_path / "f").write_bytes(BODY[:299_999])
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert site.sent == [1]


def test_a_broken_connection_is_taken_up_again(site, tmp_path):
    """As long as each connection brings something, the transfer goes on where it broke."""
    site.files["/f.bin"] = BODY
    site.cut = 120_000
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f").read_bytes() == BODY
    assert [asked for _, asked in site.requests] == [None, "bytes=120000-", "bytes=240000-"]
    assert site.sent == [120_000, 120_000, 60_000]


def test_a_connection_that_brings_nothing_ends_the_run(site, tmp_path):
    """What came stays for the next run, which resumes it."""
    site.files["/f.bin"] = BODY
    (tmp_path / "f.partial").write_bytes(BODY[:7])
    site.cut = 0
    with pytest.raises(DataError, match="the connection broke after 7 bytes; run again to resume"):
        fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f.partial").read_bytes() == BODY[:7]
    site.cut = None
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_server_without_lengths_works(site, tmp_path):
    """Without Content-Length the end of the connection is the end of the file."""
    site.files["/f.bin"] = BODY
    site.no_length = True
    fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize(
    "partial",
    [b"", BODY[:1000], BODY[:1000] + b"?" * 299_000, BODY + b"?"],
    ids=["nothing", "part", "wrong", "long"],
)
def test_a_wrong_checksum_removes_the_file(partial, site, tmp_path):
    """Whatever was there before, a wrong file goes, and both digests are shown."""
    site.files["/f.bin"] = BODY[:-1] + bytes([BODY[-1] ^ 1])
    (tmp_path / "f.partial").write_bytes(partial)
    with pytest.raises(
        DataError, match=rf"wrong md5, expected {MD5}, got [0-9a-f]{{32}}"
    ) as caught:
        fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert list(tmp_path.iterdir()) == []
    assert "\n" not in str(caught.value)


def test_a_missing_page_is_one_line(site, tmp_path):
    """HTTP 404 is an error with the address, the status and what to do."""
    with pytest.raises(DataError) as caught:
        fetch(f"{site.url}/gone.bin", tmp_path / "gone.bin", "md5", MD5)
    for word in [f"{site.url}/gone.bin", "HTTP 404", "by hand", str(tmp_path / "gone.bin")]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dead_server_is_one_line(site, tmp_path):
    """A refused connection is an error with address and reason."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as dead:
        port = dead.server_port
    with pytest.raises(DataError, match=rf"127.0.0.1:{port}/f cannot be fetched: .*refused"):
        fetch(f"http://127.0.0.1:{port}/f", tmp_path / "f", "md5", MD5)


def test_only_web_addresses_are_fetched(tmp_path):
    """A file:// address in a manifest is refused."""
    with pytest.raises(ConfigError, match="not an http or https address"):
        fetch("file:///etc/hostname", tmp_path / "f", "md5", MD5)


def test_a_full_disk_is_known_before_the_transfer(site, tmp_path, monkeypatch):
    """A file that does not fit is not begun."""
    site.files["/f.bin"] = BODY
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(SpaceError, match="needs 300,000 bytes"):
        fetch(f"{site.url}/f.bin", tmp_path / "f", "md5", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_is_downloaded_and_read(site, tmp_path, monkeypatch):
    """`download=True` fetches, unpacks and reads; a second run asks the server nothing."""
    info = offered(site, cub_archive(tmp_path / "made"))
    monkeypatch.setattr("epcache.manifest.dataset_info", lambda name: info)
    lines: list[str] = []
    folder = tmp_path / "data"
    one = load_manifest("cub200", data_dir=folder, download=True, progress=lines.append)
    two = load_manifest("cub200", data_dir=folder, download=True)
    assert one.digest == two.digest
    assert len(site.requests) == 1
    assert [line.split()[0] for line in lines] == ["fetching", "unpacking"]
    assert [path.name for path in folder.iterdir()] == ["CUB_200_2011"]


def test_download_into_the_shared_folder(site, tmp_path, monkeypatch):
    """Without data_dir the data come to $EPCACHE_DATA/<name>."""
    info = offered(site, cub_archive(tmp_path / "made"))
    monkeypatch.setattr("epcache.manifest.dataset_info", lambda name: info)
    monkeypatch.setenv("EPCACHE_DATA", str(tmp_path / "shared"))
    root = load_manifest("cub200", download=True).root
    assert root == tmp_path / "shared" / "cub200" / "CUB_200_2011"


def test_a_folder_named_like_the_data_is_the_data(site, tmp_path):
    """--data-dir .../CUB_200_2011 does not nest a second one."""
    download_dataset(offered(site, cub_archive(tmp_path / "made")), tmp_path / "CUB_200_2011")
    assert (tmp_path / "CUB_200_2011" / "images.txt").is_file()


def test_without_a_checksum_there_is_no_download(tmp_path):
    """Such data sets say so, and where to obtain the data."""
    with pytest.raises(ConfigError, match=r"cannot be downloaded.*image-net\.org"):
        load_manifest("imagenet1k", data_dir=tmp_path / "none", download=True)


def test_nothing_is_fetched_unasked(site, tmp_path, monkeypatch):
    """Without `download` missing data are an error, and the server hears nothing."""
    info = offered(site, cub_archive(tmp_path / "made"))
    monkeypatch.setattr("epcache.manifest.dataset_info", lambda name: info)
    with pytest.raises(DataError, match="no such folder"):
        load_manifest("cub200", data_dir=tmp_path / "data")
    assert site.requests == []


def test_only_what_is_missing_is_fetched(site, tmp_path):
    """A part that is there is not fetched again; a member may lie deeper and go elsewhere."""
    info = offered(site, zip_of({"Partitions/Training_01.txt": b"list"}), "lists.zip")
    lists = replace(info.downloads[0], members=("Training_01.txt",), into="SUN397")
    there = replace(info.downloads[0], url=f"{site.url}/never.tgz", members=("SUN397",))
    (tmp_path / "SUN397").mkdir()
    download_dataset(replace(info, downloads=(there, lists)), tmp_path)
    assert site.requests == [("/lists.zip", None)]
    assert (tmp_path / "SUN397" / "Training_01.txt").read_bytes() == b"list"
    assert not (tmp_path / "downloads").exists()


def test_a_member_that_the_archive_lacks_is_named(site, tmp_path):
    """An archive without the promised member leaves nothing behind but itself."""
    info = offered(site, tar_of({"other/x": b""}))
    with pytest.raises(DataError, match="0 members CUB_200_2011, expected one"):
        download_dataset(info, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


def test_a_kill_while_unpacking_leaves_no_half_tree(site, tmp_path, monkeypatch):
    """The members appear by rename, so a stop before it leaves none; the next run is whole."""
    info = offered(site, cub_archive(tmp_path / "made"))
    data = tmp_path / "data"

    def stop(archive, folder):
        (folder / "CUB_200_2011").mkdir()
        assert not (data / "CUB_200_2011").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("epcache.download.unpack", stop)
        with pytest.raises(KeyboardInterrupt):
            download_dataset(info, data)
    assert not (data / "CUB_200_2011").exists()
    download_dataset(info, data)
    assert len(site.requests) == 1  # the verified archive was still there
    assert (data / "CUB_200_2011" / "images.txt").is_file()


def test_two_runs_at_once_fetch_once(site, tmp_path):
    """Processes that start together wait for the first and find its work done."""
    info = offered(site, cub_archive(tmp_path / "made"))
    threads = [
        threading.Thread(target=download_dataset, args=(info, tmp_path / "data")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(site.requests) == 1


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
def test_archives_of_each_kind_unpack(mode, tmp_path):
    """Plain and compressed tars and zips give the same files."""
    members = {"d/a.txt": b"a", "d/e/b.txt": b"b"}
    (tmp_path / "archive").write_bytes(zip_of(members) if mode == "zip" else tar_of(members, mode))
    (tmp_path / "out").mkdir()
    unpack(tmp_path / "archive", tmp_path / "out")
    out = {p.relative_to(tmp_path / "out").as_posix() for p in tmp_path.rglob("out/**/*.txt")}
    assert out == set(members)


def test_links_inside_an_archive_are_kept(tmp_path):
    """A link to another member is harmless and works."""
    members = {
        "d/a.txt": b"a",
        "d/same.txt": link(tarfile.SYMTYPE, "a.txt"),
        "d/hard.txt": link(tarfile.LNKTYPE, "d/a.txt"),
    }
    (tmp_path / "archive").write_bytes(tar_of(members))
    (tmp_path / "out").mkdir()
    unpack(tmp_path / "archive", tmp_path / "out")
    for name in ("same", "hard"):
        assert (tmp_path / "out" / "d" / f"{name}.txt").read_bytes() == b"a"


@pytest.mark.parametrize(
    "archive",
    [
        tar_of({"ok": b"", "/tmp/escaped": b"x"}),
        tar_of({"ok": b"", "../escaped": b"x"}),
        tar_of({"ok": b"", "a/../../escaped": b"x"}),
        tar_of({"a": link(tarfile.SYMTYPE, "/tmp"), "a/escaped": b"x"}),
        tar_of({"a": link(tarfile.SYMTYPE, "..")}),
        tar_of({"d/a": link(tarfile.SYMTYPE, "../../x")}),
        tar_of({"a": link(tarfile.SYMTYPE, "."), "a/b": link(tarfile.SYMTYPE, "..")}),
        tar_of({"d/a": link(tarfile.SYMTYPE, "..")} | {"b": link(tarfile.SYMTYPE, "d/a/..")}),
        tar_of({"b": link(tarfile.SYMTYPE, "d/a/..")} | {"d/a": link(tarfile.SYMTYPE, "..")}),
        tar_of({"a": link(tarfile.SYMTYPE, "b"), "c": link(tarfile.SYMTYPE, "a/x")}),
        tar_of({"a": link(tarfile.LNKTYPE, "../outside")}),
        tar_of({"a": link(tarfile.LNKTYPE, "/etc/hostname")}),
        tar_of({"a": link(tarfile.CHRTYPE)}),
        tar_of({"a": link(tarfile.FIFOTYPE)}),
        zip_of({"ok": b"", "/tmp/escaped": b"x"}),
        zip_of({"ok": b"", "../escaped": b"x"}),
        zip_of({"ok": b"", "a\\..\\..\\escaped": b"x"}),
        zip_of({"ok": b"", "C:\\escaped": b"x"}),
    ],
    ids=[f"archive{number}" for number in range(18)],  # gzip's bytes hold the time of day
)
def test_archives_that_lead_outside_are_refused(archive, tmp_path):
    """Absolute paths, `..`, links outside or through links, devices: nothing comes of them."""
    outside = {path.name for path in Path("/tmp").glob("escaped*")}
    data = tmp_path / "data" / "inner"
    data.mkdir(parents=True)
    (tmp_path / "evil.tgz").write_bytes(archive)
    entry = Download(url="", algorithm="md5", checksum="", members=("ok",), into="")
    with pytest.raises(DataError, match=r"evil\.tgz: member .* nothing of it was kept"):
        install(tmp_path / "evil.tgz", entry, data)
    assert list(data.iterdir()) == []
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["inner"]
    assert {path.name for path in Path("/tmp").glob("escaped*")} == outside


def test_a_link_in_a_zip_is_refused(tmp_path):
    """Python's zipfile would write the target's name as a file: refuse instead."""
    entry = zipfile.ZipInfo("a")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as bundle:
        bundle.writestr(entry, "/etc")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="member 'a' is a link or device"):
        unpack(tmp_path / "evil.zip", tmp_path / "out")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_larger_than_the_disk_is_refused(kind, tmp_path, monkeypatch):
    """What members declare is held against the free space before anything of it is written."""
    body = bytes(1 << 20)
    content = tar_of({"zeros": body}) if kind == "tar" else zip_of({"zeros": body})
    (tmp_path / "bomb").write_bytes(content)
    (tmp_path / "out").mkdir()
    free = (64 << 20) + 1000
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free}))
    with pytest.raises(SpaceError, match=r"1,048,576 bytes or more .* room for 1,000"):
        unpack(tmp_path / "bomb", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["tar", "zip", "text"])
def test_a_damaged_archive_is_one_line(kind, tmp_path):
    """Cut-off or foreign archives are data errors, not tracebacks."""
    whole = {"tar": tar_of({"a": BODY}), "zip": zip_of({"a": BODY}), "text": b"hello" * 99}[kind]
    (tmp_path / "x").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"x is (damaged|neither)"):
        unpack(tmp_path / "x", tmp_path / "out")
