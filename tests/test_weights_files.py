"""Sources of a model's weights: files of its own folder, and the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snugfit.errors import ModelError
from snugfit.job.weights import INDEX, find_weights

SHARD = "model-00001-of-00001.safetensors"


def indexed(folder: Path, target: Path) -> Path:
    """Return a folder whose index names a link to `target`."""
    folder.mkdir(parents=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"weight": SHARD}}))
    (folder / SHARD).symlink_to(target)
    return folder


def test_an_index_that_names_a_link_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "model", tmp_path / "elsewhere" / "weights")
    with pytest.raises(ModelError, match=r"is a link to .*elsewhere/weights, outside the folder"):
        find_weights(folder)


def test_links_within_the_folder_and_of_the_hubs_cache_are_read(tmp_path: Path) -> None:
    own = indexed(tmp_path / "model", tmp_path / "model" / "blobs" / "weights")
    cached = tmp_path / "models--a--b"
    snapshot = indexed(cached / "snapshots" / "0123", cached / "blobs" / "weights")
    assert find_weights(own) == own
    assert find_weights(snapshot) == snapshot


@pytest.mark.parametrize(
    "text", ["[]", "null", '{"weight_map": {}}', '{"metadata": {}, "weight_map": []}', "{"]
)
def test_an_index_that_lacks_a_part_is_one_line(text: str, tmp_path: Path) -> None:
    """transformers raises a bare KeyError for an index without `metadata`."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="is not an index of weights: ") as refused:
        find_weights(tmp_path)
    assert "object is not" not in str(refused.value)
    assert "'metadata'" not in str(refused.value)
