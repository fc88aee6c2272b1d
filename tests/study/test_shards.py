import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstages.study.shards import HEADER_BYTES, MAGIC, read_shard, write_shard


@given(st.lists(st.integers(0, 65535), max_size=200))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path, ids):
    path = tmp_path / "shard.bin"
    write_shard(path, np.array(ids, dtype=np.int64))
    assert read_shard(path).tolist() == ids
    assert path.stat().st_size == 1024 + 2 * len(ids)


def test_bytes_are_those_of_the_format(tmp_path):
    path = tmp_path / "shard.bin"
    write_shard(path, np.array([1, 258, 65535]))
    data = path.read_bytes()
    assert data[:12] == (20250320).to_bytes(4, "little") + (1).to_bytes(4, "little") + (3).to_bytes(4, "little")
    assert data[12:1024] == bytes(1012)
    assert data[1024:] == bytes([1, 0, 2, 1, 255, 255])


@pytest.mark.parametrize("ids", [[-1], [65536], [[1, 2]]])
def test_ids_that_do_not_fit(tmp_path, ids):
    with pytest.raises(ValueError, match="a shard holds one row of token ids from 0 to 65535"):
        write_shard(tmp_path / "shard.bin", np.array(ids))
    assert not (tmp_path / "shard.bin").exists()


@pytest.mark.parametrize("ids", [[0.5], [1.0], [True]])
def test_only_whole_numbers_are_ids(tmp_path, ids):
    with pytest.raises(ValueError, match="a shard holds one row of token ids from 0 to 65535"):
        write_shard(tmp_path / "shard.bin", np.array(ids))


@pytest.mark.parametrize(
    ("header", "length", "expected"),
    [
        ((MAGIC + 1, 1, 4), 8, f"magic {MAGIC + 1}, expected {MAGIC}: not a token shard"),
        ((MAGIC, 3, 4), 8, "shard version 3, expected 1 or 2"),
        ((MAGIC, 1, 4), 6, "1030 bytes, but its header announces 4 tokens, 1032 bytes"),
        ((MAGIC, 1, 4), 10, "1034 bytes, but its header announces 4 tokens, 1032 bytes"),
        ((MAGIC, 1, 4), 7, "1031 bytes, but its header announces 4 tokens, 1032 bytes"),
        ((MAGIC, 1, -4), 0, "its header announces -4 tokens"),
    ],
)
def test_wrong_header(tmp_path, header, length, expected):
    path = tmp_path / "shard.bin"
    integers = np.zeros(256, dtype="<i4")
    integers[:3] = header
    path.write_bytes(integers.tobytes() + bytes(length))
    with pytest.raises(ValueError) as caught:
        read_shard(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("size", [0, 11, HEADER_BYTES - 1])
def test_file_too_short_for_a_header(tmp_path, size):
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=f"{size} bytes, but a token shard opens with a header of 1024"):
        read_shard(path)
